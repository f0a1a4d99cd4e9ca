"""`trace stats`: what a routing trace does to a batch."""

from pathlib import Path
from typing import Annotated, Any

import typer

from moeplan.cli.common import Json, Seed, Traces, emit, note, numbers, store, table
from moeplan.errors import MoeplanError


def register_stats(sub: typer.Typer) -> None:
    """Add `stats` to the `trace` group."""
    sub.command("stats")(stats)


def stats(  # noqa: PLR0913, PLR0917 - one argument an option
    file: Annotated[Path, typer.Argument(help="Trace folder or .npz.")],
    tokens: Annotated[str, typer.Option(help="Sequences that decode together: 1,2,4 or 1-8.")] = "1,2,4,8,16,32",
    window: Annotated[str, typer.Option(help="Consecutive tokens of one request.")] = "1,2,4,8,16",
    cohort: Annotated[
        str,
        typer.Option(
            help="independent, identical, staggered:N, same-domain[:NAME], stream:N or 8xindependent+2xstream:4."
        ),
    ] = "independent",
    block_tokens: Annotated[str, typer.Option(help="Tokens of the sorted blocks.")] = "64,128,256,384",
    block_rows: Annotated[str, typer.Option(help="Rows of a sorted block.")] = "16,32,64,128",
    draws: Annotated[int, typer.Option(help="Cohorts drawn a batch size.", min=1)] = 5000,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this png, svg or pdf (needs matplotlib).")] = None,
    traces: Traces = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Distinct experts of a batch, streams, skew and sorted blocks of a routing trace."""
    from moeplan.traffic.routing import parse_routing
    from moeplan.traffic.stats import StatsPlan, stats_document
    from moeplan.traffic.stats_plot import check_plot, plot_stats
    from moeplan.traffic.trace import load_trace

    if seed < 0:
        raise MoeplanError(f"--seed {seed}: must not be negative")
    if plot is not None:
        check_plot(plot)
    named = None if file.exists() else parse_routing(f"trace:{file}", store(traces=traces)).trace
    plan = StatsPlan(
        tuple(numbers(tokens, "--tokens")),
        tuple(numbers(window, "--window")),
        tuple(numbers(block_tokens, "--block-tokens")),
        tuple(numbers(block_rows, "--block-rows")),
        cohort,
        draws,
        seed=seed,
    )
    document = stats_document(named or load_trace(file), plan)
    for line in document["notes"]:
        note(line)
    if plot is not None:
        plot_stats(document, plot)
    if as_json:
        emit(document)
    else:
        _print(document)


def _print(document: dict[str, Any]) -> None:
    d = document
    size = f"top-{d['top_k']} of {d['experts']}, {d['layers']} layers"
    typer.echo(f"{d['name']}: {d['rows']} rows of {d['requests']} requests, {size}")
    typer.echo(f"distinct experts of a layer, {d['draws']} draws (seed {d['seed']}): {d['draw_rule']}")
    columns = ("mean", "p05", "p95", "formula", "uniform")
    rows = [[str(r["batch"]), str(r["rows"]), *(f"{r[c]:.2f}" for c in columns)] for r in d["distinct"]]
    table(["batch", "rows", *columns], rows)
    typer.echo("\none stream, all windows of all requests pooled")
    table(["tokens", "distinct"], [[str(r["tokens"]), f"{r['distinct']:.3f}"] for r in d["window"]])
    typer.echo(f"\nexperts shared with the row so many tokens later, of {d['top_k']}")
    names = ("shared", "shared_by_request", "chance")
    table(["lag", *names], [[str(r["lag"]), *(f"{r[n]:.2f}" for n in names)] for r in d["overlap"]])
    typer.echo(
        f"\nGini {d['gini']:.3f}; the hottest half of the experts takes {d['top_half_share']:.1%} of the picks\n"
    )
    fields = ("blocks", "pair_count_fraction", "occupancy")
    table(
        ["tokens", "block rows", "blocks", "pairs/blocks", "occupancy"],
        [[str(r["tokens"]), str(r["block_rows"]), *(f"{r[n]:.3f}" for n in fields)] for r in d["blocks"]],
    )
