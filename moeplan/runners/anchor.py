"""A big copy and a big read, timed once a round: the roof that the arms of that round stand under."""

import time
from collections.abc import Callable

CPU_BYTES = 1 << 27  # 128 MiB: four 32 MiB last-level caches
GPU_BYTES = 1 << 30  # 1 GiB: seventeen 60 MB last-level caches (H200)
REPEATS = {"cpu": 1, "gpu": 16}  # in one wait, so that the wait itself is small beside them
TRIES = 2  # the best of these counts


def anchor(runner: str) -> dict[str, float]:
    """`copy_bytes_per_s` (bytes read plus bytes written) and `read_bytes_per_s` of the runner's own device."""
    copy, read, size, repeats = {"mlx": _mlx, "triton": _torch}.get(runner, _numpy)()
    return {
        "copy_bytes_per_s": 2 * size * repeats / _best(copy),
        "read_bytes_per_s": size * repeats / _best(read),
        "anchor_bytes": size,
    }


_Timed = tuple[Callable[[], object], Callable[[], object], int, int]


def _mlx() -> _Timed:
    import mlx.core as mx

    kind = "gpu" if mx.default_device().type == mx.gpu else "cpu"
    size = GPU_BYTES if kind == "gpu" else CPU_BYTES
    block = mx.ones((size // 4,), dtype=mx.float32)
    mx.eval(block)

    def copy() -> None:
        target = block
        for _ in range(REPEATS[kind]):
            target = target + 1.0
        mx.eval(target)

    def read() -> None:
        mx.eval([mx.max(block) for _ in range(REPEATS[kind])])

    return copy, read, size, REPEATS[kind]


def _torch() -> _Timed:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = GPU_BYTES if device == "cuda" else CPU_BYTES
    repeats = REPEATS["gpu" if device == "cuda" else "cpu"]
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def copy() -> None:
        for _ in range(repeats):
            target.copy_(source)
        wait()

    def read() -> None:
        for _ in range(repeats):
            source.max()
        wait()

    return copy, read, size, repeats


def _numpy() -> _Timed:
    import numpy as np

    source = np.ones(CPU_BYTES // 4, dtype=np.float32)
    target = np.empty_like(source)
    return lambda: np.copyto(target, source), source.max, CPU_BYTES, 1


def _best(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
