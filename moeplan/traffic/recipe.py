"""Recipes for synthetic traces: a popularity and stream parameters with their sources, from a profile or a trace."""

import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.store import Store, write_text
from moeplan.traffic.chance import mean_distinct
from moeplan.traffic.cohort import parse_cohort
from moeplan.traffic.packed import Packed
from moeplan.traffic.popularity import Popularity, load_popularity
from moeplan.traffic.stats import LAGS, Flow, distinct_row
from moeplan.traffic.synth import FloatTable, Stream, biases, draw_ids_of, fit_streams
from moeplan.traffic.trace import RoutingTrace

THIN = 2000  # tokens below which the tail of a popularity is sampling noise
BATCHES = (2, 4, 8, 16, 32)
WINDOWS = (2, 4, 8)
_DEFAULT_STREAM = "gpt-oss-20b"  # the only shipped profile whose source has rows in order
_DRAWS = 2000  # cohorts a batch size of the comparison: about 0.1 %


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """shares [layers, experts] sum to top_k; streams: one a layer; overlap, window: measured means to compare with."""

    name: str
    shares: FloatTable
    top_k: int
    tokens: int
    streams: tuple[Stream, ...]
    stream_source: str
    notes: tuple[str, ...] = ()
    source: dict[str, Any] = field(default_factory=dict)
    overlap: dict[int, float] = field(default_factory=dict)
    window: dict[int, float] = field(default_factory=dict)


def _thin(name: str, tokens: int, allowed: bool) -> tuple[str, ...]:
    """The label of a thin source. Raises MoeplanError where it is not allowed."""
    if tokens >= THIN:
        return ()
    if not allowed:
        raise MoeplanError(f"{name}: tokens = {tokens}, fewer than {THIN}: the tail is noise; --allow-thin takes it")
    return (f"thin: {name} counts {tokens} tokens, fewer than {THIN}; distinct counts come out too low",)


def skewed(shares: FloatTable, top_k: int, skew: float) -> FloatTable:
    """Shares to the power `skew` (1 as they are, 0 uniform), scaled to the sum top_k with none above 1."""
    if not 0.0 <= skew <= 8.0:
        raise MoeplanError(f"--skew {skew}: expected 0 to 8")
    bent = Popularity("skewed", np.where(shares > 0, shares, 1e-12) ** skew, top_k, {})
    return np.stack([bent.layer(layer, shares.shape[1], top_k) for layer in range(len(shares))])


def recipe_of_trace(trace: RoutingTrace, allow_thin: bool, seed: int) -> Recipe:
    """Popularity and streams fitted to a trace's decode rows. Raises MoeplanError for a thin one, or short requests."""
    flow = Flow(Packed.of(trace))
    notes = _thin(trace.name, flow.rows, allow_thin)
    shares = flow.popularity * (trace.top_k / np.maximum(flow.popularity.sum(axis=1, keepdims=True), 1e-12))
    overlap = flow.overlap(LAGS, by_request=True)
    usable = np.asarray(np.isfinite(overlap).all(axis=1))
    if np.count_nonzero(usable) < 3:
        raise MoeplanError(f"{trace.name}: requests of 5 rows or more are needed to fit a stream")
    lags = tuple(lag for lag, use in zip(LAGS, usable, strict=True) if use)
    streams = fit_streams(biases(shares, trace.top_k), trace.top_k, lags, overlap[usable], seed)
    return Recipe(
        trace.name,
        shares,
        trace.top_k,
        flow.rows,
        tuple(streams),
        f"fitted to {trace.name}",
        notes,
        {"layer_ids": [int(layer) for layer in trace.layer_ids]},
        dict(zip(lags, overlap[usable].mean(axis=1).tolist(), strict=True)),
        _finite(flow),
    )


def _finite(flow: Flow) -> dict[int, float]:
    means = flow.windows(WINDOWS).mean(axis=1)
    return {n: float(x) for n, x in zip(WINDOWS, means, strict=True) if np.isfinite(x)}


def recipe_of_profile(name: str, store: Store, allow_thin: bool, stream: str | None = None) -> Recipe:
    """A shipped or own profile `traces/NAME`; its own stream.toml, else that of `stream` (assumed, and said so).

    Raises MoeplanError for an unknown name, a thin profile, or a stream that does not fit.
    """
    found = store.find("traces", f"{name}/popularity.npz")
    if found is None:
        known = sorted(n for n in store.names("traces", "*") if store.find("traces", f"{n}/popularity.npz"))
        raise MoeplanError(f"{name}: no such trace or profile (profiles: {', '.join(known) or 'none'})")
    own = load_popularity(found.parent)
    tokens = own.header.get("tokens")
    count = tokens if type(tokens) is int else 0
    notes = _thin(name, count, allow_thin)
    layers = len(own.shares)
    lender = stream or (name if (found.parent / "stream.toml").exists() else _DEFAULT_STREAM)
    file = store.find("traces", f"{lender}/stream.toml")
    if file is None:
        raise MoeplanError(f"--stream {lender}: no traces/{lender}/stream.toml")
    streams, overlap, window = load_streams(file)
    shares = own.shares * (own.top_k / own.shares.sum(axis=1, keepdims=True))
    if lender == name and len(streams) == layers:
        said = f"measured: {lender}"
    else:
        streams, overlap, window = (_middle(streams),) * layers, {}, {}
        said = f"assumed: the mean layer of {lender}"
        notes += (f"stream parameters {said}; nothing here was measured on {name} in token order",)
    source = {"profile": own.header}
    return Recipe(name, shares, own.top_k, count, streams, said, notes, source, overlap, window)


