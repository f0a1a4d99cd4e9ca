"""The picture of `trace stats`: distinct experts of a batch and of a window, and how long a stream remembers."""

import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from moeplan.errors import MoeplanError

_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> Any:
    """matplotlib's Figure class. Raises MoeplanError where matplotlib is missing or the name has no known suffix."""
    if path.suffix.lower() not in _SUFFIXES:
        raise MoeplanError(f"--plot {path}: expected a name that ends in {', '.join(_SUFFIXES)}")
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError:
        raise MoeplanError(f"--plot {path}: needs matplotlib: pip install 'moeplan[plot]'") from None


def plot_stats(document: dict[str, Any], path: Path) -> None:
    """Draw a `stats_document` into a png, svg or pdf file, written to a temporary name and renamed.

    Raises MoeplanError where matplotlib is missing or the file cannot be written.
    """
    figure = check_plot(path)(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = document["distinct"]
    x = [row["rows"] for row in rows]
    left.fill_between(x, [r["p05"] for r in rows], [r["p95"] for r in rows], alpha=0.2, label="5th to 95th percentile")
    left.plot(x, [r["mean"] for r in rows], "o-", label=f"{document['cohort']} cohort")
    left.plot(x, [r["formula"] for r in rows], "--", label="popularity formula")
    left.plot(x, [r["uniform"] for r in rows], ":", label="uniform formula")
    windows = document["window"]
    left.plot([w["tokens"] for w in windows], [w["distinct"] for w in windows], "s-", label="one stream")
    left.set(xscale="log", xlabel="rows in one call", ylabel="distinct experts of a layer", title=document["name"])
    left.set_xticks(x, [str(n) for n in x])
    left.minorticks_off()
    left.legend()
    lags = document["overlap"]
    right.plot([r["lag"] for r in lags], [r["shared"] for r in lags], "o-", label="all pairs pooled")
    right.plot([r["lag"] for r in lags], [r["shared_by_request"] for r in lags], "s-", label="mean over requests")
    right.plot([r["lag"] for r in lags], [r["chance"] for r in lags], ":", label="chance, given popularity")
    right.set(xscale="log", xlabel="tokens apart in one request", ylabel=f"experts shared of {document['top_k']}")
    right.set_xticks([r["lag"] for r in lags], [str(r["lag"]) for r in lags])
    right.minorticks_off()
    right.legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
        os.close(handle)
        try:
            figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=120)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as bad:
        raise MoeplanError(f"{path}: cannot write: {bad.strerror or bad}") from bad
