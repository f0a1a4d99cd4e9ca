"""Model cards: the geometry and weight formats of every MoE layer, and where the numbers come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from moeplan.errors import MoeplanError
from moeplan.store import Store
from moeplan.traffic.shape import LayerShape

SharedRun = Literal["separate", "fused", "parallel"]
WeightPosition = Literal["input", "down", "combine"]


@dataclass(frozen=True, slots=True)
class MoELayer:
    """One MoE layer.

    shared: the experts that every token takes, as a shape whose `experts` is their number, or None.
    shared_run: `separate` (an MLP of its own beside the routed experts), `fused` (slot top_k + 1 of the routed
    kernel) or `parallel` (a dense MLP of the layer, not an expert).
    """

    index: int
    shape: LayerShape
    shared: LayerShape | None = None
    shared_run: SharedRun = "separate"

    @property
    def shared_experts(self) -> int:
        """Shared experts that count as experts: a parallel dense MLP does not."""
        return self.shared.experts if self.shared and self.shared_run != "parallel" else 0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as far as its experts matter.

    layers: all layers; dense_hidden: MLP width of the layers that are not MoE. weight_position: where the router's
    weight is applied: to the expert's input, in the down projection's epilogue, or when slots are summed.
    attention: heads, kv_heads, head_dim and the like, where known.
    """

    name: str
    model_type: str
    source: str
    layers: int
    hidden: int
    moe_layers: tuple[MoELayer, ...] = ()
    weight_position: WeightPosition = "combine"
    dense_hidden: int | None = None
    vocabulary: int | None = None
    tied_embeddings: bool | None = None
    attention: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def groups(self) -> list[tuple[LayerShape, int]]:
        """Distinct layer shapes and how many MoE layers have each, in order of first use."""
        found: dict[LayerShape, int] = {}
        for layer in self.moe_layers:
            found[layer.shape] = found.get(layer.shape, 0) + 1
        return list(found.items())

    def alike(self) -> list[list[MoELayer]]:
        """MoE layers grouped by everything but their index, in order of first use."""
        found: dict[tuple[LayerShape, LayerShape | None, str], list[MoELayer]] = {}
        for layer in self.moe_layers:
            found.setdefault((layer.shape, layer.shared, layer.shared_run), []).append(layer)
        return list(found.values())

    def require_moe(self) -> tuple[MoELayer, ...]:
        """The MoE layers. Raises MoeplanError for a dense model."""
        if not self.moe_layers:
            raise MoeplanError(f"{self.name}: a dense model has no experts to plan for")
        return self.moe_layers


def load_card(name_or_path: str, store: Store) -> ModelCard:
    """A shipped or own card by name, a card's TOML file, a Hugging Face or MLX `config.json`, or its folder.

    Raises MoeplanError for an unknown name and for whatever is wrong in the file.
    """
    from moeplan.traffic.card import read_card
    from moeplan.traffic.config import read_config

    path = Path(name_or_path)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix in (".json", ".toml"):
        return _read(path, read_config if path.suffix == ".json" else read_card)
    found = store.find("models", f"{name_or_path}.toml") or store.find("models", f"{name_or_path.lower()}.toml")
    if found is None:
        near = get_close_matches(name_or_path.lower(), store.names("models", "*.toml"), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "see `moeplan model list`"
        raise MoeplanError(f"model {name_or_path}: no such card or file ({hint})")
    return _read(found, read_card)


def _read(path: Path, reader: Callable[[Path], ModelCard]) -> ModelCard:
    """Whatever a reader did not expect, such as a list where a word belongs, is one line about the file."""
    try:
        return reader(path)
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, RecursionError, MemoryError) as bad:
        raise MoeplanError(f"{path}: malformed: {type(bad).__name__}: {bad}") from bad