def _middle(streams: tuple[Stream, ...]) -> Stream:
    return Stream(*(float(np.mean([getattr(s, f.name) for s in streams])) for f in fields(Stream)))


def load_streams(file: Path) -> tuple[tuple[Stream, ...], dict[int, float], dict[int, float]]:
    """(streams, overlap by lag, distinct by window) of a stream.toml. Raises MoeplanError naming file and field."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        streams = tuple(Stream(**{f.name: float(row[f.name]) for f in fields(Stream)}) for row in table["layer"])
        overlap = {int(row["lag"]): float(row["shared"]) for row in table.get("overlap", [])}
        window = {int(row["tokens"]): float(row["distinct"]) for row in table.get("window", [])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as bad:
        raise MoeplanError(f"{file}: cannot read: {type(bad).__name__}: {bad}") from bad
    for at, s in enumerate(streams):
        shares = (s.lasting, s.medium, s.short)
        if not all(0 <= x <= 1 for x in (*shares, s.medium_decay, s.short_decay)) or sum(shares) > 1 + 1e-9:
            raise MoeplanError(f"{file}: layer {at}: shares and decays lie in 0..1, shares sum to at most 1")
    if not streams:
        raise MoeplanError(f"{file}: layer: no streams")
    return streams, overlap, window


def save_streams(recipe: Recipe, file: Path, header: dict[str, str]) -> None:
    """Write a recipe's streams and the means they were fitted to as stream.toml."""
    lines = [f'{key} = "{value}"' for key, value in header.items()]
    lines += [f"\n[[overlap]]\nlag = {lag}\nshared = {shared:.6g}" for lag, shared in recipe.overlap.items()]
    lines += [f"\n[[window]]\ntokens = {n}\ndistinct = {distinct:.6g}" for n, distinct in recipe.window.items()]
    for stream in recipe.streams:
        lines.append("\n[[layer]]\n" + "\n".join(f"{key} = {value:.6g}" for key, value in asdict(stream).items()))
    write_text(file, "\n".join(lines) + "\n")


def synthesize(recipe: Recipe, lengths: npt.NDArray[np.int64], seed: int) -> RoutingTrace:
    """A trace of one request a length, decode rows only, labelled synthetic. The same arguments give the same ids."""
    ids = draw_ids_of(biases(recipe.shares, recipe.top_k), list(recipe.streams), recipe.top_k, lengths, seed)
    layers, experts = recipe.shares.shape
    provenance = {
        "kind": "synthetic",
        "source": recipe.name,
        "source_tokens": recipe.tokens,
        "streams": recipe.stream_source,
        "seed": seed,
        "notes": list(recipe.notes),
    }
    return RoutingTrace(
        expert_ids=ids,
        layer_ids=np.array(recipe.source.get("layer_ids", range(layers)), dtype=np.int64),
        request_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        experts=experts,
        phase=np.ones(len(ids), dtype=np.uint8),
        domains=None,
        id_space="logical",
        order="set",
        provenance=provenance,
        name=f"synthetic of {recipe.name}" + (" (thin)" if recipe.tokens < THIN else ""),
    )


def synth_document(recipe: Recipe, trace: RoutingTrace, seed: int) -> dict[str, Any]:
    """What was asked for beside what the synthetic trace does: batches, windows, overlaps; the parameters; notes."""
    flow, cohort = Flow(Packed.of(trace)), parse_cohort("independent")
    shared = flow.overlap(LAGS).mean(axis=1)
    return {
        "name": trace.name,
        "synthetic": True,
        "rows": flow.rows,
        "requests": trace.requests,
        "layers": trace.layers,
        "experts": trace.experts,
        "top_k": trace.top_k,
        "source": recipe.name,
        "source_tokens": recipe.tokens,
        "thin": recipe.tokens < THIN,
        "streams": recipe.stream_source,
        "seed": seed,
        "distinct": [
            {
                "batch": batch,
                "mean": distinct_row(flow, cohort, batch, _DRAWS, seed)["mean"],
                "wanted": float(np.mean([mean_distinct(p, batch) for p in recipe.shares])),
            }
            for batch in BATCHES
            if batch <= len(trace.expert_ids)
        ],
        "window": [{"tokens": n, "distinct": x, "wanted": recipe.window.get(n)} for n, x in _finite(flow).items()],
        "overlap": [
            {"lag": lag, "shared": float(x), "wanted": recipe.overlap.get(lag)}
            for lag, x in zip(LAGS, shared, strict=True)
            if np.isfinite(x)
        ],
        "per_layer": [asdict(stream) for stream in recipe.streams],
        "notes": list(recipe.notes),
    }
