"""What an engine does at a size, as data: rules in order, each a path behind a conjunction of predicates.

Where a chain (chain.py) says what could be tuned, rules say everything that decides, shapes and formats included, so
that an audit can name the gate that did. A rule whose call site lets a batch in may still be turned away inside the
kernel: such a predicate has the place `kernel`, and relaxing the call site alone reaches nothing.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moeplan.errors import MoeplanError
from moeplan.traffic.shape import LayerShape

Value = int | str | tuple[int | str, ...]
Place = Literal["call site", "kernel"]
Backend = Literal["metal", "cuda", "rocm", "cpu"]

_HOLDS: dict[str, Callable[[object, object], bool]] = {
    "==": operator.eq,
    "<=": operator.le,  # type: ignore[dict-item]
    ">=": operator.ge,  # type: ignore[dict-item]
    "<": operator.lt,  # type: ignore[dict-item]
    ">": operator.gt,  # type: ignore[dict-item]
    "in": lambda one, many: one in many,  # type: ignore[operator]
}


@dataclass(frozen=True, slots=True)
class Predicate:
    """variable op value, as an engine compares it; `env` overrides the value there. source: file and line."""

    name: str
    variable: str
    op: str
    value: Value
    source: str
    place: Place = "call site"
    env: str = ""

    def holds(self, facts: Mapping[str, Value]) -> bool:
        """Whether it lets that call through."""
        return _HOLDS[self.op](facts[self.variable], self.value)

    def text(self, facts: Mapping[str, Value]) -> str:
        """`tokens 4, not == 1`: what the call has and what is asked for."""
        return f"{self.variable} {facts[self.variable]}, not {self.op} {_plain(self.value)}"


@dataclass(frozen=True, slots=True)
class Variant:
    """The kernel that a path launches where its predicates hold."""

    kernel: str
    predicates: tuple[Predicate, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A path and what must hold for it; the first variant that holds names the kernel inside it."""

    path: str
    predicates: tuple[Predicate, ...] = ()
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True, slots=True)
class RuleBook:
    """An engine on one backend: rules in order, the last without predicates."""

    engine: str
    backend: Backend
    rules: tuple[Rule, ...]
    runners: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def predicates(self) -> tuple[Predicate, ...]:
        """All of them, in order."""
        return tuple(one for rule in self.rules for one in rule.predicates)

    def relaxed(self, name: str, value: int) -> "RuleBook":
        """With the call-site predicate of that name let everything up to the value through (from it on, for >=).

        Raises MoeplanError for an unknown name, or a predicate that compares no number.
        """
        known = {one.name: one for one in self.predicates if one.place == "call site" and type(one.value) is int}
        if name not in known:
            raise MoeplanError(f"--relax {name}={value}: {self.engine} has no such gate (gates: {', '.join(known)})")
        old = known[name]
        new = replace(old, op="<=" if old.op in ("==", "<=", "<") else ">=", value=value)
        rules = [replace(r, predicates=tuple(new if p == old else p for p in r.predicates)) for r in self.rules]
        return replace(self, rules=tuple(rules))


@dataclass(frozen=True, slots=True)
class Decline:
    """A rule that did not apply, and the first predicate that said so."""

    path: str
    predicate: Predicate
    text: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The path that runs, its kernel (empty where the engine has one), and the rules before it that did not apply."""

    path: str
    kernel: str
    admitted: tuple[Predicate, ...]
    declined: tuple[Decline, ...]


def call_facts(shape: LayerShape, tokens: int) -> dict[str, Value]:
    """What the predicates of an engine may look at, in one MoE call of that many rows."""
    formats = [form for form in (shape.gate, shape.up, shape.down) if form is not None]
    slots = tokens * shape.top_k
    return {
        "tokens": tokens,
        "slots": slots,
        "slots_per_expert": slots // shape.experts,
        "slots_times_4_over_experts": -(-slots * 4 // shape.experts),
        "experts": shape.experts,
        "top_k": shape.top_k,
        "hidden": shape.hidden,
        "expert_hidden": shape.expert_hidden,
        "gate_bits": shape.gate.bits if shape.gate else shape.up.bits,
        "down_bits": shape.down.bits,
        "gate_up_bits_differ": int(shape.gate is not None and shape.gate.bits != shape.up.bits),
        "group_sizes": len({form.group for form in formats}),
        "mode": "affine" if all(form.name.startswith("affine") for form in formats) else shape.up.name,
        "six_bit_down_rest": shape.expert_hidden % 16 if shape.down.bits == 6 else 0,
        "activation": shape.activation,
    }


def decide(book: RuleBook, facts: Mapping[str, Value]) -> Decision:
    """The first rule whose predicates all hold."""
    declined: list[Decline] = []
    for rule in book.rules:
        failed = next((one for one in rule.predicates if not one.holds(facts)), None)
        if failed is None:
            variant = next((v.kernel for v in rule.variants if all(p.holds(facts) for p in v.predicates)), "")
            return Decision(rule.path, variant, rule.predicates, tuple(declined))
        declined.append(Decline(rule.path, failed, failed.text(facts)))
    raise MoeplanError(f"engine {book.engine}: no rule applies to {dict(facts)}")


def _plain(value: Value) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def backends(books: Sequence[RuleBook]) -> str:
    """Their names, for messages."""
    return ", ".join(book.backend for book in books)
