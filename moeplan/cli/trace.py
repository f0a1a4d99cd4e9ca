"""`trace`: is this trace sound, what does it do, make one, convert one, take one."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeplan.cli.common import Json, Models, emit, note, store
from moeplan.errors import MoeplanError

if TYPE_CHECKING:
    from moeplan.traffic.check import Check
    from moeplan.traffic.fix import Fixed
    from moeplan.traffic.trace import RoutingTrace

DEFECTIVE = 3
"""Exit status of a defective trace."""


def register(app: typer.Typer) -> None:
    """Add `trace check`, and the other `trace` commands."""
    sub = typer.Typer(help="Routing traces: check, describe, make, convert, record.", no_args_is_help=True)
    sub.command("check")(check)
    for name in ("stats", "synth", "import", "record"):
        module = f"moeplan.cli.trace_{name}"
        if find_spec(module) is not None:
            getattr(import_module(module), f"register_{name}")(sub)
    app.add_typer(sub, name="trace")


def check(
    file: Annotated[Path, typer.Argument(help="Trace directory or npz.")],
    model: Annotated[str | None, typer.Option(help="Model card that the trace must agree with.")] = None,
    fix: Annotated[Path | None, typer.Option(help="Folder to write a cleaned copy to, where a repair is safe.")] = None,
    models: Models = None,
    as_json: Json = False,
) -> None:
    """Find what is wrong with a routing trace. Exit status 0: nothing, 3: defects."""
    from moeplan.traffic.check import check_trace
    from moeplan.traffic.fix import fix_trace
    from moeplan.traffic.model import load_card
    from moeplan.traffic.trace import open_trace

    if fix is not None and fix.exists():
        raise MoeplanError(f"--fix {fix}: exists already")
    card = load_card(model, store(models)) if model else None
    trace = open_trace(file)
    found = check_trace(trace, card)
    fixed = fix_trace(trace, found, fix, card) if fix is not None else None
    if as_json:
        emit(_document(trace, found, fixed, fix))
    else:
        _print(trace, found, fixed, fix)
    if not found.ok:
        raise typer.Exit(DEFECTIVE)


def _findings(found: "Check") -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [asdict(one) for one in found.findings]


def _document(trace: "RoutingTrace", found: "Check", fixed: "Fixed | None", folder: Path | None) -> dict[str, Any]:
    document = {
        "ok": found.ok,
        "name": trace.name,
        "rows": trace.rows,
        "requests": trace.requests,
        "layers": trace.layers,
        "top_k": trace.top_k,
        "experts": trace.experts,
        "findings": _findings(found),
    }
    if fixed is not None:
        left = fixed.check
        written = (
            {"path": str(folder), "ok": left.ok, "findings": _findings(left)} if left is not None else {"path": None}
        )
        document["fixed"] = written | {"removed": list(fixed.removed)}
    return document


def _print(trace: "RoutingTrace", found: "Check", fixed: "Fixed | None", folder: Path | None) -> None:
    size = f"top-{trace.top_k} of {trace.experts}, {trace.layers} layers"
    typer.echo(f"{trace.source}: {trace.rows} rows of {trace.requests} requests, {size}")
    for one in found.findings:
        where = "all layers" if one.layer is None else f"layer {one.layer}"
        typer.echo(
            f"{one.severity}: {one.code}: {where}, {one.rows} rows from {one.first_row}: {one.message}; {one.remedy}"
        )
    if found.ok:
        typer.echo("no defects")
    if fixed is not None and fixed.check is None:
        note("no safe repair: nothing written")
    elif fixed is not None and fixed.check is not None:
        for line in fixed.removed:
            typer.echo(f"removed: {line}")
        rest = "passes" if fixed.check.ok else "has " + ", ".join(sorted({one.code for one in fixed.check.findings}))
        typer.echo(f"{folder}: written, {rest}")
