"""Runs prompts through a loaded mlx-lm model and keeps the routing: a canonical trace.

One row a token that went through the layers: every prompt token (prefill) and every generated token but the last,
which is never fed back (decode). Requests of a batch with equally long prompts run together, the others by
themselves, so that no padding is ever routed. The order of a row's ids is that of argpartition: a set.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.runners.tap import Ids, Tap, tapped
from moeplan.traffic.trace import RoutingTrace

__all__ = ["Sampling", "load_local", "record"]

PREFILL_STEP = 2048
"""Prompt tokens a forward pass: mlx_lm/generate.py DEFAULT_PREFILL_STEP_SIZE."""

Tokens = Sequence[int]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: temperature 0 takes the likeliest; stop: tokens that end a request."""

    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    ids: list[Ids] = field(default_factory=list)
    decoded: int = 0
    done: bool = False


def record(
    model: Any,
    token_batches: Sequence[Sequence[Tokens]],
    max_tokens: int,
    sampling: Sampling | None = None,
    progress: Progress | None = None,
) -> RoutingTrace:
    """Generate up to max_tokens tokens for every prompt of every batch and return the routing, requests in order.

    token_batches: batches of prompts of token ids. A request of P prompt tokens that generates G tokens has P prefill
    and G - 1 decode rows. Raises MoeplanError: an empty prompt, a token outside the vocabulary, max_tokens < 1, a
    model that cannot be recorded (see tap.tapped), a layer that hid or repeated rows (see Tap.take).
    """
    how = sampling or Sampling()
    batches = [[_Request([int(t) for t in prompt]) for prompt in batch] for batch in token_batches]
    requests = [request for batch in batches for request in batch]
    _refuse(model, requests, max_tokens, how)
    import mlx.core as mx

    key, done = mx.random.key(how.seed), 0
    with tapped(model) as tap:
        for group in _groups(batches):
            if progress is not None:
                progress(done, len(requests), f"{len(group)} x {len(group[0].prompt)} prompt tokens")
            key, now = mx.random.split(key)
            _generate(model, tap, group, max_tokens, how, now)
            done += len(group)
        layer_ids, experts = tap.layer_ids, tap.experts
    rows = np.array([len(request.prompt) + request.decoded for request in requests], dtype=np.int64)
    ids = np.concatenate([part for request in requests for part in request.ids])
    return RoutingTrace(
        expert_ids=ids.astype(_smallest(ids, experts)),
        request_offsets=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
        experts=experts,
        layer_ids=np.array(layer_ids, dtype=np.int64),
        phase=np.concatenate([_phase(request) for request in requests]),
        order="set",
        request_tokens=rows,
        provenance=_provenance(model, max_tokens, how),
        name=_family(model),
    )


def _refuse(model: Any, requests: list[_Request], max_tokens: int, how: Sampling) -> None:
    if max_tokens < 1:
        raise MoeplanError(f"max_tokens = {max_tokens}: expected at least 1")
    if not 0 <= how.temperature < inf or how.seed < 0:
        raise MoeplanError(f"temperature = {how.temperature}, seed = {how.seed}: expected finite, not negative")
    if not requests:
        raise MoeplanError("no prompt to record")
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None)
    sizes = (getattr(args, "vocab_size", None), getattr(text, "vocab_size", None))
    size = next((size for size in sizes if isinstance(size, int)), None)
    for i, request in enumerate(requests):
        if not request.prompt:
            raise MoeplanError(f"prompt {i} has no tokens")
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or (size is not None and high >= size):
            raise MoeplanError(f"prompt {i}: token {low if low < 0 else high} is outside the vocabulary of {size}")


def _groups(batches: list[list[_Request]]) -> Iterator[list[_Request]]:
    """Requests that run together: of one batch and one prompt length."""
    for batch in batches:
        by_length: dict[int, list[_Request]] = {}
        for request in batch:
            by_length.setdefault(len(request.prompt), []).append(request)
        yield from by_length.values()


