"""May, can and should sort-blocks be paired here: two adjacent blocks of one expert in one tile of double height.

Counts and bytes are exact; no time is predicted, since no paired kernel has been calibrated. What a user measured
(a paired and an unpaired arm) decides before anything else does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from moeplan.cost.device import Device, Fact
from moeplan.planning.segment import why_not_stage_one
from moeplan.traffic.pairs import PairCounts
from moeplan.traffic.shape import WeightFormat

EXPECTS = 1.05  # expects.isolated_speedup_min of the skill card flydsl_decode_moe_stage1_blkmap
REFUSED = ("not applicable", "does not build", "do not pair")


@dataclass(frozen=True, slots=True)
class Ablation:
    """Measured seconds of one segment in the same run: unpaired, paired GEMM alone, descriptor producer."""

    base_s: float
    paired_s: float
    producer_s: float

    @property
    def gain(self) -> float:
        """Of the honest segment: base / (paired + producer) - 1."""
        return self.base_s / (self.paired_s + self.producer_s) - 1


@dataclass(frozen=True, slots=True)
class Counters:
    """Of the unpaired kernel: bytes read from memory, and its seconds."""

    read_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Tile:
    """The compute tile. row_bytes: shared memory (LDS) a row; columns, hidden: of the rank's stage-1 plane."""

    block_rows: int
    tile_rows: int
    row_bytes: Fact | None = None
    tile_columns: int | None = None
    columns: int | None = None
    hidden: int | None = None
    format: WeightFormat | None = None

    @property
    def plane_bytes(self) -> int | None:
        """Stage-1 weights of one expert; None where their size is not known."""
        if self.columns is None or self.hidden is None or self.format is None:
            return None
        return self.format.bytes(self.columns, self.hidden)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. uniform: the same batch under uniform routing, None where its size is unknown."""

    counts: PairCounts
    uniform: PairCounts | None
    tile: Tile
    device: Device
    stage: int | None = None
    phase: str | None = None
    kernels: Sequence[str] = ()
    expects: float = EXPECTS
    ablation: Ablation | None = None
    counters: Counters | None = None


def decide(asked: Question) -> dict[str, Any]:
    """The `pairing` document: counts, resources, the gates each with its reason, and a verdict."""
    resources = _resources(asked)
    gates = [_builds(asked, resources), _pairable(asked), _relevant(asked)]
    out = why_not_stage_one(asked.stage, asked.phase, asked.kernels)
    verdict, reason = ("not applicable", out) if out else _verdict(asked, gates)
    return {
        **_counts(asked.counts),
        "uniform": None if asked.uniform is None else _counts(asked.uniform),
        **resources,
        "segment": {
            "stage": asked.stage or 1,
            "phase": asked.phase or "decode",
            "kernels": list(asked.kernels),
            "assumed": asked.stage is None and not asked.kernels,
        },
        "gates": gates,
        "verdict": verdict,
        "reason": reason,
        "measured": None if asked.ablation is None else {"gain": asked.ablation.gain},
        "predicted": dict.fromkeys(("base_s", "paired_s", "producer_s", "gain", "gain_low", "gain_high")),
        "predicted_reason": f"no paired kernel is calibrated on {asked.device.name}",
    }


def _counts(counts: PairCounts) -> dict[str, Any]:
    names = ("blocks", "pairs", "leaders", "solos", "distinct")
    found: dict[str, Any] = {name: _plain(getattr(counts, name)) for name in names}
    for name in ("pair_count_fraction", "paired_block_fraction", "traffic_ceiling"):
        found[name] = getattr(counts, name)
    return found


def _plain(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def _resources(asked: Question) -> dict[str, Any]:
    """Bytes of shared memory (LDS), workgroups a compute unit, scheduling rounds, plane bytes of both arms."""
    tile, counts, facts = asked.tile, asked.counts, asked.device.facts
    limit, units = facts.get("shared_memory"), facts.get("compute_units")
    base = paired = None
    if tile.row_bytes is not None:
        base, paired = (int(rows * tile.row_bytes.value) for rows in (tile.tile_rows, 2 * tile.tile_rows))
    fits = [None if limit is None or not one else int(limit.value // one) for one in (base, paired)]
    across = None if tile.columns is None or tile.tile_columns is None else ceil(tile.columns / tile.tile_columns)
    rounds = {
        "unpaired": _rounds(counts.blocks, across, units, fits[0]),
        "leaders": _rounds(counts.leaders, across, units, fits[1]),
        "worst_case_grid": _rounds(counts.blocks, across, units, fits[1]),
    }
    plane = tile.plane_bytes
    return {
        "row_bytes": None if tile.row_bytes is None else tile.row_bytes.value,
        "row_bytes_source": None if tile.row_bytes is None else tile.row_bytes.source,
        "lds_bytes_base": base,
        "lds_bytes_paired": paired,
        "lds_limit": None if limit is None else int(limit.value),
        "workgroups_per_unit": {"base": fits[0], "paired": fits[1]},
        "rounds": rounds,
        "bytes": None
        if plane is None
        else {
            "plane": plane,
            "unpaired": counts.blocks * plane,
            "paired": counts.leaders * plane,
            "unique": counts.distinct * plane,
        },
    }


def _rounds(tiles: float, across: int | None, units: Fact | None, each: int | None) -> int | None:
    """Times the whole device fills with workgroups; shared memory alone limits how many a unit holds."""
    if across is None or units is None or not each:
        return None
    return ceil(tiles * across / (units.value * each))


def _builds(asked: Question, resources: dict[str, Any]) -> dict[str, Any]:
    paired, limit = resources["lds_bytes_paired"], resources["lds_limit"]
    rows = 2 * asked.tile.tile_rows
    if paired is None or limit is None:
        lacks = "bytes a tile row (--row-bytes)" if paired is None else f"shared_memory of {asked.device.name}"
        return _gate("base tile", None, f"unknown whether a {rows}-row tile builds: {lacks} is not given")
    how = f"{rows} rows x {resources['row_bytes']:g} B = {paired:,} B"
    if paired > limit:
        return _gate("base tile", False, f"the doubled tile does not build: {how}, {paired:,} > {limit:,} B")
    return _gate("base tile", True, f"the doubled tile fits: {how} of {limit:,} B")


def _pairable(asked: Question) -> dict[str, Any]:
    counts = asked.counts
    text = (
        f"pair_count_fraction {counts.pair_count_fraction:.4f}: no-cache ceiling {counts.traffic_ceiling:.4f}x,"
        f" {asked.expects:g}x expected"
    )
    return _gate("pairable fraction", counts.traffic_ceiling >= asked.expects, text)


def _relevant(asked: Question) -> dict[str, Any]:
    name = "repeated traffic"
    if asked.ablation is not None:
        gain = asked.ablation.gain
        return _gate(name, 1 + gain >= asked.expects, f"measured: {1 + gain:.3f}x with the producer in it")
    if asked.counters is not None:
        return _counted(asked, asked.counters)
    return _gate(name, None, "neither counters nor a paired and an unpaired run are given")


def _counted(asked: Question, counters: Counters) -> dict[str, Any]:
    """The most time that the repeated reads seen in memory can cost, at the device's bandwidth."""
    name, plane = "repeated traffic", asked.tile.plane_bytes
    rate = asked.device.read_bandwidth
    if plane is None or rate is None:
        lacks = "--columns, --hidden and --format" if plane is None else f"a bandwidth of {asked.device.name}"
        return _gate(name, None, f"counters need {lacks}")
    counts = asked.counts
    repeated = max(0.0, counters.read_bytes - counts.distinct * plane)
    again = counts.blocks - counts.distinct
    saved = repeated * min(1.0, counts.pairs / again) if again else 0.0
    most = counters.seconds / max(counters.seconds - saved / rate.value, 1e-12)
    text = f"{saved / 1e6:.1f} MB of repeated reads reach memory and can be saved: at most {most:.3f}x"
    return _gate(
        name, None if most >= asked.expects else False, text + ("; run both arms" if most >= asked.expects else "")
    )


def _gate(name: str, holds: bool | None, reason: str) -> dict[str, Any]:
    return {"name": name, "holds": holds, "reason": reason}


def _verdict(asked: Question, gates: Sequence[dict[str, Any]]) -> tuple[str, str]:
    builds, pairable, relevant = gates
    if builds["holds"] is False:
        return "does not build", builds["reason"]
    if asked.ablation is not None:  # a measurement decides, whatever the counts promised
        return ("pair" if relevant["holds"] else "do not pair"), relevant["reason"]
    for gate in (pairable, relevant):
        if gate["holds"] is False:
            return "do not pair", gate["reason"]
    return "mixed / unknown", relevant["reason"]
