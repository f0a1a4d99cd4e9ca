"""Sees the expert ids that reach the expert layers of a loaded mlx-lm model, without changing what it computes.

Every MoE family of mlx-lm but dbrx runs its experts through SwitchGLU or SwitchMLP (mlx_lm/models/switch_layers.py),
called once a forward pass and MoE layer with (x, indices): the indices are what was routed. Each such module gets,
for as long as the tap is open, a subclass of its own class that keeps the indices and then calls the original.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError

__all__ = ["Tap", "tapped"]

Ids = npt.NDArray[np.int32]


@dataclass(slots=True)
class Tap:
    """What the expert layers were called with since the last `take`; one list a layer, in layer order.

    layer_ids: positions in model.layers, rising; experts: of the largest layer; seen: lazy index arrays.
    """

    layer_ids: tuple[int, ...]
    experts: int
    seen: tuple[list[Any], ...] = field(default=())

    def take(self, rows: int) -> Ids:
        """Ids int32 [rows, layers, top_k] of one forward pass over `rows` tokens, row-major; then forgets them.

        Layers of a smaller top_k are padded with -1. Raises MoeplanError where a layer was not called exactly once
        with that many rows, or where its ids have no values because it ran inside mx.compile.
        """
        try:
            layers = [self._layer(i, rows) for i in range(len(self.layer_ids))]
        finally:
            for calls in self.seen:
                calls.clear()
        top_k = max(ids.shape[1] for ids in layers)
        if all(ids.shape[1] == top_k for ids in layers):
            return np.stack(layers, axis=1)
        out = np.full((rows, len(layers), top_k), -1, dtype=np.int32)
        for i, ids in enumerate(layers):
            out[:, i, : ids.shape[1]] = ids
        return out

    def _layer(self, i: int, rows: int) -> Ids:
        where, calls = f"layer {self.layer_ids[i]}", self.seen[i]
        if not calls:
            raise MoeplanError(f"{where}: its experts were called unseen or not at all; {_REMEDY}")
        if len(calls) > 1:
            raise MoeplanError(f"{where}: its experts were called {len(calls)} times in one pass, expected once")
        try:
            found = np.array(calls[0]).astype(np.int32)
        except (RuntimeError, ValueError) as bad:
            raise MoeplanError(f"{where}: its expert ids have no values; {_REMEDY}") from bad
        ids = found.reshape(-1, found.shape[-1])
        if len(ids) != rows:
            raise MoeplanError(f"{where}: its experts saw {len(ids)} rows in a pass of {rows} tokens")
        return ids


_REMEDY = "if the layer runs inside mx.compile, set MLX_DISABLE_COMPILE=1 and record again"


@contextmanager
def tapped(model: Any) -> Iterator[Tap]:
    """A Tap on every expert layer of an mlx-lm model; the model's classes are put back afterwards, come what may.

    Raises MoeplanError: no expert layer (dense, or a family without SwitchGLU and SwitchMLP), two in one layer,
    zero-computation experts (they reach the expert layer as expert 0), a tap already open on the model.
    """
    found = _expert_layers(model)
    tap = Tap(
        layer_ids=tuple(found),
        experts=max(_experts(module) for module in found.values()),
        seen=tuple([] for _ in found),
    )
    classes = {i: type(module) for i, module in found.items()}
    try:
        for calls, (i, module) in zip(tap.seen, found.items(), strict=True):
            object.__setattr__(module, "__class__", _watched(classes[i], calls))
        yield tap
    finally:
        for i, module in found.items():
            object.__setattr__(module, "__class__", classes[i])


def _watched(base: type, calls: list[Any]) -> type:
    def call(self: Any, x: Any, indices: Any, *rest: Any, **named: Any) -> Any:
        calls.append(indices)
        return base.__call__(self, x, indices, *rest, **named)

    return type(base.__name__, (base,), {"__call__": call, "_moeplan_tap": True, "__module__": base.__module__})


def _expert_layers(model: Any) -> dict[int, Any]:
    """Position in model.layers -> its SwitchGLU or SwitchMLP."""
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

    name = type(model).__module__.rpartition(".")[2]
    found: dict[int, Any] = {}
    for i, layer in enumerate(getattr(model, "layers", None) or []):
        for path, module in layer.named_modules() if layer is not None else ():
            if getattr(module, "zero_expert_num", 0):
                raise MoeplanError(f"{name}: zero-computation experts look like expert 0 here: cannot be recorded")
            if not isinstance(module, SwitchGLU | SwitchMLP):
                continue
            if hasattr(module, "_moeplan_tap"):
                raise MoeplanError(f"{name}: layer {i} is being recorded already")
            if i in found:
                raise MoeplanError(f"{name}: layer {i} has more than one expert layer, the second is {path}")
            found[i] = module
    if not found:
        raise MoeplanError(f"{name}: no layer of the model calls SwitchGLU or SwitchMLP: nothing to record")
    return found


def _experts(module: Any) -> int:
    """Experts of a SwitchGLU or SwitchMLP: rows of its first stacked matrix, quantized or not."""
    return int(next(child.num_experts for child in module.children().values() if hasattr(child, "num_experts")))
