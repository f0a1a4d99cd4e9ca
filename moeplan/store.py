"""Where models, traces and calibrations lie: an explicit folder, the current folder, then the package's own copy."""

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeplan.errors import MoeplanError

_PACKAGE = Path(__file__).resolve().parent
_SHIPPED = _PACKAGE / "data" if (_PACKAGE / "data").is_dir() else _PACKAGE.parent  # installed copy, else checkout


@dataclass(frozen=True, slots=True)
class Store:
    """Search order for each kind: the folder given on the command line, `./kind`, the shipped folder."""

    models: Path | None = None
    traces: Path | None = None
    calibration: Path | None = None

    def folders(self, kind: str) -> Iterator[Path]:
        """Existing folders of a kind (`models`, `traces`, `calibration`), the most specific first."""
        given: Path | None = getattr(self, kind)
        if given is not None and not given.is_dir():
            raise MoeplanError(f"--{kind}: no folder {given}")
        seen = set()
        for folder in (given, Path.cwd() / kind, _SHIPPED / kind):
            if folder is not None and folder.is_dir() and folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder

    def find(self, kind: str, name: str) -> Path | None:
        """The first file or folder of that name, or None."""
        for folder in self.folders(kind):
            if (folder / name).exists():
                return folder / name
        return None

    def names(self, kind: str, pattern: str) -> list[str]:
        """Stems of all files (or folder names) that match, sorted, each once."""
        found = [path for folder in self.folders(kind) for path in folder.glob(pattern)]
        return sorted({path.stem if path.is_file() else path.name for path in found})


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name in the same folder and rename, so that a reader never sees half a file.

    Raises MoeplanError where the folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as bad:
        raise MoeplanError(f"{path}: cannot write: {bad.strerror or bad}") from bad


def write_json(path: Path, document: Any) -> None:
    """`write_text` of sorted, indented JSON with a final newline: the same document gives the same bytes."""
    write_text(path, json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises MoeplanError naming the file where it is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as bad:
        raise MoeplanError(f"{path}: cannot read: {bad.strerror or bad}") from bad
    except (ValueError, RecursionError) as bad:
        raise MoeplanError(f"{path}: not JSON: {bad}") from bad
