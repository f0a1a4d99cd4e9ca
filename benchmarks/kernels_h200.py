"""Parity, batch invariance, compile count and times of the Triton paths at Qwen3-30B-A3B shape on a GPU.

    python benchmarks/kernels_h200.py --out DIR [--budget 240] [--tune]

Times are medians of CUDA graph replays with different uniform routing in every layer; a layer is the slope
between chains of 12 and 48 dependent layers. `--tune` also times each launch alone under several cuts. The floor
is the bytes of the distinct planes over the read bandwidth of a large copy on the same card.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from moeplan.kernels import triton_common, triton_fused, triton_grouped, triton_launch
from moeplan.kernels.formats import random_planes
from moeplan.kernels.protocol import Arm
from moeplan.kernels.reference import moe_layer, relative_rms
from moeplan.kernels.triton_config import Tile, fused_tiles, grouped_tiles
from moeplan.kernels.triton_layer import Call, make_scratch, to_device
from moeplan.kernels.triton_paths import FusedKernel, GroupedKernel, random_experts
from moeplan.traffic.shape import LayerShape, WeightFormat

CHAIN = (12, 48)
DEVICE = "cuda"


def qwen(name: str) -> LayerShape:
    form = WeightFormat.parse(name)  # Qwen3-30B-A3B config.json: hidden 2048, moe_intermediate 768, 128 experts, top 8
    return LayerShape(2048, 768, 128, 8, form, form, form)


def draw_ids(shape: LayerShape, tokens: int, seed: int) -> np.ndarray:
    keys = np.random.default_rng(seed).random((tokens, shape.experts))
    return np.argpartition(keys, shape.top_k - 1, axis=1)[:, : shape.top_k].astype(np.int32)


def kernel_of(rows: int):
    return GroupedKernel(rows) if rows else FusedKernel()


def launch(experts, call, rows, scratch=None):
    shape = experts.shape
    scratch = scratch or make_scratch(shape, len(call.x), rows, DEVICE)
    if rows:
        return triton_launch.run_grouped(experts, call, scratch, grouped_tiles(shape, rows), rows)
    return triton_launch.run_fused(experts, call, scratch, fused_tiles(shape))


def parity(shape: LayerShape, tokens: list[int], blocks: list[int], seed: int) -> dict[str, float]:
    planes = random_planes(shape, seed)
    experts, worst = to_device(planes, shape, DEVICE), {}
    for n in tokens:
        rng = np.random.default_rng(seed + n)
        x = torch.from_numpy(rng.standard_normal((n, shape.hidden), dtype=np.float32)).bfloat16()
        ids, scores = draw_ids(shape, n, seed + n), rng.random((n, shape.top_k), dtype=np.float32)
        ids[rng.random(ids.shape) < 0.05] = -1
        wanted = moe_layer(x.float().numpy(), ids, scores, planes.dense, shape.activation)
        for rows in blocks:
            for kind in (torch.float32, torch.bfloat16):
                out = torch.full(x.shape, float("nan"), dtype=kind, device=DEVICE)
                call = Call(x.to(DEVICE), torch.from_numpy(ids).to(DEVICE), torch.from_numpy(scores).to(DEVICE), out)
                launch(experts, call, rows)
                key = f"{shape.format_name} {shape.activation} rows {rows} {str(kind)[6:]}"
                worst[key] = max(worst.get(key, 0.0), relative_rms(out.float().cpu().numpy(), wanted))
    return worst


def invariant(shape: LayerShape) -> bool:
    """Each of 64 rows alone, and each batch of the first n rows, bit for bit."""
    experts = random_experts(shape, CHAIN[1], DEVICE)[0]
    x = torch.randn((64, shape.hidden), device=DEVICE).bfloat16()
    ids = torch.from_numpy(draw_ids(shape, 64, 3)).to(DEVICE)
    scores = torch.rand(ids.shape, device=DEVICE)

    def run(part: slice) -> torch.Tensor:
        out = torch.full_like(x[part], float("nan"))
        launch(experts, Call(x[part].clone(), ids[part].clone(), scores[part].clone(), out), 0)
        return out

    alone = torch.cat([run(slice(t, t + 1)) for t in range(64)])
    return all(torch.equal(run(slice(0, n)), alone[:n]) for n in range(1, 65))


def compiles(shape: LayerShape) -> dict[str, int]:
    """Compiled variants of each kernel after 1..256 tokens, less those after one token."""
    kernels = [triton_common.combine, triton_grouped.align, triton_grouped.grouped_gate_up_affine4,
               triton_grouped.grouped_down_affine4, triton_fused.fused_gate_up_affine4,
               triton_fused.fused_down_affine4]  # fmt: skip
    experts = to_device(random_planes(shape, 1), shape, DEVICE)

    def run(n: int) -> None:
        ids = torch.from_numpy(draw_ids(shape, n, n)).to(DEVICE)
        x = torch.randn((n, shape.hidden), device=DEVICE).bfloat16()
        for rows in (0, 16):
            launch(experts, Call(x, ids, torch.rand(ids.shape, device=DEVICE), torch.empty_like(x)), rows)

    def count() -> dict[str, int]:
        return {k.__name__: len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels}

    run(1)
    before = count()
    for n in range(1, 257):
        run(n)
    return {name: value - before[name] for name, value in count().items()}


def graph_us(body, rounds: int = 7) -> float:
    """Median microseconds of a captured body."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def tune(shape: LayerShape, tokens: int, rows: int, cuts: dict[str, list[Tile]]) -> list[dict]:
    """Each launch alone over all layers, in microseconds a layer."""
    layers = random_experts(shape, CHAIN[1], DEVICE)
    x = torch.randn((tokens, shape.hidden), device=DEVICE).bfloat16()
    out, scratch = torch.empty_like(x), make_scratch(shape, tokens, rows, DEVICE)
    calls = [Call(x, torch.from_numpy(draw_ids(shape, tokens, s)).to(DEVICE),
                  torch.rand((tokens, shape.top_k), device=DEVICE), out, x) for s in range(len(layers))]  # fmt: skip
    launch(layers[0], calls[0], rows, scratch)
    pairs, found = list(zip(layers, calls, strict=True)), []

    def record(part: str, tile, body) -> None:
        try:
            us = graph_us(body) / len(layers)
        except Exception as bad:  # a cut may need too much shared memory: say so and go on
            us, tile = None, f"{tile} {str(bad)[:60]}"
        cut = [tile.rows, tile.step, tile.warps, tile.stages, tile.wide] if isinstance(tile, Tile) else str(tile)
        found.append({"format": shape.format_name, "tokens": tokens, "rows": rows, "part": part, "cut": cut, "us": us})

    if rows:
        record("align", "", lambda: [triton_launch.align(shape, c, scratch, rows) for _, c in pairs])
    record("combine", "", lambda: [triton_launch.sum_slots(shape, c, scratch, 256) for _, c in pairs])
    for part, tiles in cuts.items():
        for tile in tiles:
            if rows:
                # the block table must be that layer's: layer 0's is used for all, with different weights
                triton_launch.align(shape, calls[0], scratch, rows)
                step = getattr(triton_launch, f"grouped_{part}")
                record(
                    part, tile, lambda step=step, tile=tile: [step(e, calls[0], scratch, tile, rows) for e in layers]
                )
            else:
                step = getattr(triton_launch, f"fused_{part}")
                record(part, tile, lambda step=step, tile=tile: [step(e, c, scratch, tile) for e, c in pairs])
    return found


