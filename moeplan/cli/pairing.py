"""`pairing`: may, can and should sort-blocks be paired here."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moeplan.cli.common import Calibrations, Cohorts, Json, Models, Seed, Traces, emit, note, store, table
from moeplan.errors import MoeplanError

if TYPE_CHECKING:
    from moeplan.planning.pairing import Ablation, Counters, Tile
    from moeplan.store import Store
    from moeplan.traffic.expect import Case
    from moeplan.traffic.pairs import PairCounts


def register(app: typer.Typer) -> None:
    """Add `pairing`."""
    app.command("pairing")(pairing)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the blocks come from, as the options say it."""

    blocks: str | None
    routing: str | None
    tokens: int | None
    experts: int | None
    top_k: int | None
    cohort: str
    seed: int
    ep: int
    rank: str


def pairing(  # noqa: PLR0913, PLR0917 - one argument an option
    device: Annotated[str, typer.Option(help="Device card, e.g. mi355x.")],
    blocks: Annotated[str | None, typer.Option(help="Experts by number of blocks: 173x1,84x2,2x3.")] = None,
    trace: Annotated[str | None, typer.Option(help="Routing trace: a name, folder or .npz.")] = None,
    popularity: Annotated[str | None, typer.Option(help="Popularity profile under traces/.")] = None,
    routing: Annotated[str | None, typer.Option(help="Any other routing arm, e.g. uniform.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Rows of the call.")] = None,
    model: Annotated[str | None, typer.Option(help="Model card: experts, top-k, columns, hidden, format.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, max=100_000, help="Experts, where no model is given.")] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Experts a token, where no model is given.")
    ] = None,
    block_rows: Annotated[int, typer.Option(help="Rows of a sorted block: a power of two.")] = 64,
    tile_rows: Annotated[int | None, typer.Option(min=1, max=65536, help="Rows of the unpaired tile.")] = None,
    tile_columns: Annotated[int | None, typer.Option(min=1, max=65536, help="Columns of the compute tile.")] = None,
    columns: Annotated[int | None, typer.Option(min=1, max=1 << 20, help="Stage-1 columns (gate and up).")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, max=1 << 20, help="Input width.")] = None,
    format: Annotated[str | None, typer.Option(help="Weight format: mxfp4, fp8-e4m3, bf16, affine4-g64.")] = None,
    row_bytes: Annotated[float | None, typer.Option(min=1, help="Shared memory (LDS) a tile row.")] = None,
    stage: Annotated[int | None, typer.Option(min=1, max=2, help="1: gate and up, 2: down.")] = None,
    phase: Annotated[Literal["decode", "prefill"] | None, typer.Option(help="Of the segment.")] = None,
    kernels: Annotated[str | None, typer.Option(help="Kernel names in the scored segment, with commas.")] = None,
    ablation: Annotated[str | None, typer.Option(help="Measured us: unpaired,paired GEMM,producer.")] = None,
    counters: Annotated[str | None, typer.Option(help="Unpaired kernel: bytes read from memory,us.")] = None,
    card: Annotated[Path | None, typer.Option(help="Skill card whose match, gates and numbers are compared.")] = None,
    installed: Annotated[str, typer.Option(help="Version of the card's backend here.")] = "",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks: each has a slice of the columns.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks: each has a run of the experts.")] = 1,
    rank: Annotated[str, typer.Option(help="Expert-parallel rank, or worst: the one with most blocks.")] = "worst",
    cohort: Cohorts = "independent",
    models: Models = None,
    traces: Traces = None,
    calibration: Calibrations = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Paired sort-blocks: counts, resources and three gates; exit 3 where the answer is no."""
    from moeplan.cost.device import Fact, load_device
    from moeplan.planning.pairing import EXPECTS, REFUSED, Question, Tile, decide
    from moeplan.planning.skill_card import compare, read_card

    if block_rows & (block_rows - 1) or not 8 <= block_rows <= 256:
        raise MoeplanError(f"--block-rows {block_rows}: must be a power of two from 8 to 256")
    where = store(models, traces, calibration)
    given = [("trace", trace), ("popularity", popularity)]
    arms = [f"{kind}:{name}" for kind, name in given if name is not None] + ([routing] if routing is not None else [])
    if len(arms) + (blocks is not None) != 1:
        raise MoeplanError("pairing: give one of --blocks, --trace, --popularity and --routing")
    source = _Source(blocks, arms[0] if arms else None, tokens, experts, top_k, cohort, seed, ep, rank)
    tile = Tile(block_rows, tile_rows or block_rows, None, tile_columns, columns, hidden, _format(format))
    if model is not None:
        source, tile = _of_model(model, where, source, tile)
    if tile.columns is not None:
        if tile.columns % tp:
            raise MoeplanError(f"--tp {tp}: {tile.columns} columns do not divide by {tp}")
        tile = replace(tile, columns=tile.columns // tp)
    about = load_device(where, device)
    own = Fact(row_bytes, "assumed", "--row-bytes") if row_bytes is not None else about.facts.get("tile_row_bytes")
    counts, uniform = _counts(source, block_rows, where)
    skill = None if card is None else read_card(card)
    document = decide(
        Question(
            counts, uniform, replace(tile, row_bytes=own), about, stage, phase,
            [name.strip() for name in kernels.split(",") if name.strip()] if kernels is not None else (),
            skill.expects if skill and skill.expects else EXPECTS, _ablation(ablation), _counters(counters),
        )
    )  # fmt: skip
    document = {"device": device, "block_rows": block_rows, "tile_rows": tile.tile_rows, "tokens": tokens} | document
    if skill is not None:
        here = {
            "generation": about.generation, "format": tile.format.name if tile.format else "", "phase": phase or "",
            "version": installed,
        }  # fmt: skip
        document["card"] = compare(skill, here, document)
    emit(document) if as_json else _show(document)
    if document["verdict"] in REFUSED:
        raise typer.Exit(3)


def _format(name: str | None) -> Any:
    from moeplan.traffic.shape import WeightFormat

    try:
        return None if name is None else WeightFormat.parse(name)
    except MoeplanError as bad:
        raise MoeplanError(f"--format {name}: {bad}") from None


def _of_model(model: str, where: "Store", source: _Source, tile: "Tile") -> tuple[_Source, "Tile"]:
    """The model's first MoE layer for whatever the options leave open."""
    from moeplan.traffic.model import load_card

    loaded = load_card(model, where)
    loaded.require_moe()
    shape = loaded.groups()[0][0]
    source = replace(source, experts=source.experts or shape.experts, top_k=source.top_k or shape.top_k)
    own = shape.expert_hidden * (1 if shape.gate is None else 2)
    return source, replace(
        tile, columns=tile.columns or own, hidden=tile.hidden or shape.hidden, format=tile.format or shape.up
    )


