"""The Triton paths as kernels that moeplan can calibrate and verify: `fused` and `grouped:B`.

torch and triton are imported when a kernel is prepared, not before.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.errors import MoeplanError
from moeplan.kernels.protocol import Arm, FloatArray, IntArray, Kernel
from moeplan.kernels.triton_config import BLOCK_ROWS, declines, fused_tiles, grouped_tiles
from moeplan.kernels.triton_interpret import INTERPRETED
from moeplan.traffic.shape import LayerShape, WeightFormat

_SOURCES = ("triton_common", "triton_config", "triton_layer", "triton_launch", "triton_fused", "triton_grouped")
_WEIGHTS: dict[tuple[LayerShape, str], list[Any]] = {}  # one set at a time: arms of one shape share its layers
_PLANES: OrderedDict[tuple[LayerShape, int], tuple[FloatArray, FloatArray, FloatArray]] = (
    OrderedDict()
)  # of layer 0, for parity
_PLANES_BYTES = 4e9  # what they may hold: all 128 experts of Qwen3-30B-A3B are 2.4 GB in float32


@dataclass(slots=True, eq=False)
class State:
    """Everything one arm needs between runs."""

    arm: Arm
    device: str
    experts: list[Any]
    x0: Any
    ids: Any  # int32 [layers, tokens, top_k]
    scores: Any  # float32 [layers, tokens, top_k]
    scratch: Any
    buffers: tuple[Any, Any]
    launched: tuple[str, ...] = ()
    graphs: dict[int, Any] = field(default_factory=dict)


def device_name() -> str:
    """`cuda`, or `cpu` under the interpreter. Raises MoeplanError where neither is there."""
    import torch

    if torch.cuda.is_available() and not INTERPRETED:
        return "cuda"
    if INTERPRETED:
        return "cpu"
    raise MoeplanError("no CUDA device (TRITON_INTERPRET=1 runs the kernels slowly on the CPU)")


def random_experts(shape: LayerShape, layers: int, device: str) -> list[Any]:
    """Random planes of at least that many layers, drawn on the device as `formats.random_planes` draws them.

    The list is shared and only grows, so that arms with chains of different lengths hold one set of weights.
    """
    key = (shape, device)
    if key not in _WEIGHTS:
        _WEIGHTS.clear()
        _PLANES.clear()
        _WEIGHTS[key] = []
    kept = _WEIGHTS[key]
    kept.extend(_draw_layer(shape, seed, device) for seed in range(len(kept), layers))
    return kept


def _draw_layer(shape: LayerShape, seed: int, device: str) -> Any:
    import torch

    from moeplan.kernels.formats import code_std
    from moeplan.kernels.triton_layer import DeviceExperts, DeviceMatrix

    generator = torch.Generator(device).manual_seed(seed)

    def draw(form: WeightFormat, rows: int, fan_in: int) -> Any:
        size = (shape.experts, rows, fan_in)
        if form.bits == 16:
            values = torch.empty(size, dtype=torch.bfloat16, device=device)
            return DeviceMatrix(form, values.normal_(std=fan_in**-0.5, generator=generator))
        words = (shape.experts, rows, fan_in // 8)
        codes = torch.randint(-(2**31), 2**31, words, dtype=torch.int32, device=device, generator=generator)
        spread = torch.rand((2, shape.experts, rows, fan_in // form.group), device=device, generator=generator)
        scales = (0.9 + 0.2 * spread[0]) / (fan_in**0.5 * code_std(form.bits))
        biases = -0.5 * (2**form.bits - 1) * scales * (0.98 + 0.04 * spread[1])
        return DeviceMatrix(form, codes, scales.bfloat16(), biases.bfloat16())

    assert shape.gate is not None
    inner = shape.expert_hidden
    gate, up = draw(shape.gate, inner, shape.hidden), draw(shape.up, inner, shape.hidden)
    return DeviceExperts(shape, gate, up, draw(shape.down, shape.hidden, inner))


class _TritonKernel:
    """What both paths share; `block_rows` 0 is `fused`."""

    def __init__(self, name: str, block_rows: int) -> None:
        self.name, self.block_rows = name, block_rows

    def declines(self, shape: LayerShape, tokens: int) -> str | None:
        """See triton_config.declines."""
        return declines(shape, tokens)

    def config_hash(self) -> str:
        """SHA-256 over the path's name and the text of every kernel module, which holds the tiles too."""
        here = Path(__file__).parent
        text = "\0".join([self.name, *((here / f"{name}.py").read_text(encoding="utf-8") for name in _SOURCES)])
        return hashlib.sha256(text.encode()).hexdigest()

    def prepare(self, arm: Arm, ids: IntArray) -> State:
        """Weights, inputs, buffers and, on a GPU, one CUDA graph for each of the two chain lengths.

        ids int32 [layers, tokens, top_k]. Raises MoeplanError where the kernel declines or there is no device.
        """
        import torch

        from moeplan.kernels.triton_layer import make_scratch

        if reason := self.declines(arm.shape, arm.tokens):
            raise MoeplanError(f"arm {arm.id}: {self.name} declines: {reason}")
        device, layers = device_name(), arm.chain[1]
        if ids.shape[0] < layers or ids.shape[1:] != (arm.tokens, arm.shape.top_k):
            raise MoeplanError(f"arm {arm.id}: ids {ids.shape} for {layers} layers of {arm.tokens} tokens")
        rng = np.random.default_rng(arm.seed)
        x0 = rng.standard_normal((arm.tokens, arm.shape.hidden), dtype=np.float32)
        scores = rng.random(ids[:layers].shape, dtype=np.float32) + np.float32(0.1)
        scores /= scores.sum(axis=-1, keepdims=True)
        x = torch.from_numpy(x0).to(device).bfloat16()
        state = State(
            arm,
            device,
            random_experts(arm.shape, layers, device),
            x,
            torch.from_numpy(np.ascontiguousarray(ids[:layers], dtype=np.int32)).to(device),
            torch.from_numpy(scores).to(device),
            make_scratch(arm.shape, arm.tokens, self.block_rows, device),
            (torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))),
        )
        if device == "cuda":
            for length in sorted(set(arm.chain)):
                state.graphs[length] = self._capture(state, length)
        return state

    def _capture(self, state: State, layers: int) -> Any:
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles outside the capture
            self._chain(state, min(layers, 2))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._chain(state, layers)
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def _chain(self, state: State, layers: int) -> None:
        """x of the next layer = x0 + layer(x): each layer needs the last, and magnitudes stay."""
        from moeplan.kernels.triton_layer import Call

        source = state.x0
        for layer in range(layers):
            target = state.buffers[layer % 2]
            call = Call(source, state.ids[layer], state.scores[layer], target, state.x0)
            state.launched = self._launch(state.experts[layer], call, state.scratch)
            source = target

    def _launch(self, experts: Any, call: Any, scratch: Any) -> tuple[str, ...]:
        from moeplan.kernels.triton_launch import run_fused, run_grouped

        if not self.block_rows:
            return run_fused(experts, call, scratch, fused_tiles(experts.shape))
        tiles = grouped_tiles(experts.shape, self.block_rows)
        return run_grouped(experts, call, scratch, tiles, self.block_rows)

    def run(self, state: State, layers: int) -> float | None:
        """One replay of the chain; seconds between two CUDA events, None on the CPU."""
        if state.device == "cpu":
            self._chain(state, layers)
            return None
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        state.graphs[layers].replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def layer(self, state: State, x: FloatArray, ids: IntArray, scores: FloatArray) -> FloatArray:
        """Layer 0 alone, without a residual, from bf16 x to bf16 outputs (returned as float32)."""
        import torch

        from moeplan.kernels.triton_layer import Call, make_scratch

        device, shape = state.device, state.arm.shape
        inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(device).bfloat16()
        chosen = torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int32)).to(device)
        weights = torch.from_numpy(np.ascontiguousarray(scores, dtype=np.float32)).to(device)
        out = torch.full_like(inputs, float("nan"))
        scratch = make_scratch(shape, len(inputs), self.block_rows, device)
        state.launched = self._launch(state.experts[0], Call(inputs, chosen, weights, out), scratch)
        values: FloatArray = out.float().cpu().numpy()
        return values

    def planes(self, state: State, expert: int) -> tuple[FloatArray | None, FloatArray, FloatArray]:
        """Gate, up and down of layer 0 as stored, dequantised to float32; the last few are kept."""
        key = (state.arm.shape, expert)
        if key not in _PLANES:
            gate, up, down = (matrix.astype(np.float32) for matrix in state.experts[0].dense(expert))
            _PLANES[key] = gate, up, down
            while len(_PLANES) > max(1, _PLANES_BYTES / (4 * state.arm.shape.plane_weights)):
                _PLANES.popitem(last=False)
        return _PLANES[key]

    def signature(self, state: State) -> str:
        """`grouped:16 rows=16 launches=4 kernels=align,...` from the last launch."""
        names = ",".join(state.launched)
        return f"{self.name} rows={self.block_rows or 1} launches={len(state.launched)} kernels={names}"


class FusedKernel(_TritonKernel):
    """`fused`: three launches, a plane read once a slot; each row is bit-identical whatever the batch."""

    def __init__(self) -> None:  # noqa: D107
        super().__init__("fused", 0)


class GroupedKernel(_TritonKernel):
    """`grouped:B`: four launches, a plane read once a block of B sorted rows; not promised to be batch invariant."""

    def __init__(self, block_rows: int) -> None:  # noqa: D107
        if block_rows not in BLOCK_ROWS:
            raise MoeplanError(f"path grouped:{block_rows}: block rows must be one of {BLOCK_ROWS}")
        super().__init__(f"grouped:{block_rows}", block_rows)


KERNELS: dict[str, Callable[[], Kernel]] = {
    "fused": FusedKernel,
    **{f"grouped:{rows}": partial(GroupedKernel, rows) for rows in BLOCK_ROWS},
}
