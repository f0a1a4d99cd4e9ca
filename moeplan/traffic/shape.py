"""The geometry of one MoE layer and the storage of its weights: integers only."""

import re
from dataclasses import dataclass
from typing import Literal

from moeplan.errors import MoeplanError

Activation = Literal["swiglu", "geglu", "relu2", "swiglu_oai", "gelu", "relu"]

_AFFINE = re.compile(r"affine([2345678])-g(\d+)$")
_FIXED = {  # name: (bits, group, scale bytes a group); facts: MLX quantization modes, OCP MX, DeepSeek-V3 block fp8
    "f32": (32, 0, 0),
    "bf16": (16, 0, 0),
    "f16": (16, 0, 0),
    "fp8-e4m3": (8, 0, 0),
    "mxfp4": (4, 32, 1),
    "mxfp8": (8, 32, 1),
    "nvfp4": (4, 16, 1),
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of one matrix are stored.

    `affine4-g64` keeps 4-bit codes and, for each group of 64 along the input axis, an fp16/bf16 scale and
    bias (MLX `quantize`, 0.5625 bytes a weight). `fp8-e4m3-b128x128` keeps one float32 scale a 128 x 128 block.
    """

    name: str
    bits: int
    group: int = 0  # weights along the input axis that share a scale; 0 = no scales
    scale_bytes: int = 0  # bytes of scale (and bias) a group
    block: tuple[int, int] | None = None  # rows x columns that share one float32 scale

    @classmethod
    def parse(cls, name: str) -> "WeightFormat":
        """`bf16`, `f16`, `f32`, `mxfp4`, `mxfp8`, `nvfp4`, `fp8-e4m3`, `fp8-e4m3-bRxC`, `affineB-gG`."""
        if name in _FIXED:
            bits, group, scale = _FIXED[name]
            return cls(name, bits, group, scale)
        if match := _AFFINE.match(name):
            return cls(name, int(match[1]), int(match[2]), 4)
        if match := re.match(r"fp8-e4m3-b(\d+)x(\d+)$", name):
            return cls(name, 8, block=(int(match[1]), int(match[2])))
        known = ", ".join(_FIXED)
        raise MoeplanError(f"unknown weight format {name!r} (known: {known}, affine4-g64, fp8-e4m3-b128x128)")

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of a [rows, columns] matrix, scales and biases included; columns are the input axis."""
        total = rows * ((columns * self.bits + 31) // 32 * 4 if self.bits < 8 else columns * self.bits // 8)
        if self.group:
            total += rows * ((columns + self.group - 1) // self.group) * self.scale_bytes
        if self.block:
            down = (rows + self.block[0] - 1) // self.block[0]
            across = (columns + self.block[1] - 1) // self.block[1]
            total += 4 * down * across
        return total


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One MoE layer as its kernels see it.

    gate, up: [expert_hidden, hidden]; down: [hidden, expert_hidden]; `gate` is None where an expert has two
    matrices. `plane_bytes` is what one expert costs to read once.
    """

    hidden: int
    expert_hidden: int
    experts: int
    top_k: int
    gate: WeightFormat | None
    up: WeightFormat
    down: WeightFormat
    activation: Activation = "swiglu"

    @property
    def plane_bytes(self) -> int:
        """Bytes of one expert: gate, up and down together."""
        gate = self.gate.bytes(self.expert_hidden, self.hidden) if self.gate else 0
        up = self.up.bytes(self.expert_hidden, self.hidden)
        return gate + up + self.down.bytes(self.hidden, self.expert_hidden)

    @property
    def plane_weights(self) -> int:
        """Number of weights of one expert."""
        return self.hidden * self.expert_hidden * (3 if self.gate else 2)

    @property
    def format_name(self) -> str:
        """`affine4-g64`, or `affine4-g64+affine6-g64` where down differs from gate and up."""
        return self.up.name if self.up == self.down else f"{self.up.name}+{self.down.name}"

    def to_dict(self) -> dict[str, object]:
        """Plain JSON; `from_dict` is its inverse."""
        return {
            "hidden": self.hidden,
            "expert_hidden": self.expert_hidden,
            "experts": self.experts,
            "top_k": self.top_k,
            "gate": self.gate.name if self.gate else None,
            "up": self.up.name,
            "down": self.down.name,
            "activation": self.activation,
        }

    @classmethod
    def from_dict(cls, data: dict[str, object]) -> "LayerShape":
        """Raises MoeplanError where a key is missing or a format is unknown."""
        try:
            gate = data["gate"]
            return cls(
                int(data["hidden"]),  # type: ignore[call-overload]
                int(data["expert_hidden"]),  # type: ignore[call-overload]
                int(data["experts"]),  # type: ignore[call-overload]
                int(data["top_k"]),  # type: ignore[call-overload]
                WeightFormat.parse(str(gate)) if gate else None,
                WeightFormat.parse(str(data["up"])),
                WeightFormat.parse(str(data["down"])),
                data.get("activation", "swiglu"),  # type: ignore[arg-type]
            )
        except (KeyError, TypeError, ValueError) as bad:
            raise MoeplanError(f"layer shape: {bad!r} in {data}") from bad