def _counts(source: _Source, block_rows: int, where: "Store") -> tuple["PairCounts", "PairCounts | None"]:
    """The counts asked for, and those of the same batch under uniform routing where its size is known."""
    from moeplan.traffic.pairs import PairCounts, parse_blocks
    from moeplan.traffic.routing import Routing, parse_routing

    if source.blocks is not None:
        if source.ep > 1:
            raise MoeplanError(f"--ep {source.ep}: --blocks are those of one rank already")
        counts = PairCounts.of(parse_blocks(source.blocks))
        known = source.tokens is not None and source.experts is not None and source.top_k is not None
        return counts, PairCounts.expected(_case(source, Routing("uniform")), block_rows) if known else None
    if source.tokens is None:
        raise MoeplanError("--tokens: needed to draw blocks from a routing")
    arm = parse_routing(source.routing or "", where)
    if arm.trace is not None:
        source = replace(source, experts=source.experts or arm.trace.experts, top_k=source.top_k or arm.trace.top_k)
    if arm.popularity is not None:
        own = arm.popularity
        source = replace(source, experts=source.experts or own.shares.shape[1], top_k=source.top_k or own.top_k)
    if source.experts is None or source.top_k is None:
        raise MoeplanError(f"--routing {source.routing}: needs --model, or --experts and --top-k")
    if line := arm.note(source.experts, source.top_k):
        note(line)
    uniform = replace(source, cohort="independent")
    return (
        PairCounts.expected(_case(source, arm), block_rows),
        PairCounts.expected(_case(uniform, Routing("uniform")), block_rows),
    )


