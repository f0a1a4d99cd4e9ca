"""llama.cpp `moe-trace` CSV: rows `layer,expert` without a heading, one a routed pair. No token index: counts only."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moeplan.traffic.importers.counts import TABLE_LIMIT, ExpertCounts, IntTable, expert_counts
from moeplan.traffic.importers.reading import EXPERT_LIMIT, LAYER_LIMIT, fail, lines, shown
from moeplan.traffic.importers.record import Hints, check_experts

ROW = re.compile(rb"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*")


def read(paths: Sequence[Path], hints: Hints) -> ExpertCounts:
    """Pairs of every file, added up."""
    experts = check_experts(hints.need("experts", paths[0]), paths[0])
    found: dict[int, IntTable] = {}
    for path in paths:
        for number, line in lines(path):
            match = ROW.fullmatch(line)
            if match is None:
                raise fail(f"{path}: line {number}", f"{shown(line[:40].decode('latin-1'))}, expected layer,expert")
            layer, expert = int(match[1]), int(match[2])
            if layer >= LAYER_LIMIT or expert >= min(experts, EXPERT_LIMIT):
                raise fail(f"{path}: line {number}", f"layer {layer}, expert {expert} of {experts} experts")
            if layer not in found:
                if (len(found) + 1) * experts > TABLE_LIMIT:
                    raise fail(path, f"more than {TABLE_LIMIT} counts")
                found[layer] = np.zeros(experts, dtype=np.int64)
            found[layer][expert] += 1
    return expert_counts("moe-trace", paths, found, hints)
