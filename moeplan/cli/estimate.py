"""`estimate`: the time of one layer or step by term, and what limits it."""

from typing import Annotated, Any

import typer

from moeplan.cli.common import Calibrations, Cohorts, Json, Models, Seed, Traces, emit, store, table
from moeplan.units import percent, seconds


def register(app: typer.Typer) -> None:
    """Add `estimate`."""
    app.command("estimate")(estimate)


def estimate(  # noqa: PLR0913, PLR0917 - one argument an option
    model: Annotated[str, typer.Argument(help="Model card, config.json or card.toml.")],
    device: Annotated[str, typer.Option(help="Calibrated device.")],
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Rows of the call.")] = 1,
    path: Annotated[str | None, typer.Option(help="Kernel path; the fastest calibrated one if not given.")] = None,
    runner: Annotated[str | None, typer.Option(help="Take the calibration of this runner, e.g. triton.")] = None,
    step: Annotated[bool, typer.Option("--step/--layer", help="All MoE layers, or one.")] = False,
    routing: Annotated[str, typer.Option(help="uniform, popularity:NAME, trace:FILE, ...")] = "uniform",
    cohort: Cohorts = "independent",
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help="Let fits leave their range, labelled.")] = False,
    models: Models = None,
    traces: Traces = None,
    calibration: Calibrations = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Time by term with shares, the source of each number, and what limits it: expert path only."""
    from moeplan.planning.estimate import estimate_document, priced
    from moeplan.planning.prices import Assumption
    from moeplan.planning.setting import layer_groups
    from moeplan.traffic.model import load_card
    from moeplan.traffic.routing import check_cohort, parse_routing

    where = store(models, traces, calibration)
    card = load_card(model, where)
    card.require_moe()
    assumption = Assumption(parse_routing(routing, where), cohort, seed, extrapolate)
    check_cohort(assumption.routing, cohort, steps=False)
    found = priced(layer_groups(where, card, device, runner), path, tokens, assumption)
    best = found[0]
    document = {"model": card.name} | estimate_document(best.groups, best.path, tokens, assumption, step)
    document["paths"] = [
        {"path": one.path, "calibration": one.groups[0].calibration.where, "seconds_all_layers": one.seconds}
        for one in found
    ]
    emit(document) if as_json else _show(document)


def _show(document: dict[str, Any]) -> None:
    what = f"{document['layers']} MoE layers" if document["layers"] > 1 else "one MoE layer"
    band = f"{seconds(document['low'])} .. {seconds(document['high'])}"
    typer.echo(f"{document['model']} on {document['calibration']}, {what}, {document['tokens']} tokens\n")
    rows = [
        [term["name"], seconds(term["seconds"]), percent(term["share"]).lstrip("+"), term["source"]]
        for term in document["terms"]
    ]
    rows.append([f"`{document['path']}` in all", seconds(document["seconds"]), "", document["source"]])
    table(["term", "time", "share", "source"], rows)
    first = document["paths"][0]["seconds_all_layers"]
    typer.echo(f"\n90 % band {band}; limited by {document['limited_by']}: {document['limit']}")
    if document["floor_s"] is not None:
        typer.echo(f"a layer's distinct planes alone, read once at full bandwidth: {seconds(document['floor_s'])}")
    others = [f"{one['path']} {one['seconds_all_layers'] / first:.2f}x" for one in document["paths"][1:]]
    if others:
        typer.echo(f"slower here: {', '.join(others)}")
    typer.echo(document["scope"])
