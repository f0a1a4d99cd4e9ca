"""Logs of single routing events, laid out as a table."""

from array import array
from collections.abc import Sequence

import numpy as np

from moeplan.traffic.importers.reading import CELL_LIMIT, EVENT_LIMIT, Ids, fail


class Events:
    """Routing events (row, layer, ids) in any order, kept compactly; `dense` lays them out."""

    def __init__(self, where: object) -> None:
        """`where` is what errors name."""
        self.where = where
        self.rows, self.layers, self.widths, self.ids = array("q"), array("i"), array("i"), array("i")

    def add(self, row: int, layer: int, ids: Sequence[int]) -> None:
        """One event; no ids = a token that no expert took."""
        self.rows.append(row)
        self.layers.append(layer)
        self.widths.append(len(ids))
        self.ids.extend(ids)
        if len(self.ids) + len(self.rows) > EVENT_LIMIT:
            raise fail(self.where, f"more than {EVENT_LIMIT} expert ids and events")

    def dense(self, rows: int) -> tuple[Ids, list[int]]:
        """ids int32 [rows, layers, k], -1 where nothing was recorded, and the layer indices.

        Raises MoeplanError for an event recorded twice, or a table far emptier than its log.
        """
        if not self.rows:
            raise fail(self.where, "holds no routing event")
        layer_ids, column = np.unique(np.asarray(self.layers), return_inverse=True)
        width = np.asarray(self.widths, dtype=np.int64)
        top_k, layers = max(1, int(width.max())), layer_ids.size
        cells = rows * layers * top_k
        if cells > CELL_LIMIT or cells > max(1 << 22, 64 * (len(self.ids) + len(self.rows))):
            raise fail(self.where, f"{rows} rows of {layers} layers of top-{top_k}: too many, or nearly all missing")
        cell = np.asarray(self.rows) * layers + column
        seen = np.zeros(rows * layers, dtype=bool)
        seen[cell] = True
        if np.count_nonzero(seen) != cell.size:
            raise fail(self.where, "the same token and layer are recorded twice")
        ids = np.full((rows * layers, top_k), -1, dtype=np.int32)
        slot = np.arange(len(self.ids)) - np.repeat(np.cumsum(width) - width, width)
        ids[np.repeat(cell, width), slot] = np.asarray(self.ids)
        return ids.reshape(rows, layers, top_k), layer_ids.tolist()
