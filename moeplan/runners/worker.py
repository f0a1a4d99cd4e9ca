"""The child process: reads arms as JSON lines, times them, answers each with one JSON line.

`python -m moeplan.runners.worker --runner mlx|triton|python [--kernel package.module:object]`. It speaks the very
protocol of `--runner exec`; docs/bring-your-own-kernel.md has the fields.
"""

import argparse
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.errors import MoeplanError
from moeplan.kernels.protocol import Arm, IntArray, Kernel
from moeplan.runners.anchor import anchor
from moeplan.runners.host import clocks
from moeplan.runners.parity import parity
from moeplan.runners.spec import PARITY_BOUND
from moeplan.traffic.shape import LayerShape

STATES_KEPT = 1024  # prepared arms, more than a run has: ids, inputs, graphs; the weights are the kernel's to share
WARM_AGAIN_BELOW_S = 0.1  # a short chain below this is run once untimed before every timing, not only the first


class Worker:
    """Answers arms. kernels: path -> factory; each is made once, when first asked for."""

    def __init__(self, runner: str, kernels: dict[str, Callable[[], Kernel]], facts: dict[str, Any]) -> None:
        """facts: `engine_version` and `device`, for `describe`."""
        self._runner = runner
        self._factories = kernels
        self._facts = facts
        self._made: dict[str, Kernel] = {}
        self._states: OrderedDict[str, Any] = OrderedDict()
        self._seen: dict[str, dict[str, Any]] = {}
        self._short: dict[str, float] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one line; whatever goes wrong in a kernel becomes `error`."""
        name = request.get("arm")
        try:
            return {"arm": name} | self._dispatch(request)
        except Exception as bad:
            return {"arm": name, "error": f"{type(bad).__name__}: {bad}"}

    def _dispatch(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["path"] == "describe":
            return {"paths": list(self._factories)} | self._facts
        if request["path"] == "anchor":
            return {"anchor": anchor(self._runner), "clocks": clocks()}
        arm = Arm(
            request["arm"], request["path"], LayerShape.from_dict(request["shape"]), int(request["tokens"]),
            request["routing"], int(request["seed"]), (int(request["chain"][0]), int(request["chain"][1])),
        )  # fmt: skip
        if arm.path not in self._factories:
            return {"declined": f"no path {arm.path!r} (known: {', '.join(self._factories)})"}
        kernel = self._kernel(arm.path)
        reason = kernel.declines(arm.shape, arm.tokens)
        if reason:
            return {"declined": reason}
        return self._time(kernel, arm, Path(request["ids_file"]), int(request["layers"]))

    def _kernel(self, path: str) -> Kernel:
        if path not in self._made:
            self._made[path] = self._factories[path]()
        return self._made[path]

    def _time(self, kernel: Kernel, arm: Arm, ids_file: Path, layers: int) -> dict[str, Any]:
        fresh = arm.id not in self._states
        if fresh:
            ids = np.fromfile(ids_file, "<i4").reshape(layers, arm.tokens, arm.shape.top_k).astype(np.int32)
            self._states[arm.id] = kernel.prepare(arm, ids)
            while len(self._states) > STATES_KEPT:
                self._states.popitem(last=False)
            if arm.id not in self._seen:
                self._seen[arm.id] = self._checked(kernel, arm, ids)
        self._states.move_to_end(arm.id)
        state, facts = self._states[arm.id], self._seen[arm.id]
        rms = facts["parity_rms"]
        if rms is not None and not rms <= PARITY_BOUND:
            return {"error": f"parity: relative RMS {rms:.3g} against the float64 reference, bound {PARITY_BOUND:g}"}
        if fresh:
            kernel.run(state, arm.chain[1])
        if fresh or self._short[arm.id] < WARM_AGAIN_BELOW_S:
            kernel.run(state, arm.chain[0])
        timed: dict[str, Any] = {}
        for name, length in zip(("short_s", "long_s"), arm.chain, strict=True):
            timed |= _seconds(kernel, state, length, name)
        self._short[arm.id] = timed["short_s"]
        return timed | facts

    def _checked(self, kernel: Kernel, arm: Arm, ids: IntArray) -> dict[str, Any]:
        state = self._states[arm.id]
        checked = getattr(kernel, "has_reference", True)
        return {
            "signature": kernel.signature(state),
            "config_hash": kernel.config_hash(),
            "parity_rms": parity(kernel, state, arm, ids[0]) if checked else None,
            "batch_invariant": getattr(kernel, "batch_invariant", None),
        }


def _seconds(kernel: Kernel, state: Any, layers: int, name: str) -> dict[str, float]:
    """The kernel's own seconds with the wall clock beside them, or the wall clock alone where it returns none."""
    start = time.perf_counter()
    own = kernel.run(state, layers)
    wall = time.perf_counter() - start
    return {name: wall} if own is None else {name: float(own), f"wall_{name}": wall}


def built_in(runner: str, kernel: str) -> Worker:
    """The worker of a runner. Raises ImportError where its packages are missing."""
    if runner == "mlx":
        import mlx.core as mx

        kernels: dict[str, Callable[[], Kernel]] = dict(import_module("moeplan.kernels.mlx_paths").KERNELS)
        facts = {"engine_version": metadata.version("mlx"), "device": str(mx.device_info().get("device_name"))}
    elif runner == "triton":
        import torch
        import triton

        paths = import_module("moeplan.kernels.triton_paths")
        kernels = dict(paths.KERNELS)
        device = torch.cuda.get_device_name() if paths.device_name() == "cuda" else "cpu, interpreted"
        facts = {"engine_version": triton.__version__, "device": device}
    else:
        found = named(kernel)
        kernels = {found.name: lambda: found}
        facts = {"engine_version": str(getattr(found, "version", "local"))}
    return Worker(runner, kernels, facts)


def named(kernel: str) -> Kernel:
    """The object of `package.module:object`; a class or a factory is called."""
    module, _, name = kernel.partition(":")
    sys.path.insert(0, os.getcwd())
    found = getattr(import_module(module), name)
    made: Kernel = found if hasattr(found, "run") and not isinstance(found, type) else found()
    return made


def serve(worker: Worker, source: Any, sink: Any) -> None:
    """One answer line for every line of source, until it ends."""
    for line in source:
        if line.strip():
            sink.write(json.dumps(worker.answer(json.loads(line))) + "\n")
            sink.flush()


def main() -> None:
    """Entry point; standard output is kept for answers, whatever a library prints goes to standard error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runner", required=True)
    parser.add_argument("--kernel", default="")
    chosen = parser.parse_args()
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        worker = built_in(chosen.runner, chosen.kernel)
    except Exception as bad:
        worker = _Broken(str(bad) if isinstance(bad, MoeplanError) else f"{type(bad).__name__}: {bad}")
    serve(worker, sys.stdin, sink)


class _Broken(Worker):
    """Answers every line with the reason why the runner cannot start."""

    def __init__(self, reason: str) -> None:
        super().__init__("", {}, {})
        self._reason = reason

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"arm": request.get("arm"), "error": self._reason}


if __name__ == "__main__":
    main()
