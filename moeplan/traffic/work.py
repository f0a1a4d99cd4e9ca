"""Work: bytes, slots, distinct experts, tiles and launches of one layer on one routing. Integers, no clock."""

from dataclasses import dataclass

from moeplan.traffic.expect import ExpectedWork, expected_work
from moeplan.traffic.load import ExpertLoad
from moeplan.traffic.path import PathSpec
from moeplan.traffic.shape import LayerShape
from moeplan.traffic.tiles import tiles_of

__all__ = ["ExpectedWork", "Work", "expected_work", "work_of"]

_ACTIVATION_BYTES = 2  # activations are bf16 or f16 in every path moeplan knows


@dataclass(frozen=True, slots=True)
class Work:
    """What one layer (or a sum of layers) asks of the machine; adds like numbers.

    unique_weight_bytes: every distinct plane once; issued_weight_bytes: planes as often as the path reads them.
    activation_bytes: a slot's input row, hidden row (written, read) and output row (written, read), and the
    token's result. flops: useful ones, 2 a weight and slot. tiles: products of a plane and a tile of rows, one
    plane read each; padded_rows: rows of those tiles computed for nothing.
    """

    unique_weight_bytes: int = 0
    issued_weight_bytes: int = 0
    activation_bytes: int = 0
    flops: int = 0
    dispatches: int = 0
    slots: int = 0
    distinct: int = 0
    tiles: int = 0
    padded_rows: int = 0

    def __add__(self, other: "Work") -> "Work":
        """Field by field."""
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __mul__(self, layers: int) -> "Work":
        """The work of that many equal layers."""
        return Work(*(getattr(self, name) * layers for name in self.__slots__))

    @property
    def occupancy(self) -> float:
        """Useful rows a computed row."""
        return self.slots / (self.slots + self.padded_rows) if self.slots else 0.0


def work_of(path: PathSpec, load: ExpertLoad, shape: LayerShape) -> Work:
    """The work of one MoE layer of that shape on that load: routed experts only."""
    tiles, padded = tiles_of(path, load)
    row = load.slots * (3 * shape.hidden + 2 * shape.expert_hidden) + load.tokens * shape.hidden
    return Work(
        unique_weight_bytes=load.distinct * shape.plane_bytes,
        issued_weight_bytes=tiles * shape.plane_bytes,
        activation_bytes=row * _ACTIVATION_BYTES,
        flops=2 * shape.plane_weights * load.slots,
        dispatches=path.launches(load.tokens),
        slots=load.slots,
        distinct=load.distinct,
        tiles=tiles,
        padded_rows=padded,
    )
