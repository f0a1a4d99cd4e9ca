"""Engines by name: each file holds one engine's gates with the place in its source that they come from."""

from moeplan.engines import mlx_lm, moeplan_triton
from moeplan.engines.chain import Engine
from moeplan.engines.own import own
from moeplan.errors import MoeplanError

ENGINES = {engine.name: engine for engine in (mlx_lm.ENGINE, moeplan_triton.ENGINE)}


def find_engine(name: str, paths: list[str]) -> Engine:
    """`mlx-lm`, `moeplan-triton`, or `own` with its paths in order. Raises MoeplanError listing the known names."""
    if name == "own":
        return own(paths)
    if name not in ENGINES:
        raise MoeplanError(f"--engine {name}: unknown engine (known: {', '.join([*ENGINES, 'own'])})")
    if paths:
        raise MoeplanError(f"--path {paths[0]}: only --engine own takes paths; {name} has its own")
    return ENGINES[name]