def _case(source: _Source, arm: Any) -> "Case":
    from moeplan.traffic.expect import Case
    from moeplan.traffic.partition import Partition
    from moeplan.traffic.shape import LayerShape, WeightFormat

    if source.rank != "worst" and not source.rank.isdecimal():
        raise MoeplanError(f"--rank {source.rank}: expected a whole number or worst")
    experts, k, tokens = source.experts, source.top_k, source.tokens
    assert experts is not None
    assert k is not None
    assert tokens is not None
    if k > experts:
        raise MoeplanError(f"--top-k {k}: there are {experts} experts")
    if experts % source.ep:
        raise MoeplanError(f"--ep {source.ep}: {experts} experts do not divide by {source.ep}")
    plain = WeightFormat.parse("bf16")  # only ids are drawn: widths and formats play no part
    shape = LayerShape(1, 1, experts, k, plain, plain, plain)
    rank = 0 if source.ep == 1 else None if source.rank == "worst" else int(source.rank)
    return Case(shape, tokens, arm, source.cohort, source.seed, Partition(1, source.ep, rank))


def _measured(text: str, option: str, count: int) -> list[float]:
    words = text.split(",")
    try:
        values = [float(word) for word in words]
    except ValueError:
        values = []
    if len(values) != count or not all(0 < value < float("inf") for value in values):
        raise MoeplanError(f"{option} {text}: expected {count} positive numbers with commas")
    return values


def _ablation(text: str | None) -> "Ablation | None":
    from moeplan.planning.pairing import Ablation

    if text is None:
        return None
    return Ablation(*(value * 1e-6 for value in _measured(text, "--ablation", 3)))


def _counters(text: str | None) -> "Counters | None":
    from moeplan.planning.pairing import Counters

    if text is None:
        return None
    read, microseconds = _measured(text, "--counters", 2)
    return Counters(read, microseconds * 1e-6)


def _show(document: dict[str, Any]) -> None:
    twin = document["uniform"]
    rows = []
    for name in ("blocks", "pairs", "leaders", "solos", "pair_count_fraction", "paired_block_fraction"):
        rows.append([name, _number(document[name]), "-" if twin is None else _number(twin[name])])
    ceiling = "traffic_ceiling"
    rows.append(
        [
            "ceiling, if no cache served a read",
            f"{document[ceiling]:.4f}x",
            "-" if twin is None else f"{twin[ceiling]:.4f}x",
        ]
    )
    table(["", "here", "uniform routing"], rows)
    typer.echo("")
    if document["lds_bytes_base"] is not None:
        each = document["workgroups_per_unit"]
        typer.echo(
            f"shared memory a tile: {document['lds_bytes_base']:,} B, paired {document['lds_bytes_paired']:,} B;"
            f" workgroups a unit {each['base']}, paired {each['paired']}"
        )
        typer.echo(f"  {document['row_bytes']:g} B a row: {document['row_bytes_source']}")
    rounds = document["rounds"]
    if rounds["unpaired"] is not None:
        typer.echo(
            f"scheduling rounds: {rounds['unpaired']} unpaired, {rounds['leaders']} with exactly the leaders,"
            f" {rounds['worst_case_grid']} with a grid of all blocks that exits early"
        )
    if (read := document["bytes"]) is not None:
        typer.echo(
            f"stage-1 planes: {read['unpaired'] / 1e6:.1f} MB unpaired, {read['paired'] / 1e6:.1f} MB paired,"
            f" {read['unique'] / 1e6:.1f} MB if each were read once"
        )
    for gate in document["gates"]:
        word = {True: "holds", False: "fails", None: "open"}[gate["holds"]]
        typer.echo(f"gate {gate['name']}: {word}: {gate['reason']}")
    if (found := document.get("card")) is not None:
        for one in found["match"]:
            word = {True: "matches", False: "differs", None: "open"}[one["holds"]]
            typer.echo(f"card {one['field']}: {word}: {one['here']}, the card has {', '.join(one['card'])}")
        applies = {True: "applies", False: "does not apply", None: "is open"}[found["mechanism"]["applies"]]
        numbers = {True: "hold", False: "do not hold", None: "are open"}[found["numbers"]["hold"]]
        typer.echo(
            f"card {found['name']}: its mechanism {applies}; its numbers {numbers}: {found['numbers']['reason']}"
        )
    if document["segment"]["assumed"]:
        typer.echo("segment: taken as stage 1 of decode; --stage, --phase and --kernels say what it is")
    typer.echo(f"verdict: {document['verdict']}: {document['reason']}")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4f}"