def whole(shape: LayerShape, tokens: int, rows: int, bandwidth: float, rounds: int = 7) -> dict:
    """A layer's time by the slope of two chains, and its floor."""
    ids = np.stack([draw_ids(shape, tokens, s) for s in range(CHAIN[1])])
    kernel = kernel_of(rows)
    state = kernel.prepare(Arm("bench", kernel.name, shape, tokens, "uniform", 0, CHAIN), ids)
    short, long = ([kernel.run(state, length) for _ in range(rounds)] for length in CHAIN)
    slope = (statistics.median(long) - statistics.median(short)) / (CHAIN[1] - CHAIN[0])
    floor = np.mean([len(np.unique(layer)) for layer in ids]) * shape.plane_bytes / bandwidth
    return {"format": shape.format_name, "path": kernel.name, "tokens": tokens, "us": slope * 1e6,
            "intercept_us": (statistics.median(short) - slope * CHAIN[0]) * 1e6, "floor_us": floor * 1e6,
            "finite": bool(torch.isfinite(state.buffers[0]).all()), "long_us": [t * 1e6 for t in long]}  # fmt: skip


def read_bandwidth() -> float:
    """Bytes read and written a second by a 4 GB copy, outside a graph."""
    source = torch.empty(1 << 30, dtype=torch.float32, device=DEVICE).normal_()
    target, times = torch.empty_like(source), []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 8 * source.numel() / statistics.median(times)


