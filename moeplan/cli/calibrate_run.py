"""`moeplan calibrate run`: measure this machine into a journal."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeplan import units
from moeplan.cli.common import (
    Calibrations,
    Json,
    Models,
    Seed,
    Traces,
    chain_of,
    emit,
    note,
    numbers,
    progress_bar,
    store,
    table,
)
from moeplan.errors import MoeplanError
from moeplan.store import Store

if TYPE_CHECKING:
    from moeplan.cost.samples import SampleFile
    from moeplan.runners.spec import MeasureRequest, RunnerSpec

DEFAULT_TOKENS = "1,2,4,8,16,32,64,128"


def run(  # noqa: PLR0913  a command has one argument an option
    *,
    runner: Annotated[str, typer.Option(help="mlx, triton, python (with --kernel) or exec (with --command).")],
    device: Annotated[str, typer.Option(help="Name of this machine: the folder under -o.")],
    model: Annotated[str, typer.Option(help="Model card, or a config.json.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of calibrations to write to.")],
    tokens: Annotated[str, typer.Option(help="Token counts: 1,2,4 or 1-8.")] = DEFAULT_TOKENS,
    routing: Annotated[str, typer.Option(help="Routing arms.")] = "identical,disjoint,uniform",
    path: Annotated[str, typer.Option(help="Kernel paths; all that the runner offers, `link` excepted.")] = "",
    rounds: Annotated[int, typer.Option(min=1, max=10000, help="Times each arm is timed.")] = 8,
    chain: Annotated[
        str, typer.Option(help="Layers of the short and long chain (12,48; above 128 tokens 4,12), or `fill`.")
    ] = "",
    kernel: Annotated[str, typer.Option(help="Your Python kernel: package.module:object.")] = "",
    command: Annotated[str, typer.Option(help="Your program that speaks the exec protocol.")] = "",
    engine_version: Annotated[str, typer.Option(help="Recorded version, where the runner has none.")] = "",
    timeout: Annotated[float, typer.Option(min=1, max=86400, help="Longest time of one arm, seconds.")] = 900.0,
    seed: Seed = 0,
    models: Models = None,
    traces: Traces = None,
    calibration: Calibrations = None,
    as_json: Json = False,
) -> None:
    """Time kernel paths on this machine; start it again to continue where it was stopped."""
    from moeplan.runners.session import describe, measure
    from moeplan.runners.spec import RunnerSpec

    spec = RunnerSpec(runner, kernel, command, engine_version, timeout)
    found = store(models, traces, calibration)
    _plain(device, "--device")
    _writable(output)
    facts = describe(spec)
    _plain(str(facts["engine_version"]), "engine version")
    names = [name for name in path.split(",") if name] or [name for name in facts["paths"] if name != "link"]
    if unknown := [name for name in names if facts["paths"] and name not in facts["paths"]]:
        raise MoeplanError(f"--path {unknown[0]}: the runner offers {', '.join(facts['paths'])}")
    if not names:
        raise MoeplanError("--path: this program does not name its paths, so name them here")
    layout = (names, numbers(tokens, "--tokens"), [name for name in routing.split(",") if name], chain)
    request = _request((device, model, rounds, seed), layout, found, output)
    journal = output / device / f"{spec.runner}-{facts['engine_version']}" / f"{request.model}.jsonl"
    with progress_bar() as progress:
        samples = measure(spec, request, journal, progress)
    _report(samples, spec, as_json)


def _request(
    what: tuple[str, str, int, int],
    layout: tuple[list[str], list[int], list[str], str],
    found: Store,
    output: Path,
) -> "MeasureRequest":
    from moeplan.runners.arms import filled, grid
    from moeplan.runners.spec import MeasureRequest
    from moeplan.traffic.model import load_card
    from moeplan.traffic.routing import parse_routing

    device, model, rounds, seed = what
    names, tokens, routings, chain = layout
    card = load_card(model, found)
    card.require_moe()
    shapes = [shape for shape, _ in sorted(card.groups(), key=lambda group: -group[1])]
    known = {name: parse_routing(name, found) for name in [*routings, "balanced"]}
    for said in {arm.note(shape.experts, shape.top_k) for arm in known.values() for shape in shapes} - {None}:
        note(f"note: {said}")
    fixed = None if chain in ("", "fill") else chain_of(chain)
    arms = [arm for shape in shapes for arm in grid(names, shape, tokens, routings, seed, fixed)]
    cache = _cache_bytes(device, found, output)
    if chain == "fill":
        if cache is None:
            raise MoeplanError(f"--chain fill: {output / device / 'device.toml'} gives no last_level_cache")
        arms = [filled(arm, known[arm.routing], cache) for arm in arms]
    return MeasureRequest(device, card.name, shapes[0], tuple(arms), rounds, seed, cache, found)


def _cache_bytes(device: str, found: Store, output: Path) -> float | None:
    from moeplan.cost.device import load_device, read_device

    own = output / device / "device.toml"
    if own.is_file():
        facts = read_device(own).facts
    elif found.find("calibration", f"{device}/device.toml"):
        facts = load_device(found, device).facts
    else:
        facts = {}
    if "last_level_cache" not in facts:
        note(f"note: no last_level_cache in {own}: cache-resident points cannot be flagged")
        return None
    return facts["last_level_cache"].value


def _plain(name: str, what: str) -> None:
    """A name that becomes a folder must not lead anywhere else."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}", name):
        raise MoeplanError(f"{what} {name!r}: expected letters, digits, '.', '_', '+' and '-'")


def _writable(output: Path) -> None:
    import os

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as bad:
        raise MoeplanError(f"-o {output}: cannot write: {bad.strerror or bad}") from bad
    if not os.access(output, os.W_OK | os.X_OK):
        raise MoeplanError(f"-o {output}: cannot write: Permission denied")


def _report(samples: "SampleFile", spec: "RunnerSpec", as_json: bool) -> None:
    lost = [
        {"arm": arm, "outcome": outcome, "reason": reason}
        for outcome, arms in (("failed", samples.failed), ("declined", samples.declined))
        for arm, reason in arms.items()
    ]
    if as_json:
        rows = [
            {"path": s.path, "tokens": s.tokens, "routing": s.routing, "median_s": s.median, "spread_s": s.spread}
            for s in samples.samples
        ]
        emit({"journal": str(samples.path), "runner": spec.runner, "samples": rows, "lost": lost})
    else:
        typer.echo(f"{samples.path}: {len(samples.samples)} arms, seconds a layer")
        rows_text = [
            [f"{s.path} {s.routing}", str(s.tokens), units.seconds(s.median), units.seconds(s.spread)]
            for s in sorted(samples.samples, key=lambda s: (s.path, s.routing, s.tokens))
        ]
        table(["path, routing", "tokens", "median", "spread"], rows_text)
    for line in lost:
        note(f"{line['outcome']}: {line['arm']}: {line['reason']}")
    if not samples.samples:
        raise typer.Exit(3)
