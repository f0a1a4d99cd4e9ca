"""From samples to the points of a fit: drivers, median seconds, and how much a point is to be trusted."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from moeplan.cost.curve import Table
from moeplan.cost.forms import point
from moeplan.cost.model import Drivers
from moeplan.cost.samples import Sample
from moeplan.errors import MoeplanError
from moeplan.traffic.path import parse_path

BARE_CHAIN = "link"  # the timed chain without its experts: kept as a measure of the method, no kernel path
_MISFIT = 0.02  # what a law is off by without any noise; assumed, keeps quiet points from outweighing all others


def block_rows(path: str) -> int | None:
    """Block rows of a path that works in blocks; None for all others, an engine's own kernels among them."""
    try:
        spec = parse_path(path)
    except MoeplanError:
        return None
    return spec.block_rows if spec.reuse == "block" else None


def drivers_of(sample: Sample) -> Drivers:
    """What a fit sees of a sample."""
    rows = block_rows(sample.path)
    blocks = sample.blocks.get(rows, 0.0) if rows else 0.0
    return Drivers(sample.tokens, sample.slots, sample.distinct, blocks)


def table_of(samples: Sequence[Sample]) -> Table:
    """Points, median layer seconds and their noise. Raises MoeplanError for a time that is not positive."""
    for sample in samples:
        if not sample.median > 0:
            raise MoeplanError(f"arm {sample.arm}: median layer time {sample.median:.3g} s is not positive")
    ordered = in_order(samples)
    scatter = {
        count: statistics.median(_scatter(sample) for sample in ordered if sample.tokens == count)
        for count in {sample.tokens for sample in ordered}
    }
    return Table(
        np.array([float(sample.tokens) for sample in ordered]),
        np.array([point(drivers_of(sample)) for sample in ordered]),
        np.array([sample.median for sample in ordered]),
        np.array([math.hypot(scatter[sample.tokens], _MISFIT) for sample in ordered]),
    )


def in_order(samples: Sequence[Sample]) -> list[Sample]:
    """The order of a table's rows: by tokens, routing, seed, arm."""
    return sorted(samples, key=lambda sample: (sample.tokens, sample.routing, sample.seed, sample.arm))


def _scatter(sample: Sample) -> float:
    """Relative standard deviation of a sample's median: 1.2533 sigma / sqrt(n), sigma = half the interquartile range
    over 0.6745 (normal distribution)."""
    return 1.2533 / 0.6745 * sample.spread / sample.median / math.sqrt(len(sample.long_s))
