"""Popularity profiles: for each layer and expert, the share of tokens that pick it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.trace import load_arrays

FloatTable = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """shares: float64 [layers, experts], each row sums to top_k; header: where the numbers come from."""

    name: str
    shares: FloatTable
    top_k: int
    header: dict[str, Any]

    def layer(self, layer: int, experts: int, top_k: int) -> FloatTable:
        """Inclusion probabilities [experts] of one layer for a model of that size; they sum to top_k.

        Layers beyond the profile's repeat cyclically. Another top_k scales the shares, never above 1. Another
        number of experts stretches the sorted curve: the cumulative share of the hottest x of the experts is kept
        for every x (Lorenz curve, linear in between), and the experts are then shuffled, each layer its own way,
        so that id order carries no heat.
        """
        row = self.shares[layer % len(self.shares)]
        if experts != row.size:
            row = _stretch(row, experts, layer)
        return _capped(row, top_k)


def _stretch(row: FloatTable, experts: int, layer: int) -> FloatTable:
    cumulative = np.concatenate([[0.0], np.cumsum(np.sort(row)[::-1])])
    at = np.linspace(0, row.size, experts + 1)
    curve = np.diff(np.interp(at, np.arange(row.size + 1), cumulative))
    return np.asarray(np.random.default_rng([layer, experts]).permutation(curve), dtype=np.float64)


def _capped(row: FloatTable, top_k: int) -> FloatTable:
    """Scale to the sum top_k with no entry above 1: what is cut off goes to the others in proportion."""
    full = np.zeros(row.size, dtype=bool)
    while True:
        rest = row[~full].sum()
        left = top_k - int(full.sum())
        scaled = np.where(full, 1.0, row * (left / rest) if rest > 0 else left / max(1, int((~full).sum())))
        if (scaled <= 1.0 + 1e-12).all():
            return np.minimum(scaled, 1.0)
        full |= scaled > 1.0


def load_popularity(folder: Path) -> Popularity:
    """Read `header.toml` and `popularity.npz` (float [layers, experts]) of a folder.

    Raises MoeplanError naming file, field and value.
    """
    header_file, table_file = folder / "header.toml", folder / "popularity.npz"
    try:
        header = tomllib.loads(header_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as bad:
        raise MoeplanError(f"{header_file}: cannot read: {bad}") from bad
    for key in ("layers", "experts", "top_k"):
        if type(header.get(key)) is not int or header[key] < 1:
            raise MoeplanError(f"{header_file}: {key} = {header.get(key)!r}, expected a positive whole number")
    shares = load_arrays(table_file, ("popularity",))["popularity"]
    size = (header["layers"], header["experts"])
    if shares.shape != size or not np.issubdtype(shares.dtype, np.floating):
        raise MoeplanError(f"{table_file}: popularity is {shares.dtype} {shares.shape}, expected floats {size}")
    table = shares.astype(np.float64)
    if not (np.isfinite(table).all() and (table >= 0).all() and (table <= 1 + 1e-6).all()):
        raise MoeplanError(f"{table_file}: popularity must lie in 0..1")
    off = np.abs(table.sum(axis=1) - header["top_k"])
    if (off > 1e-3).any():
        raise MoeplanError(f"{table_file}: popularity of layer {off.argmax()} does not sum to {header['top_k']}")
    return Popularity(folder.name, table, header["top_k"], header)
