"""Tensor and expert parallel: the shape and the rows that one rank computes. Integers only, no network time."""

from dataclasses import dataclass, replace

from moeplan.errors import Decline, MoeplanError
from moeplan.traffic.shape import LayerShape, WeightFormat


@dataclass(frozen=True, slots=True)
class Partition:
    """tp slices every expert's hidden width; ep deals the experts out in equal contiguous runs.

    rank: the expert-parallel rank looked at, or None for the one with most to read in each batch.
    """

    tp: int = 1
    ep: int = 1
    rank: int | None = 0

    def __post_init__(self) -> None:
        """Raises MoeplanError for a size below one or a rank outside 0..ep-1."""
        for option, value in (("--tp", self.tp), ("--ep", self.ep)):
            if value < 1:
                raise MoeplanError(f"{option} {value}: must be at least 1")
        if self.rank is not None and not 0 <= self.rank < self.ep:
            raise MoeplanError(f"--rank {self.rank}: --ep {self.ep} has the ranks 0..{self.ep - 1}, or worst")

    def local(self, shape: LayerShape) -> LayerShape:
        """The layer of one rank. `experts` stays global: ids are cut by rows, not by shape.

        Raises MoeplanError where the width or the experts do not divide, or where a slice would cut through a
        quantization group or block.
        """
        if shape.experts % self.ep:
            raise MoeplanError(f"--ep {self.ep}: {shape.experts} experts do not divide by {self.ep}")
        if shape.expert_hidden % self.tp:
            raise MoeplanError(f"--tp {self.tp}: expert_hidden {shape.expert_hidden} does not divide by {self.tp}")
        width = shape.expert_hidden // self.tp
        for name, form in (("gate", shape.gate), ("up", shape.up), ("down", shape.down)):
            unit = _unit(form, input_axis=name == "down") if form else 1
            if self.tp > 1 and width % unit:
                raise MoeplanError(
                    f"--tp {self.tp}: a slice of {width} of expert_hidden {shape.expert_hidden} cuts through the"
                    f" {unit}-wide scales of {name} ({form.name if form else ''})"
                )
        return replace(shape, expert_hidden=width)

    def declines(self) -> tuple[Decline, ...]:
        """What this partition costs besides and is not counted."""
        found = []
        if self.ep > 1:
            found.append(Decline("all-to-all", f"--ep {self.ep}: dispatch and combine between ranks are not counted"))
        if self.tp > 1:
            found.append(Decline("all-reduce", f"--tp {self.tp}: the sum over ranks is not counted"))
        return tuple(found)


def _unit(form: WeightFormat, input_axis: bool) -> int:
    if form.block:
        return form.block[1] if input_axis else form.block[0]
    return max(1, form.group) if input_axis else 1
