"""`work`: bytes, dispatches and tiles of each kernel path."""

from typing import Annotated

import typer

from moeplan.cli.common import Cohorts, Json, Models, Seed, Traces, emit, note, numbers, store, table
from moeplan.errors import MoeplanError
from moeplan.units import size


def register(app: typer.Typer) -> None:
    """Add `work`."""
    app.command("work")(work)


def work(  # noqa: PLR0913, PLR0917 - one argument an option
    model: Annotated[str, typer.Argument(help="Model card, config.json or card.toml.")],
    tokens: Annotated[str, typer.Option(help="Token counts: 1,2,4 or 1-8.")] = "1,2,4,8,16,32",
    routing: Annotated[
        str, typer.Option(help="uniform, balanced, disjoint, identical, popularity:NAME or trace:FILE.")
    ] = "uniform",
    cohort: Cohorts = "independent",
    path: Annotated[list[str] | None, typer.Option(help="Kernel path, repeatable; grouped:BLOCK sets rows.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks: each holds a slice of every expert.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks: each holds a run of the experts.")] = 1,
    rank: Annotated[str, typer.Option(help="Expert-parallel rank, or worst: the one with most to read.")] = "0",
    models: Models = None,
    traces: Traces = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Expected work of one MoE layer: exact, except what `drawn` names (means over seeded draws)."""
    from moeplan.traffic.documents import DEFAULT_PATHS, work_document
    from moeplan.traffic.model import load_card
    from moeplan.traffic.partition import Partition
    from moeplan.traffic.path import parse_path
    from moeplan.traffic.routing import parse_routing

    if rank != "worst" and not rank.isdecimal():
        raise MoeplanError(f"--rank {rank}: expected a whole number or worst")
    if seed < 0:
        raise MoeplanError(f"--seed {seed}: must not be negative")
    where = store(models, traces)
    part = Partition(tp, ep, None if rank == "worst" else int(rank))
    paths = [parse_path(name) for name in path or DEFAULT_PATHS]
    card = load_card(model, where)
    asked = (parse_routing(routing, where), cohort, seed, part)
    document = work_document(card, paths, numbers(tokens, "--tokens"), asked)
    for line in (*document["notes"], *(f"{one['path']} declined: {one['reason']}" for one in document["declines"])):
        note(line)
    if as_json:
        emit(document)
        return
    headings = ["path", "tokens", "slots", "distinct", "p95", "unique", "issued", "launches", "tiles", "padded", "occ."]
    table(
        headings,
        [
            [
                row["path"],
                str(row["tokens"]),
                f"{row['slots']:.6g}",
                f"{row['distinct_mean']:.2f}",
                str(row["distinct_p95"]),
                size(row["unique_bytes"]),
                size(row["issued_bytes"]),
                str(row["dispatches"]),
                f"{row['tiles']:.6g}",
                f"{row['padded_rows']:.6g}",
                f"{row['occupancy']:.3f}",
            ]
            for row in document["rows"]
        ],
    )