def _tiles(*cuts: tuple[int, ...]) -> list[Tile]:
    return [Tile(*cut) for cut in cuts]


def cuts_for(shape: LayerShape, rows: int) -> dict[str, list[Tile]]:
    """What --tune tries: (rows of weights, words or columns a step, warps, stages)."""
    if shape.up.bits == 4 and not rows:
        up = _tiles((4, 64, 1), (8, 64, 2), (16, 64, 4), (8, 32, 1), (8, 32, 2), (16, 32, 2), (16, 32, 4), (32, 32, 4),
                    (2, 64, 1), (4, 64, 2), (8, 128, 4), (16, 16, 1), (32, 16, 2))  # fmt: skip
        down = _tiles((32, 32, 2), (64, 32, 4), (64, 32, 2), (32, 32, 1), (16, 32, 2), (16, 32, 4), (128, 32, 8),
                      (32, 16, 2), (32, 16, 1), (64, 16, 4), (16, 64, 2), (16, 128, 4))  # fmt: skip
    elif not rows:
        up = _tiles((4, 1024, 4), (4, 512, 2), (4, 256, 1), (8, 512, 4), (2, 512, 1), (8, 256, 2), (4, 512, 1),
                    (16, 256, 4), (8, 1024, 8))  # fmt: skip
        down = _tiles(
            (4, 256, 1), (8, 256, 1), (8, 256, 2), (16, 256, 4), (4, 512, 2), (16, 256, 2), (32, 256, 4), (8, 256, 4)
        )
    elif shape.up.bits == 4:
        up = _tiles((64, 32, 4, 3), (64, 32, 4, 2), (128, 16, 4, 2), (128, 16, 4, 3), (128, 32, 4, 2), (128, 16, 4, 4),
                    (64, 64, 4, 2), (64, 32, 8, 2), (128, 32, 8, 2), (256, 16, 8, 3))  # fmt: skip
        down = _tiles((64, 32, 4, 3), (64, 32, 4, 2), (128, 32, 4, 2), (128, 16, 4, 2), (128, 16, 4, 3),
                      (128, 32, 4, 3), (256, 16, 8, 3), (128, 32, 8, 2), (256, 32, 8, 2))  # fmt: skip
    else:
        up = _tiles((64, 128, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (64, 256, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3),
                    (64, 128, 4, 2), (128, 128, 8, 2))  # fmt: skip
        down = _tiles((64, 128, 4, 3), (128, 64, 4, 3), (64, 64, 4, 4), (128, 128, 4, 2), (128, 64, 8, 3),
                      (128, 128, 8, 3), (256, 64, 8, 3))  # fmt: skip
    return {"up": up, "down": down}


def warm(job: tuple) -> dict[str, float]:
    """One parity table, or one cut compiled into Triton's cache; run in several processes at once."""
    torch.cuda.init()
    if job[0] == "parity":
        _, name, act, blocks = job
        form = WeightFormat.parse(name)
        return parity(LayerShape(512, 704, 60, 6, form, form, form, act), [1, 3, 9, 33, 65, 129], blocks, 7)
    _, name, rows, part, tile = job
    shape = qwen(name)
    experts, x = random_experts(shape, 1, DEVICE)[0], torch.zeros((1, shape.hidden), device=DEVICE).bfloat16()
    ids = torch.from_numpy(draw_ids(shape, 1, 0)).to(DEVICE)
    call = Call(x, ids, torch.ones(ids.shape, device=DEVICE), torch.empty_like(x), x)
    scratch = make_scratch(shape, 1, rows, DEVICE)
    try:
        if part == "all":
            launch(experts, call, rows, scratch)
        elif rows:
            triton_launch.align(shape, call, scratch, rows)
            getattr(triton_launch, f"grouped_{part}")(experts, call, scratch, tile, rows)
        else:
            getattr(triton_launch, f"fused_{part}")(experts, call, scratch, tile)
        torch.cuda.synchronize()
    except Exception as bad:
        return {f"failed {job}: {str(bad)[:80]}": float("nan")}
    return {}


def prepare_all(formats: list[str], points: list[tuple[int, int]]) -> dict[str, float]:
    """Parity, and every variant that will be timed compiled beforehand."""
    jobs: list[tuple] = []
    for name in formats:
        jobs += [("parity", name, "swiglu", [0, 16, 32, 64, 128]), ("parity", name, "geglu", [0, 16])]
        jobs += [("cut", name, rows, "all", None) for rows in (0, 16, 32, 64, 128)]
        for rows in sorted({rows for _, rows in points}):
            jobs += [("cut", name, rows, part, tile) for part, tiles in cuts_for(qwen(name), rows).items()
                     for tile in tiles]  # fmt: skip
    found: dict[str, float] = {}
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        for part in pool.imap_unordered(warm, jobs, chunksize=1):
            found |= part
    return found


def say(name: str, value: object) -> None:
    print(f"{name}: {value}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--budget", type=float, default=240.0)
    options.add_argument("--tune", action="store_true")
    options.add_argument("--formats", default="affine4-g64,bf16")
    options.add_argument("--points", default="8:0,1:0,64:16,16:16,128:32,512:64,2048:128", help="tuned: tokens:rows")
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    start, result = time.monotonic(), {"device": torch.cuda.get_device_name(), "parity": {}, "tune": [], "times": []}

    def left() -> float:
        return chosen.budget - (time.monotonic() - start)

    def save() -> None:
        (chosen.out / "kernels_h200.json").write_text(json.dumps(result, indent=1))

    formats = chosen.formats.split(",")
    plan = [tuple(map(int, pair.split(":"))) for pair in chosen.points.split(",")] if chosen.tune else []
    tables = prepare_all(formats, plan)
    result["parity"] = {key: value for key, value in tables.items() if not key.startswith("failed")}
    result["unfit"] = sorted(set(tables) - set(result["parity"]))  # cuts that the device cannot hold
    for key, value in sorted(result["parity"].items()):
        say(f"parity {key}", f"{value:.2e}")
    result["bandwidth"] = bandwidth = read_bandwidth()
    say(f"copy GB/s ({left():.0f} s left)", round(bandwidth / 1e9))
    small = LayerShape(512, 768, 16, 4, *[WeightFormat.parse("affine4-g64")] * 3)
    result["compiles"] = compiles(small)
    say(f"new compiles over 1..256 tokens ({left():.0f} s left)", result["compiles"])
    for name in formats:
        shape = qwen(name)
        result[f"invariant {name}"] = invariant(shape)
        say(f"{name} invariant 1..64 ({left():.0f} s left)", result[f"invariant {name}"])
        save()
        for tokens, rows in plan:
            if left() < 60:
                say("skipped for lack of time", (name, tokens, rows))
                continue
            found = tune(shape, tokens, rows, cuts_for(shape, rows))
            result["tune"] += found
            save()
            for part in dict.fromkeys(row["part"] for row in found):
                best = sorted((row for row in found if row["part"] == part and row["us"]), key=lambda row: row["us"])[
                    :4
                ]
                say(f"{name} {tokens} rows {rows} {part}", "; ".join(f"{r['us']:.1f} {r['cut']}" for r in best))
        points = [(n, 0) for n in (1, 2, 4, 8, 16, 32)] + [(n, 16) for n in (4, 8, 16, 32, 64, 128)]
        points += [(128, 32), (256, 64), (512, 64), (1024, 128), (2048, 64), (2048, 128)]
        for tokens, rows in points:
            if left() < 15:
                say("skipped for lack of time", (name, tokens, rows))
                continue
            row = whole(shape, tokens, rows, bandwidth)
            result["times"].append(row)
            save()
            print(name, row["path"], tokens, f"{row['us']:.1f} us, floor {row['floor_us']:.1f}, "
                  f"intercept {row['intercept_us']:.0f}, finite {row['finite']}", flush=True)  # fmt: skip
    say("seconds used", round(time.monotonic() - start))


if __name__ == "__main__":
    main()
