"""Weight formats of a config.json: its dtype, an MLX `quantization` with overrides, or a Hugging Face method."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from moeplan.errors import MoeplanError
from moeplan.traffic.fields import Fields
from moeplan.traffic.shape import WeightFormat

Kind = Literal["routed", "shared"]
Projection = Literal["gate", "up", "down"]

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# Module names in published checkpoints and in mlx-lm's models: SwitchGLU, SwitchMLP, fused gate_up, w1/w2/w3.
_ROUTED = {"experts", "switch_mlp", "switch_glu"}
_SHARED = {"shared_expert", "shared_experts", "shared_mlp"}
_PROJECTIONS: dict[str, tuple[Projection, ...]] = {
    "gate_proj": ("gate",),
    "w1": ("gate",),
    "gate_up_proj": ("gate", "up"),
    "up_proj": ("up",),
    "w3": ("up",),
    "fc1": ("up",),
    "down_proj": ("down",),
    "w2": ("down",),
    "fc2": ("down",),
}
_MODE_DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # MLX: group, bits


@dataclass(frozen=True, slots=True)
class Formats:
    """The format of every expert matrix: a base and what differs from it."""

    base: WeightFormat
    overrides: Mapping[tuple[int, Kind, Projection], WeightFormat]
    shared: WeightFormat
    note: str | None = None

    def of(self, layer: int, kind: Kind, projection: Projection) -> WeightFormat:
        """The format of one matrix."""
        return self.overrides.get((layer, kind, projection), self.base if kind == "routed" else self.shared)


def formats(fields: Fields) -> Formats:
    """Raises MoeplanError for a dtype or method that is not understood, or two descriptions that disagree."""
    for prefix, table in fields.tables:
        new, old = table.get("dtype"), table.get("torch_dtype")
        if new is not None and old is not None and new != old:
            raise fields.fail(f"{prefix}dtype = {new!r} disagrees with {prefix}torch_dtype = {old!r}")
    dtype = fields.first("dtype", "torch_dtype")
    note = None if dtype is not None else "dtype is not given; bf16 assumed"
    plain_name = _DTYPES.get(str(dtype or "bfloat16").removeprefix("torch."))
    if plain_name is None:
        raise fields.fail(f"dtype = {dtype!r} is not understood (known: {', '.join(_DTYPES)})")
    plain = WeightFormat.parse(plain_name)
    scheme = fields.one("quantization", "quantization_config")
    if scheme is None:
        return Formats(plain, {}, plain, note)
    if not isinstance(scheme, dict):
        raise fields.fail(f"quantization = {scheme!r}, expected an object")
    if "quant_method" in scheme:
        return _hugging_face(fields, scheme, plain)
    return _mlx(fields, scheme, plain)


def _mlx_format(fields: Fields, where: str, entry: Mapping[str, Any]) -> WeightFormat:
    mode = entry.get("mode", "affine")
    if mode not in _MODE_DEFAULTS:
        raise fields.fail(f"{where}.mode = {mode!r} is not understood (known: {', '.join(_MODE_DEFAULTS)})")
    group, bits = _MODE_DEFAULTS[mode]
    found = (entry.get("group_size", group), entry.get("bits", bits))
    if mode != "affine":
        if found != (group, bits):
            raise fields.fail(f"{where}: {mode} has group_size {group} and bits {bits}, found {found}")
        return WeightFormat.parse(mode)
    if type(found[0]) is not int or found[0] < 1:
        raise fields.fail(f"{where}.group_size = {found[0]!r}, expected a positive whole number")
    try:
        return WeightFormat.parse(f"affine{found[1]}-g{found[0]}")
    except MoeplanError as bad:
        raise fields.fail(f"{where}.bits = {found[1]!r}: not an affine width of MLX") from bad


def _mlx(fields: Fields, scheme: Mapping[str, Any], plain: WeightFormat) -> Formats:
    base = _mlx_format(fields, "quantization", scheme)
    overrides: dict[tuple[int, Kind, Projection], WeightFormat] = {}
    for path, entry in scheme.items():
        if not isinstance(entry, dict | bool):
            continue
        here = _address(path)
        if here is None:
            continue
        form = base if entry is True else plain
        if isinstance(entry, dict):
            form = _mlx_format(fields, f"quantization.{path}", entry)
        for projection in here[2]:
            key = (here[0], here[1], projection)
            if overrides.setdefault(key, form) != form:
                raise fields.fail(f"quantization.{path}: {form.name} disagrees with {overrides[key].name} before it")
    return Formats(base, overrides, base)


def _address(path: str) -> tuple[int, Kind, tuple[Projection, ...]] | None:
    """Layer, kind and projections of a module path, or None where it is no expert matrix."""
    parts = path.split(".")
    names = _PROJECTIONS.get(parts[-1])
    if names is None or "layers" not in parts[:-1]:
        return None
    index = parts[parts.index("layers") + 1]
    kind: Kind | None = "shared" if _SHARED & set(parts) else "routed" if _ROUTED & set(parts) else None
    return (int(index), kind, names) if kind and index.isdecimal() else None


def _hugging_face(fields: Fields, scheme: Mapping[str, Any], plain: WeightFormat) -> Formats:
    method = scheme["quant_method"]
    if method == "fp8":
        block = scheme.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        ):
            raise fields.fail(f"quantization_config.weight_block_size = {block!r}, expected two positive numbers")
        form = WeightFormat.parse(f"fp8-e4m3-b{block[0]}x{block[1]}" if block else "fp8-e4m3")
    elif method == "mxfp4":
        form = WeightFormat.parse("mxfp4")
    else:
        raise fields.fail(
            f"quantization_config.quant_method = {method!r} is not understood (known: fp8, mxfp4, MLX); write a card"
        )
    skip = scheme.get("modules_to_not_convert") or scheme.get("ignored_layers") or []
    if not isinstance(skip, list):
        raise fields.fail(f"quantization_config.modules_to_not_convert = {skip!r}, expected a list")
    routed = plain if _skipped(skip, "experts") else form
    # Transformers' mxfp4 quantizer replaces the routed experts' module alone.
    shared = plain if method == "mxfp4" or _skipped(skip, "shared_experts") else form
    overrides = _skipped_layers(skip, plain)
    return Formats(routed, overrides, shared)


def _skipped(patterns: list[Any], module: str) -> bool:
    """Whether a pattern without a layer number keeps that module of every layer from being converted."""
    return any(_covers(str(pattern).split("."), ["model", "layers", "*", "mlp", module]) for pattern in patterns)


def _covers(pattern: list[str], path: list[str]) -> bool:
    """Whether the pattern's parts occur in the path in a row, with `*` standing for any part."""
    spans = range(len(path) - len(pattern) + 1)
    return any(all(fnmatchcase(p, q) for q, p in zip(pattern, path[at:], strict=False)) for at in spans)


def _skipped_layers(patterns: list[Any], plain: WeightFormat) -> dict[tuple[int, Kind, Projection], WeightFormat]:
    found: dict[tuple[int, Kind, Projection], WeightFormat] = {}
    every: tuple[Projection, ...] = ("gate", "up", "down")
    for pattern in patterns:
        parts = str(pattern).split(".")
        if "layers" not in parts[:-1] or not parts[parts.index("layers") + 1].isdecimal():
            continue
        layer, rest = int(parts[parts.index("layers") + 1]), parts[parts.index("layers") + 2 :]
        address = _address(str(pattern))
        kinds: list[Kind] = ["shared"] if _SHARED & set(rest) else ["routed"] if _ROUTED & set(rest) else []
        if not rest or rest == ["mlp"]:
            kinds = ["routed", "shared"]
        for kind in kinds:
            for projection in address[2] if address else every:
                found[layer, kind, projection] = plain
    return found
