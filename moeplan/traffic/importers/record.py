"""What an importer is told, and the two records it may give: a routing trace, or counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from moeplan.traffic.importers.reading import CELL_LIMIT, EXPERT_LIMIT, LAYER_LIMIT, Ids, fail
from moeplan.traffic.model import ModelCard
from moeplan.traffic.trace import RoutingTrace

Phase = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known of the model besides the file.

    layers: all decoder layers; moe_layers: the indices of those with experts. rule, groups, top_groups: how router
    logits become ids (see logits.py).
    """

    experts: int | None = None
    top_k: int | None = None
    layers: int | None = None
    moe_layers: tuple[int, ...] | None = None
    model: str = ""
    model_type: str = ""
    rule: str | None = None
    groups: int | None = None
    top_groups: int | None = None

    def need(self, key: Literal["experts", "top_k", "layers"], path: Path) -> int:
        """The value, or MoeplanError saying which option gives it."""
        value = getattr(self, key)
        if value is None:
            option = key.replace("_", "-")
            raise fail(path, f"the file does not say its {key}: give --{option} or --model")
        return int(value)


def hints_of(card: ModelCard) -> Hints:
    """Hints of a model card. Raises MoeplanError for a dense model or one whose MoE layers differ in experts or k."""
    moe = card.require_moe()
    sizes = {(one.shape.experts, one.shape.top_k) for one in moe}
    if len(sizes) != 1:
        raise fail(card.name, f"MoE layers of {len(sizes)} different sizes: give --experts and --top-k instead")
    experts, top_k = sizes.pop()
    indices = tuple(one.index for one in moe)
    return Hints(experts, top_k, card.layers, indices, card.name, card.model_type)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """ids int32 [rows, layers, k] of one request; phase uint8 [rows] (0 prefill, 1 decode) and tokens where known."""

    ids: Ids
    phase: Phase | None = None
    tokens: int | None = None


def response_request(ids: Ids, prompt: object, generated: object) -> Request:
    """One response with its token counts, whatever they are: each token but the last sampled one has a row.

    With fewer rows (a start offset was asked for, or the engine dropped some) the phase stays unknown.
    """
    if type(prompt) is not int or type(generated) is not int or min(prompt, generated) < 1:
        return Request(ids)
    tokens = prompt + generated - 1
    if not len(ids) <= tokens < 1 << 40:
        return Request(ids)
    phase = np.asarray(np.arange(tokens) >= prompt, dtype=np.uint8) if len(ids) == tokens else None
    return Request(ids, phase, tokens)


