"""`audit`: what an engine does at each token count, and which gate decided."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moeplan.cli.common import Calibrations, Cohorts, Json, Models, Seed, Traces, emit, numbers, store, table
from moeplan.errors import MoeplanError
from moeplan.units import percent, seconds

if TYPE_CHECKING:
    from moeplan.planning.audit import Costs
    from moeplan.store import Store


def register(app: typer.Typer) -> None:
    """Add `audit`."""
    app.command("audit")(audit)


def audit(  # noqa: PLR0913, PLR0917 - one argument an option
    model: Annotated[str, typer.Argument(help="Model card, config.json or card.toml.")],
    engine: Annotated[str, typer.Option(help="mlx-lm, mlxcel, sglang or vllm.")],
    device: Annotated[
        str | None, typer.Option(help="Calibrated device: its backend, and times beside the paths.")
    ] = None,
    backend: Annotated[
        Literal["metal", "cuda", "rocm", "cpu"] | None, typer.Option(help="Backend, where no device names it.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Token counts: 1,2,4 or 1-8.")] = "1,2,4,8,16,32,64",
    relax: Annotated[list[str] | None, typer.Option(help="Another value of a call-site gate: 'token gate=8'.")] = None,
    routing: Annotated[str, typer.Option(help="Of the times: uniform, popularity:NAME, trace:FILE, ...")] = "uniform",
    cohort: Cohorts = "independent",
    models: Models = None,
    traces: Traces = None,
    calibration: Calibrations = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """The path that an engine's own gates choose, the gate that decided, and its cost against the best known path."""
    from moeplan.cost.device import load_device
    from moeplan.engines.books import rule_book
    from moeplan.planning.audit import audit_document, backend_of
    from moeplan.planning.prices import Assumption
    from moeplan.traffic.model import load_card
    from moeplan.traffic.routing import check_cohort, parse_routing

    where = store(models, traces, calibration)
    card = load_card(model, where)
    card.require_moe()
    assumption = Assumption(parse_routing(routing, where), cohort, seed)
    check_cohort(assumption.routing, cohort, steps=False)
    named = None if device is None else backend_of(load_device(where, device))
    costs, why = (None, None) if device is None else _costs(where, model, device, assumption)
    groups = []
    for shape, layers in sorted(card.groups(), key=lambda group: -group[1]):
        book = rule_book(engine, backend or named, shape)
        document = audit_document(book, shape, numbers(tokens, "--tokens"), costs, _values(relax or []))
        groups.append({"layers": layers, "shape": shape.to_dict()} | document)
    first = {"model": card.name, "device": device, "routing": routing, "cohort": cohort}
    whole = first | {key: value for key, value in groups[0].items() if key not in ("layers", "shape")}
    whole |= {"groups": groups, "times_reason": why}
    emit(whole) if as_json else _show(whole)


def _costs(where: "Store", model: str, device: str, assumption: Any) -> "tuple[Costs | None, str | None]":
    """Calibrated layers of the device, or why there are none: the gates can be audited without."""
    from moeplan.planning.audit import Costs
    from moeplan.planning.setting import layer_groups
    from moeplan.traffic.model import load_card

    try:
        return Costs(layer_groups(where, load_card(model, where), device, None), assumption), None
    except MoeplanError as bad:
        return None, str(bad)


def _values(words: list[str]) -> dict[str, int]:
    found = {}
    for word in words:
        name, _, value = word.rpartition("=")
        if not name or not value.isdecimal() or len(value) > 9:
            raise MoeplanError(f"--relax {word}: expected GATE=NUMBER, e.g. 'token gate=8'")
        found[name.strip()] = int(value)
    return found


def _declines(rows: list[dict[str, Any]]) -> list[str]:
    """A line for every gate that turned a path away, with the token counts and the first reason."""
    found: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        for no in row["declined"]:
            found.setdefault((no["path"], no["gate"]), []).append((row["tokens"], no))
    return [
        f"{path} declined by {gate} at {', '.join(str(tokens) for tokens, _ in every)} tokens:"
        f" {every[0][1]['reason']} ({every[0][1]['source']})"
        for (path, gate), every in found.items()
    ]


def _show(document: dict[str, Any]) -> None:
    typer.echo(f"{document['model']}, {document['engine']} on {document['backend']}\n")
    for group in document["groups"]:
        if len(document["groups"]) > 1:
            typer.echo(f"{group['layers']} layers:")
        rows = []
        for row in group["rows"]:
            timed = [
                "-" if row["seconds"] is None else seconds(row["seconds"]),
                row["best_path"] or "-",
                "-" if row["regret"] is None else percent(row["regret"]),
            ]
            rows.append([row["path"], str(row["tokens"]), row["kernel"] or "-", *timed])
        table(["path", "tokens", "kernel", "time", "best known", "costs"], rows)
        typer.echo("")
        for line in _declines(group["rows"]):
            typer.echo(line)
        for one in group["relaxed"]:
            stop = f" at {one['tokens']} tokens: {one['stopped_by']} ({one['place']}), {one['reason']}; {one['source']}"
            typer.echo(f"{one['gate']} = {one['value']}: {one['outcome']}" + (stop if "stopped_by" in one else ""))
    if document["times_reason"]:
        typer.echo(f"\nno times: {document['times_reason']}")
    for note in document["notes"]:
        typer.echo(f"note: {note}")
