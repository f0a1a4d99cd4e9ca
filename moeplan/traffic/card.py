"""The card file: TOML, one table for every group of MoE layers that are alike."""

import json
import tomllib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

from moeplan.errors import MoeplanError
from moeplan.traffic.model import ModelCard, MoELayer, SharedRun, WeightPosition
from moeplan.traffic.shape import Activation, LayerShape, WeightFormat

_CARD = {
    "name": str,
    "model_type": str,
    "source": str,
    "layers": int,
    "hidden": int,
    "activation": str,
    "weight_position": str,
    "dense_hidden": int,
    "vocabulary": int,
    "tied_embeddings": bool,
    "notes": list,
    "attention": dict,
    "moe": list,
}
_MOE = {
    "layers": str,
    "experts": int,
    "top_k": int,
    "expert_hidden": int,
    "gate": str,
    "up": str,
    "down": str,
    "shared": dict,
}
_SHARED = {"count": int, "expert_hidden": int, "run": str, "gate": str, "up": str, "down": str}


class _Table:
    """Typed access to one TOML table, with errors that name the file and the field."""

    def __init__(self, values: Mapping[str, Any], kinds: Mapping[str, type], where: str) -> None:
        self.values, self.where = values, where
        for key, value in values.items():
            if key not in kinds:
                raise MoeplanError(f"{where}: unknown field {key} = {value!r}")
            if type(value) is not kinds[key] or (type(value) is int and value < 1):
                wanted = {"int": "a positive whole number", "str": "text"}.get(kinds[key].__name__, "another type")
                raise MoeplanError(f"{where}: {key} = {value!r}, expected {wanted}")

    def need(self, key: str) -> Any:
        if key not in self.values:
            raise MoeplanError(f"{self.where}: {key} is missing")
        return self.values[key]

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.values.get(key, default)
        if value not in allowed:
            raise MoeplanError(f"{self.where}: {key} = {value!r}, expected one of {', '.join(allowed)}")
        return str(value)

    def format(self, key: str) -> WeightFormat:
        try:
            return WeightFormat.parse(self.need(key))
        except MoeplanError as bad:
            raise MoeplanError(f"{self.where}: {key}: {bad}") from bad

    def shape(self, hidden: int, experts: int, top_k: int, activation: str) -> LayerShape:
        if top_k > experts:
            raise MoeplanError(f"{self.where}: top_k = {top_k} is more than experts = {experts}")
        gate = self.format("gate") if "gate" in self.values else None
        width = self.need("expert_hidden")
        kind = cast(Activation, activation)
        return LayerShape(hidden, width, experts, top_k, gate, self.format("up"), self.format("down"), kind)


def parse_layers(text: str, where: str) -> list[int]:
    """`0-2,5` -> [0, 1, 2, 5]. Raises MoeplanError where it is not such a list in rising order."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise MoeplanError(f"{where}: layers = {text!r}, expected a list such as 0-2,5")
        found += range(int(first), int(last if dash else first) + 1)
    if not found or any(b <= a for a, b in pairwise(found)):
        raise MoeplanError(f"{where}: layers = {text!r} must rise")
    return found


def format_layers(indices: list[int]) -> str:
    """The inverse of `parse_layers`: [0, 1, 2, 5] -> `0-2,5`."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def read_card(path: Path) -> ModelCard:
    """Read a card. Raises MoeplanError naming file, field and value."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as bad:
        raise MoeplanError(f"{path}: cannot read: {getattr(bad, 'strerror', None) or bad}") from bad
    top = _Table(raw, _CARD, str(path))
    activation = top.choice("activation", get_args(Activation), "swiglu")
    layers = [one for number, group in enumerate(raw.get("moe", [])) for one in _group(group, top, activation, number)]
    layers.sort(key=lambda one: one.index)
    indices = [one.index for one in layers]
    if len(set(indices)) != len(indices) or (indices and indices[-1] >= top.need("layers")):
        raise MoeplanError(f"{path}: moe.layers must name layers below {top.need('layers')}, each once")
    attention = raw.get("attention", {})
    _Table(attention, dict.fromkeys(attention, int), f"{path}: attention")
    position = top.choice("weight_position", get_args(WeightPosition), "combine")
    return ModelCard(
        name=top.need("name"),
        model_type=top.need("model_type"),
        source=top.need("source"),
        layers=top.need("layers"),
        hidden=top.need("hidden"),
        moe_layers=tuple(layers),
        weight_position=cast(WeightPosition, position),
        dense_hidden=raw.get("dense_hidden"),
        vocabulary=raw.get("vocabulary"),
        tied_embeddings=raw.get("tied_embeddings"),
        attention=attention,
        notes=tuple(str(note) for note in raw.get("notes", [])),
    )


def _group(values: Any, top: _Table, activation: str, number: int) -> list[MoELayer]:
    where = f"{top.where}: moe[{number}]"
    if not isinstance(values, dict):
        raise MoeplanError(f"{where} = {values!r}, expected a table")
    table = _Table(values, _MOE, where)
    shape = table.shape(top.need("hidden"), table.need("experts"), table.need("top_k"), activation)
    shared, run = None, "separate"
    if "shared" in values:
        own = _Table(values["shared"], _SHARED, f"{where}: shared")
        run = own.choice("run", get_args(SharedRun), "separate")
        shared = own.shape(shape.hidden, own.need("count"), own.need("count"), activation)
    indices = parse_layers(table.need("layers"), where)
    return [MoELayer(i, shape, shared, cast(SharedRun, run)) for i in indices]


def _pairs(shape: LayerShape) -> list[tuple[str, Any]]:
    formats = [("gate", shape.gate), ("up", shape.up), ("down", shape.down)]
    return [("expert_hidden", shape.expert_hidden), *((key, form.name) for key, form in formats if form)]


def card_toml(card: ModelCard) -> str:
    """The card as TOML text; `read_card` gives the same card back."""
    activation = card.moe_layers[0].shape.activation if card.moe_layers else None
    top = {
        "name": card.name,
        "model_type": card.model_type,
        "source": card.source,
        "layers": card.layers,
        "hidden": card.hidden,
        "activation": activation,
        "weight_position": card.weight_position if card.moe_layers else None,
        "dense_hidden": card.dense_hidden,
        "vocabulary": card.vocabulary,
        "tied_embeddings": card.tied_embeddings,
        "notes": list(card.notes) or None,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in top.items() if value is not None]
    if card.attention:
        lines += ["", "[attention]", *(f"{key} = {value}" for key, value in card.attention.items())]
    for group in card.alike():
        first = group[0]
        rows: list[tuple[str, Any]] = [
            ("layers", format_layers([one.index for one in group])),
            ("experts", first.shape.experts),
            ("top_k", first.shape.top_k),
            *_pairs(first.shape),
        ]
        lines += ["", "[[moe]]", *(f"{key} = {json.dumps(value)}" for key, value in rows)]
        if first.shared:
            inner = [("count", first.shared.experts), ("run", first.shared_run), *_pairs(first.shared)]
            lines.append("shared = { " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in inner) + " }")
    return "\n".join(lines) + "\n"
