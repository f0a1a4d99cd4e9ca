"""An engine's choice of kernel path as data: a chain of gates, each with the place in the engine that it comes from."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from moeplan.errors import Decline, MoeplanError
from moeplan.traffic.shape import LayerShape

Variable = Literal["tokens", "slots", "slots_per_expert"]


@dataclass(frozen=True, slots=True)
class Gate:
    """`above` runs where variable >= threshold, `below` where it is smaller; a threshold of None is never reached.

    threshold: the engine's own constant. source: file and line of it. host_visible: the host knows the variable when
    it launches (False: only the device does, so the gate needs a device predicate).
    """

    name: str
    variable: Variable
    threshold: int | None
    below: str
    above: str
    source: str
    host_visible: bool = True

    def value(self, tokens: int, shape: LayerShape) -> int:
        """The variable at that token count, in whole numbers as an engine compares it; padding-free batches."""
        if self.variable == "tokens":
            return tokens
        slots = tokens * shape.top_k
        return slots if self.variable == "slots" else slots // shape.experts

    def first_tokens(self, threshold: int, shape: LayerShape) -> int:
        """The smallest token count of at least 1 whose variable reaches the threshold."""
        if self.variable == "tokens":
            return max(1, threshold)
        slots = threshold if self.variable == "slots" else threshold * shape.experts
        return max(1, -(-slots // shape.top_k))


@dataclass(frozen=True, slots=True)
class Engine:
    """A chain: the first gate that is not passed decides, so a later gate counts only behind the earlier ones.

    runners: names under which its kernels are calibrated. notes: what else decides inside those kernels.
    """

    name: str
    runners: tuple[str, ...]
    gates: tuple[Gate, ...]
    notes: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths in the order in which growing batches meet them."""
        return (self.gates[0].below, *(gate.above for gate in self.gates))

    def limited_to(self, known: Collection[str]) -> tuple["Engine", tuple[Decline, ...]]:
        """The chain without the paths that are not known; their range falls to the path before (at the start, after).

        Raises MoeplanError where fewer than two paths are left.
        """
        gates, declines = list(self.gates), []
        for path in self.paths:
            if path in known:
                continue
            if len(gates) == 1:
                raise MoeplanError(
                    f"--engine {self.name}: needs two calibrated paths of {', '.join(self.paths)};"
                    f" calibrated: {', '.join(sorted(known)) or 'none'}"
                )
            declines.append(Decline(path, "not in this calibration: its range falls to the neighbouring path"))
            index = next((i for i, gate in enumerate(gates) if gate.above == path), None)
            if index is None:
                gates.pop(0)
                continue
            gone = gates.pop(index)
            if index < len(gates):
                gates[index] = replace(gates[index], below=gone.below)
        return replace(self, gates=tuple(gates)), tuple(declines)
