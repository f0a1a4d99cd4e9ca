"""Speed of the packed trace: token-layer rows a second on one core, and `trace stats` from a cold start.

    python benchmarks/trace_speed.py ROUTING/gpt-oss-20b.decode-topk.npz [OUT.json]

One token-layer row is one token of one layer. Each figure is the best and the median of several runs.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.provenance import environment
from moeplan.store import write_json
from moeplan.traffic.cohort import draw_rows
from moeplan.traffic.packed import Packed
from moeplan.traffic.trace import load_trace

RUNS = 7
BATCHES = (2, 4, 8, 16, 32)
DRAWS = 5000


def seconds(work: Callable[[], Any]) -> list[float]:
    found = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return found


def rate(rows: int, times: list[float]) -> dict[str, float]:
    return {"median_rows_per_s": rows / statistics.median(times), "best_rows_per_s": rows / min(times)}


def main() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, children too
    file = Path(sys.argv[1])
    trace = load_trace(file)
    packed = Packed.of(trace)
    whole = len(trace.expert_ids) * trace.layers
    result: dict[str, Any] = {"file": file.name, "numpy": np.__version__, "token_layer_rows": whole}
    result["pack"] = rate(whole, seconds(lambda: Packed.of(trace)))
    rng = np.random.default_rng(0)
    result["distinct"] = []
    for batch in BATCHES:
        rows = draw_rows(trace, "independent", batch, DRAWS, rng)
        times = seconds(lambda rows=rows: packed.distinct(rows))
        drawn = seconds(lambda n=batch: packed.distinct(draw_rows(trace, "independent", n, DRAWS, rng)))
        size = rows.size * trace.layers
        found = rate(size, times) | {"median_with_drawing_rows_per_s": size / statistics.median(drawn)}
        result["distinct"].append({"batch": batch, "draws": DRAWS} | found)
    command = [sys.executable, "-m", "moeplan", "trace", "stats", str(file), "--json"]
    cold = seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    result["stats_process_s"] = {"first": cold[0], "median": statistics.median(cold), "worst": max(cold)}
    result["host"] = environment()
    for line in (result["pack"], *result["distinct"], result["stats_process_s"]):
        print(line)
    if len(sys.argv) > 2:
        write_json(Path(sys.argv[2]), result)


main()
