"""Kernels that somebody brings: any calibrated paths, in the order given, with no gate of their own yet."""

from itertools import pairwise

from moeplan.engines.chain import Engine, Gate
from moeplan.errors import MoeplanError


def own(paths: list[str]) -> Engine:
    """A chain over those paths whose default is the first one at every size. Raises MoeplanError below two paths."""
    if len(paths) < 2 or len(set(paths)) != len(paths):
        raise MoeplanError(f"--engine own: name at least two different paths with --path, not {paths}")
    gates = [
        Gate(f"{below}_to_{above}", "tokens", None, below, above, "none: the first path at every size")
        for below, above in pairwise(paths)
    ]
    return Engine("own", ("exec", "python", "triton", "mlx"), tuple(gates))
