"""Expert counts: aggregates that give popularity and never co-activation, so they are no trace and say so."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.importers.reading import TOP_K_LIMIT, fail
from moeplan.traffic.importers.record import Hints, provenance

IntTable = npt.NDArray[np.int64]
TABLE_LIMIT = 1 << 23  # layers x experts of one table: a limit of this program, far above any model
_LOSS = 1e-6  # counts kept as float32 (imatrix) are whole only to their last digit


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCounts:
    """counts int64 [layers, experts]: (token, expert) pairs of each layer. Marked as counts wherever it is saved.

    top_k: experts a token takes, or None where the file does not tell; without it counts give no popularity.
    """

    name: str
    counts: IntTable
    layer_ids: tuple[int, ...]
    top_k: int | None
    provenance: dict[str, object]

    @property
    def tokens(self) -> int | None:
        """Tokens of the busiest layer: pairs / top_k."""
        return int(self.counts.sum(axis=1).max()) // self.top_k if self.top_k else None

    def shares(self) -> npt.NDArray[np.float64] | None:
        """Popularity [layers, experts], each row sums to top_k, or None without top_k."""
        if self.top_k is None:
            return None
        return np.asarray(self.counts / self.counts.sum(axis=1, keepdims=True) * self.top_k, dtype=np.float64)


def expert_counts(
    form: str, paths: Sequence[Path], layers: dict[int, IntTable], hints: Hints, top_k: int | None = None
) -> ExpertCounts:
    """Checked counts of each layer index. Layers without any pair are dense and are left out, with a note.

    Raises MoeplanError naming file and value where layers disagree, a count is negative, or a share is above 1.
    """
    path, notes = paths[0], ["counts: popularity only, never co-activation"]
    used = {layer: row for layer, row in sorted(layers.items()) if row.any()}
    if len(used) < len(layers):
        notes.append(f"{len(layers) - len(used)} layers without any count left out")
    if not used:
        raise fail(path, "holds no expert count above zero")
    sizes = {row.size for row in used.values()}
    if len(sizes) != 1 or hints.experts not in (None, *sizes):
        raise fail(
            path, f"experts a layer: {sorted(sizes)[:4]}, --experts or --model says {hints.experts or 'nothing'}"
        )
    table = np.stack(list(used.values())).astype(np.int64)
    if int(table.min()) < 0 or float(table.astype(np.float64).sum(axis=1).max()) > 2**62:
        raise fail(path, "an expert count is negative or beyond 2^62")
    if top_k is not None and hints.top_k not in (None, top_k):
        raise fail(path, f"top_k = {top_k}, --top-k or --model says {hints.top_k}")
    k = top_k or hints.top_k
    if k is not None:
        _check_shares(table, list(used), k, path)
    source = provenance(form, paths, hints.model, notes)
    return ExpertCounts(path.stem, table, tuple(used), k, source)


def _check_shares(table: IntTable, layers: list[int], top_k: int, path: Path) -> None:
    if not 0 < top_k <= min(TOP_K_LIMIT, table.shape[1]):
        raise fail(path, f"top_k = {top_k} of {table.shape[1]} experts")
    over = table.max(axis=1) * float(top_k) > table.sum(axis=1) * (1 + _LOSS)
    if over.any():
        layer = int(over.argmax())
        raise fail(path, f"layer {layers[layer]}: an expert with more tokens than there are, with top_k = {top_k}")


def save_counts(counts: ExpertCounts, folder: Path) -> None:
    """Write `header.toml` (kind = "counts"), `counts.npy` and, where top_k is known, `popularity.npz`, atomically.

    The folder then works as `popularity:NAME`. Raises MoeplanError where it exists or cannot be written.
    """
    if folder.exists():
        raise MoeplanError(f"{folder}: exists already")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            np.save(made / "counts.npy", counts.counts, allow_pickle=False)
            shares = counts.shares()
            if shares is not None:
                np.savez_compressed(made / "popularity.npz", popularity=shares)
            (made / "header.toml").write_text(_header(counts), encoding="utf-8")
            made.chmod(0o755)
            os.replace(made, folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as bad:
        raise MoeplanError(f"{folder}: cannot write: {bad.strerror or bad}") from bad


def _header(counts: ExpertCounts) -> str:
    from json import dumps

    rows: dict[str, object] = {
        "format": "moeplan-counts",
        "format_version": 1,
        "kind": "counts",
        "layers": len(counts.layer_ids),
        "experts": counts.counts.shape[1],
    }
    if counts.top_k is not None:
        rows |= {"top_k": counts.top_k, "tokens": counts.tokens}
    rows |= {"layer_ids": list(counts.layer_ids), "source": f"imported {counts.provenance['format']} counts"}
    top = "".join(f"{key} = {dumps(value)}\n" for key, value in rows.items())
    return top + "\n[provenance]\n" + "".join(f"{key} = {dumps(value)}\n" for key, value in counts.provenance.items())