def _generate(model: Any, tap: Tap, group: list[_Request], max_tokens: int, how: Sampling, key: Any) -> None:
    """Fill in the rows of a group; key: the random key of all its draws."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    prompts = mx.array([request.prompt for request in group])
    length, cache = prompts.shape[1], make_prompt_cache(model)
    # As mlx-lm does: all prompt tokens but the last without their logits, which would take rows x vocabulary.
    for first in range(0, length - 1, PREFILL_STEP):
        chunk = prompts[:, first : min(first + PREFILL_STEP, length - 1)]
        model(chunk, cache=cache)
        mx.eval([one.state for one in cache])
        _keep(tap, group, chunk.shape[1])
    fed = prompts[:, -1:]
    for step in range(max_tokens):
        logits = model(fed, cache=cache)[:, -1, :]
        key, now = mx.random.split(key)
        token = _choose(logits, how.temperature, now)
        mx.eval(token)
        _keep(tap, group, 1)
        for request, chosen in zip(group, token.tolist(), strict=True):
            request.decoded += step > 0 and not request.done
            request.done = request.done or chosen in how.stop
        if all(request.done for request in group):
            return
        fed = token[:, None]


def _choose(logits: Any, temperature: float, key: Any) -> Any:
    import mlx.core as mx

    if temperature == 0:
        return mx.argmax(logits, axis=-1)
    return mx.random.categorical(logits.astype(mx.float32) / temperature, key=key)


def _keep(tap: Tap, group: list[_Request], tokens: int) -> None:
    """Rows of one pass over `tokens` tokens of every request of the group; none of a request that has ended."""
    ids = tap.take(len(group) * tokens)
    for request, part in zip(group, ids.reshape(len(group), tokens, *ids.shape[1:]), strict=True):
        if not request.done:
            request.ids.append(part)


def _phase(request: _Request) -> npt.NDArray[np.uint8]:
    return np.repeat(np.array([0, 1], dtype=np.uint8), [len(request.prompt), request.decoded])


def _smallest(ids: Ids, experts: int) -> type[np.generic]:
    if experts <= 256 and int(ids.min()) >= 0:
        return np.uint8
    return np.int16 if experts <= 1 << 15 else np.int32


def _family(model: Any) -> str:
    return str(getattr(model, "model_type", None) or type(model).__module__.rpartition(".")[2])


def _provenance(model: Any, max_tokens: int, how: Sampling) -> dict[str, Any]:
    from importlib.metadata import version

    import mlx.core as mx

    return {
        "source": "recorded: ids that reached the expert layers",
        "recorder": f"moeplan {version('moeplan')}",
        "engine": f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}",
        "device": str(mx.default_device()),
        "model_type": _family(model),
        "max_tokens": max_tokens,
        "temperature": how.temperature,
        "seed": how.seed,
        "prefill_step": PREFILL_STEP,
    }


def load_local(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a local mlx-lm folder; nothing is downloaded and no code of the folder is run.

    Raises MoeplanError: mlx-lm is missing, no such folder, a config.json that cannot be read or brings its own code,
    anything that mlx-lm cannot load.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the hub's client is first imported, here
    try:
        import mlx_lm
    except ImportError as bad:
        raise MoeplanError("trace record needs mlx-lm: pip install 'moeplan[mlx-lm]'") from bad
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as bad:
        raise MoeplanError(f"{file}: cannot read: {bad.strerror or bad}") from bad
    except (ValueError, RecursionError) as bad:
        raise MoeplanError(f"{file}: not JSON: {' '.join(str(bad).split())[:200]}") from bad
    if not isinstance(config, dict) or "model_type" not in config:
        raise MoeplanError(f"{file}: model_type is missing")
    if config.get("model_file") is not None:
        raise MoeplanError(f"{file}: model_file = {str(config['model_file'])[:40]!r}: code of a model is not run")
    try:
        model, tokenizer = mlx_lm.load(str(folder), tokenizer_config={"trust_remote_code": False})[:2]
    except Exception as bad:  # whatever a foreign loader raises: one line
        raise MoeplanError(f"{folder}: mlx-lm cannot load it: {' '.join(str(bad).split())[:200]}") from bad
    return model, tokenizer
