"""Reading a config.json: one value under several spellings, and refusal where two of them disagree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeplan.errors import MoeplanError


class Fields:
    """The fields of a config.json, nested `text_config` included, by any of their spellings."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        """Raises MoeplanError where `text_config` is not an object."""
        self.path = path
        self.raw = raw
        text = raw.get("text_config")
        if text is not None and not isinstance(text, dict):
            raise MoeplanError(f"{path}: text_config = {text!r}, expected an object")
        self.text: Mapping[str, Any] = text or {}
        self.tables = [("text_config.", self.text), ("", raw)] if text else [("", raw)]

    def fail(self, message: str) -> MoeplanError:
        """An error that names the file."""
        return MoeplanError(f"{self.path}: {message}")

    def found(self, *keys: str) -> list[tuple[str, Any]]:
        """Every spelling that is present and not null, with its full name; the nested object first."""
        return [
            (prefix + key, table[key]) for prefix, table in self.tables for key in keys if table.get(key) is not None
        ]

    def first(self, *keys: str) -> Any:
        """The first spelling present, or None: for facts that may legitimately differ between the levels."""
        hits = self.found(*keys)
        return hits[0][1] if hits else None

    def one(self, *keys: str) -> Any:
        """The value under whichever spelling is present, or None. Raises MoeplanError where two disagree."""
        hits = self.found(*keys)
        for name, value in hits[1:]:
            if _plain(value) != _plain(hits[0][1]):
                raise self.fail(f"{hits[0][0]} = {_short(hits[0][1])} disagrees with {name} = {_short(value)}")
        return hits[0][1] if hits else None

    def name(self, *keys: str) -> str:
        """The spelling that is present, for messages."""
        hits = self.found(*keys)
        return hits[0][0] if hits else keys[0]

    def whole(self, *keys: str, least: int = 1) -> int | None:
        """A whole number of at least `least`, or None where absent."""
        value = self.one(*keys)
        if value is None:
            return None
        if type(value) is not int or value < least:
            raise self.fail(f"{self.name(*keys)} = {value!r}, expected a whole number of at least {least}")
        return value

    def need(self, *keys: str) -> int:
        """`whole`, but an error where it is absent."""
        value = self.whole(*keys)
        if value is None:
            raise self.fail(f"{' or '.join(keys)} is missing")
        return value

    def per_layer(self, layers: int, *keys: str, least: int = 1) -> list[int] | None:
        """A number a layer: a list of that length, or one number for all; None where absent."""
        value = self.one(*keys)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers:
            raise self.fail(f"{self.name(*keys)} has {len(values)} entries, num_hidden_layers = {layers}")
        for item in values:
            if type(item) is not int or item < least:
                raise self.fail(f"{self.name(*keys)} = {item!r}, expected a whole number of at least {least}")
        return list(values)

    def indices(self, layers: int, key: str) -> list[int] | None:
        """A list of layer numbers, or None where absent."""
        value = self.one(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(i) is not int or not 0 <= i < layers for i in value):
            raise self.fail(f"{self.name(key)} = {value!r}, expected layer numbers below {layers}")
        return sorted(set(value))


def _plain(value: Any) -> Any:
    """A list whose entries are all equal says the same as that entry."""
    return value[0] if isinstance(value, list) and value and all(item == value[0] for item in value) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
