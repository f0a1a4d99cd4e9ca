"""Rule books by engine and backend: what `audit` looks at."""

from moeplan.engines import mlx_lm, mlxcel, sglang, vllm
from moeplan.engines.rules import RuleBook, backends
from moeplan.errors import MoeplanError
from moeplan.traffic.shape import LayerShape

AUDITED = ("mlx-lm", "mlxcel", "sglang", "vllm")


def rule_book(name: str, backend: str | None, shape: LayerShape) -> RuleBook:
    """The rules of an engine; backend None takes the first that it has. Raises MoeplanError listing the known ones."""
    books = {
        "mlx-lm": mlx_lm.BOOKS,
        "mlxcel": mlxcel.BOOKS,
        "sglang": (sglang.rule_book(shape.experts),),
        "vllm": vllm.BOOKS,
    }
    if name not in books:
        raise MoeplanError(f"--engine {name}: no rules of this engine are known (known: {', '.join(AUDITED)})")
    found = next((book for book in books[name] if backend in (None, book.backend)), None)
    if found is None:
        raise MoeplanError(f"--backend {backend}: {name} is known on {backends(books[name])}")
    return found
