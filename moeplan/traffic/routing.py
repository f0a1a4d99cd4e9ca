"""Routing arms: where the expert ids of a batch come from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.store import Store
from moeplan.traffic.cohort import call_rows, parse_cohort
from moeplan.traffic.popularity import FloatTable, Popularity, load_popularity
from moeplan.traffic.trace import RoutingTrace, load_trace

Kind = Literal["uniform", "balanced", "identical", "disjoint", "popularity", "trace"]
IdTable = npt.NDArray[np.int32]

_UNIT = 1 << 32  # inclusion probabilities are whole multiples of 2^-32, so that sampling is exact arithmetic

_CELLS = 1 << 22  # token-expert cells drawn at once: bounds the memory of a large batch


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """A routing arm by name; `popularity:NAME` and `trace:NAME` carry their data.

    cohort: which rows of the trace meet in a call, as in `trace:NAME@stream:4`; see traffic/cohort.py.
    """

    name: str
    popularity: Popularity | None = None
    trace: RoutingTrace | None = None
    cohort: str = "independent"

    @property
    def kind(self) -> Kind:
        """The arm without its argument."""
        return cast(Kind, self.name.partition(":")[0])

    def note(self, experts: int, top_k: int) -> str | None:
        """What was changed to make this arm fit a model, in one line, or None."""
        own = self.popularity
        if own is None or (own.shares.shape[1], own.top_k) == (experts, top_k):
            return None
        how = "scaled" if own.shares.shape[1] == experts else "stretched along its sorted curve"
        return f"{self.name}: a profile of top-{own.top_k} of {own.shares.shape[1]} {how} to top-{top_k} of {experts}"


def parse_routing(name: str, store: Store) -> Routing:
    """`uniform`, `balanced`, `identical`, `disjoint`, `popularity:NAME`, `trace:NAME_OR_FILE[@COHORT]`.

    Raises MoeplanError for an unknown arm, an unknown name, or data that do not pass validation.
    """
    kind, colon, argument = name.partition(":")
    if kind not in get_args(Kind) or bool(colon) != (kind in ("popularity", "trace")) or (colon and not argument):
        raise MoeplanError(
            f"--routing {name}: expected uniform, balanced, identical, disjoint, popularity:NAME or trace:FILE"
        )
    if kind == "popularity":
        return Routing(name, popularity=load_popularity(_folder(argument, store)))
    if kind == "trace":
        file, cohort = _trace_file(argument, store), "independent"
        if not file.exists() and "@" in argument:
            argument, _, cohort = argument.rpartition("@")
            file = _trace_file(argument, store)
            parse_cohort(cohort)
        return Routing(name, trace=load_trace(file), cohort=cohort)
    return Routing(name)


def _trace_file(name: str, store: Store) -> Path:
    file = Path(name)
    if file.is_file() or (file / "header.toml").is_file():
        return file
    return store.find("traces", f"{name}/routing.npz") or file


def arm_name(routing: str, cohort: str) -> str:
    """The routing arm that draws its batches from a cohort: what a calibration has to have timed.

    >>> arm_name("uniform", "independent"), arm_name("uniform", "identical"), arm_name("trace:a", "stream:4")
    ('uniform', 'identical', 'trace:a@stream:4')
    """
    if cohort in ("independent", "identical"):
        return "identical" if cohort == "identical" else routing
    return f"{routing}@{cohort}"


def check_cohort(routing: Routing, cohort: str, steps: bool = True) -> None:
    """Raises MoeplanError for an unknown cohort, or one that the routing cannot show.

    steps: calls of many sizes are wanted, which a mixture of fixed counts does not have.
    """
    asked = parse_cohort(cohort)
    if cohort not in ("independent", "identical") and routing.trace is None:
        raise MoeplanError(f"--cohort {cohort}: needs --routing trace:FILE; {routing.name} knows no requests")
    if cohort != "independent" and routing.cohort != "independent":
        raise MoeplanError(f"--cohort {cohort}: --routing {routing.name} names a cohort already")
    for known in (asked, parse_cohort(routing.cohort)):
        if steps and known.mixed:
            raise MoeplanError(
                f"--cohort {known.name}: a mixture has {known.rows()} rows and no other number; steps of many sizes"
                " need a cohort that is no mixture"
            )


def _folder(name: str, store: Store) -> Path:
    found = store.find("traces", f"{name}/popularity.npz")
    if found is None:
        known = sorted(n for n in store.names("traces", "*") if store.find("traces", f"{n}/popularity.npz"))
        raise MoeplanError(f"--routing popularity:{name}: no such profile (known: {', '.join(known) or 'none'})")
    return found.parent


def draw_ids(routing: Routing, experts: int, top_k: int, tokens: int, seed: int, layer: int = 0) -> IdTable:
    """Expert ids int32 [tokens, top_k] of one layer for a batch of independent requests.

    The same arguments give the same ids. Each row holds distinct ids (a trace may hold -1 for padding). A profile
    or trace with fewer layers is used cyclically. `trace` takes one random row each from as many different
    requests as there are; all layers of one seed come from the same rows. Raises MoeplanError where the arm
    cannot serve that size: `disjoint` above experts // top_k tokens, a trace of another model.
    """
    if not 1 <= top_k <= experts or tokens < 1:
        raise MoeplanError(f"routing {routing.name}: cannot draw top-{top_k} of {experts} experts for {tokens} tokens")
    if routing.trace is not None:
        rows = trace_rows(routing, (experts, top_k), tokens, 1, np.random.default_rng(seed))[0]
        return np.asarray(routing.trace.expert_ids[rows, layer % routing.trace.layers], dtype=np.int32)
    rng = np.random.default_rng([seed, layer])
    if routing.popularity is not None:
        shares = routing.popularity.layer(layer, experts, top_k)
        return _in_parts(lambda rows: draw_systematic(shares, rows, rng), tokens, experts)
    if routing.kind == "identical":
        return np.tile(rng.permutation(experts)[:top_k].astype(np.int32), (tokens, 1))
    if routing.kind == "uniform":
        return _in_parts(lambda rows: _uniform(rows, experts, top_k, rng), tokens, experts)
    if routing.kind == "disjoint" and tokens > experts // top_k:
        raise MoeplanError(
            f"routing disjoint: {tokens} tokens of top-{top_k} need {tokens * top_k} experts, the layer has {experts}"
        )
    order = rng.permutation(experts).astype(np.int32)  # dealt out in turn: any top_k neighbours are distinct
    return np.asarray(order[np.arange(tokens * top_k) % experts].reshape(tokens, top_k), dtype=np.int32)


def _in_parts(draw: Callable[[int], IdTable], tokens: int, experts: int) -> IdTable:
    part = max(1, _CELLS // experts)
    return np.concatenate([draw(min(part, tokens - start)) for start in range(0, tokens, part)])


def _uniform(tokens: int, experts: int, top_k: int, rng: np.random.Generator) -> IdTable:
    return np.argpartition(rng.random((tokens, experts)), top_k - 1, axis=1)[:, :top_k].astype(np.int32)


def _whole(shares: FloatTable) -> npt.NDArray[np.int64]:
    """Inclusion probabilities as multiples of 2^-32, each at most 1, that sum exactly to the whole top_k."""
    parts = np.minimum(np.rint(shares * _UNIT).astype(np.int64), _UNIT)
    missing = round(float(shares.sum())) * _UNIT - int(parts.sum())
    for e in np.argsort(np.abs(parts - _UNIT // 2)):  # the entries with most room on both sides take the rounding
        step = int(np.clip(missing, -parts[e], _UNIT - parts[e]))
        parts[e] += step
        missing -= step
    return parts


def draw_systematic(shares: FloatTable, tokens: int, rng: np.random.Generator) -> IdTable:
    """Randomised systematic sampling (Madow 1949): ids [tokens, top_k] with exact inclusion probabilities.

    For each token the experts are laid end to end in random order, each as long as its share; the points u, u + 1,
    ... with one uniform u hit exactly top_k of them. shares [experts] lie in 0..1 and sum to top_k.
    """
    parts = _whole(shares)
    order = np.argsort(rng.random((tokens, parts.size)), axis=1)
    ends = np.cumsum(parts[order], axis=1)
    offset = rng.integers(0, _UNIT, size=(tokens, 1))
    hits = np.diff(-((offset - ends) // _UNIT), axis=1, prepend=0)  # points below an end: ceil((end - u) / unit)
    return np.asarray(order[hits > 0].reshape(tokens, -1), dtype=np.int32)


def trace_rows(
    routing: Routing, size: tuple[int, int], tokens: int, draws: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Rows int64 [draws, tokens] of the arm's trace that meet in a call of its cohort; size: experts, top_k."""
    trace = routing.trace
    assert trace is not None
    if (trace.experts, trace.top_k) != size:
        raise MoeplanError(
            f"{trace.source}: routing of top-{trace.top_k} of {trace.experts} experts, the model has"
            f" top-{size[1]} of {size[0]}"
        )
    return call_rows(trace, routing.cohort, tokens, draws, rng)