@dataclass(slots=True)
class Draft:
    """A trace in the making. Importers fill it; `finish` checks it."""

    form: str
    files: Sequence[Path]
    hints: Hints
    order: Literal["ranked", "set"] = "set"  # engines promise no order of the slots
    id_space: Literal["logical", "physical"] = "logical"
    experts: int | None = None
    layer_ids: Sequence[int] | None = None
    notes: list[str] = field(default_factory=list)
    model: str = ""

    @property
    def path(self) -> Path:
        """The file that errors name."""
        return self.files[0]

    def finish(self, requests: Sequence[Request]) -> RoutingTrace:
        """Join requests of equal layers and k. Raises MoeplanError naming file, field and value."""
        kept = [one for one in requests if len(one.ids)]
        if not kept:
            raise fail(self.path, "holds no routed token")
        shapes = {one.ids.shape[1:] for one in kept}
        if len(shapes) != 1:
            raise fail(self.path, f"requests disagree on [layers, k]: {sorted(shapes)[:3]}")
        if sum(one.ids.size for one in kept) > CELL_LIMIT:
            raise fail(self.path, f"more than {CELL_LIMIT} expert ids")
        experts = self._experts()
        ids = np.concatenate([one.ids for one in kept])
        wrong = np.argwhere((ids < -1) | (ids >= experts))
        if wrong.size:
            at = tuple(int(i) for i in wrong[0])
            raise fail(self.path, f"row {at[0]}, layer {at[1]}: expert id {ids[at]} is outside 0..{experts - 1}")
        if ids.shape[2] > experts:
            raise fail(self.path, f"{ids.shape[2]} slots a token of {experts} experts")
        offsets = np.cumsum([0, *(len(one.ids) for one in kept)], dtype=np.int64)
        phases = [one.phase for one in kept if one.phase is not None]
        if len(phases) not in (0, len(kept)):
            self.notes.append("phase left out: not every request tells where its prompt ends")
        short = sum(one.tokens is not None and one.tokens > len(one.ids) for one in kept)
        if short:
            self.notes.append(f"{short} requests with fewer rows than tokens: a start offset, or dropped rows")
        self._compare(ids.shape[2])
        phase = np.concatenate(phases) if len(phases) == len(kept) else None
        tokens = [one.tokens for one in kept if one.tokens is not None]
        known = np.asarray(tokens, dtype=np.int64) if len(tokens) == len(kept) else None
        return self._trace(ids, offsets, (phase, known), experts)

    def _compare(self, top_k: int) -> None:
        """Notes where the file and the model disagree; `trace check --model` judges it."""
        if self.hints.top_k not in (None, top_k):
            self.notes.append(f"{top_k} slots a token, --top-k or --model says {self.hints.top_k}")
        strange = sorted(set(self.layer_ids or ()) - set(self.hints.moe_layers or self.layer_ids or ()))
        if strange:
            self.notes.append(f"layers {strange[:8]} have no experts in {self.hints.model}")

    def _experts(self) -> int:
        told, known = self.hints.experts, self.experts
        if told is not None and known is not None and told != known:
            raise fail(self.path, f"num_experts = {known}, --experts or --model says {told}")
        return known if known is not None else self.hints.need("experts", self.path)

    def _trace(
        self,
        ids: Ids,
        offsets: npt.NDArray[np.int64],
        more: tuple[Phase | None, npt.NDArray[np.int64] | None],
        experts: int,
    ) -> RoutingTrace:
        narrow = ids.astype(np.int16) if experts <= 1 << 15 else ids
        layers = list(range(ids.shape[1])) if self.layer_ids is None else list(self.layer_ids)
        return RoutingTrace(
            expert_ids=narrow,
            request_offsets=offsets,
            experts=experts,
            layer_ids=np.asarray(layers, dtype=np.int64),
            phase=more[0],
            request_tokens=more[1],
            domains=None,
            id_space=self.id_space,
            order=self.order,
            provenance=provenance(self.form, self.files, self.model or self.hints.model, self.notes),
            name=self.path.stem,
        )


def provenance(form: str, files: Sequence[Path], model: str, notes: Sequence[str]) -> dict[str, object]:
    """Where an imported record comes from: file names, not paths, so that the same files give the same bytes."""
    return {
        "format": form,
        "files": [_plain(path.name) for path in files],
        "model": _plain(model),
        "notes": [_plain(note) for note in notes],
    }


def _plain(text: str) -> str:
    """Printable ASCII, whatever a foreign file called itself: it goes into a header."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)


def moe_columns(draft: Draft, requests: Sequence[Request]) -> list[Request]:
    """Keep the layers that have experts: engines fill the buffer of dense layers with zeros.

    With a card its MoE layers are taken. Without one, a layer whose every row is 0, 0, ... is dense where k > 1 (a
    router picks no expert twice). Sets draft.layer_ids. Raises MoeplanError where every layer is all zeros.
    """
    width = requests[0].ids.shape[1]
    if any(one.ids.shape[1:] != requests[0].ids.shape[1:] for one in requests):
        raise fail(draft.path, "requests disagree on [layers, k]")
    moe, layers = draft.hints.moe_layers, draft.hints.layers
    filled = np.zeros(width, dtype=bool)
    for one in requests:
        filled |= one.ids.any(axis=(0, 2))
    if not filled.any():
        raise fail(draft.path, "every expert id is 0: the engine returned a buffer that it never filled")
    if moe is not None and width not in (layers, len(moe)):
        raise fail(draft.path, f"{width} layers, {draft.hints.model} has {layers} of which {len(moe)} have experts")
    if moe is not None:
        columns = list(moe) if width == layers else list(range(width))
        draft.layer_ids = moe
    else:
        columns = np.flatnonzero(filled).tolist() if requests[0].ids.shape[2] > 1 else list(range(width))
        draft.layer_ids = columns
    if len(columns) < width:
        draft.notes.append(f"{width - len(columns)} dense layers left out")
    return [replace(one, ids=one.ids[:, columns]) for one in requests]


def check_layer(layer: int, where: object) -> int:
    """A layer index within LAYER_LIMIT."""
    if not 0 <= layer < LAYER_LIMIT:
        raise fail(where, f"layer {layer} is outside 0..{LAYER_LIMIT - 1}")
    return layer


def check_experts(experts: int, where: object) -> int:
    """A number of experts within EXPERT_LIMIT."""
    if not 0 < experts <= EXPERT_LIMIT:
        raise fail(where, f"{experts} experts, expected 1..{EXPERT_LIMIT}")
    return experts
