"""A skill card (YAML front matter of a document): does its mechanism apply here, and do its numbers?

Two answers, since another version of the backend voids what was measured, not how it works.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeplan.errors import MoeplanError

_LARGEST = 1 << 20  # bytes of a card: they are a few pages of text
_ALIKE = {  # weight formats by their names here and on cards
    "mxfp4": ("mxfp4", "fp4_e2m1"),
    "fp8-e4m3": ("fp8_e4m3", "fp8_e4m3_fnuz"),
    "bf16": ("bf16", "bfloat16"),
}


@dataclass(frozen=True, slots=True)
class SkillCard:
    """name; match: lists by key; expects: the least isolated speedup; gpu and version of its own validation."""

    name: str
    match: Mapping[str, tuple[str, ...]]
    expects: float | None
    gpu: str
    version: str | None


def read_card(path: Path) -> SkillCard:
    """Read the front matter between the first two `---` lines. Raises MoeplanError naming file, field and value."""
    try:
        import yaml
    except ImportError:
        raise MoeplanError("--card: reading YAML needs PyYAML: pip install 'moeplan[card]'") from None
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise MoeplanError(f"{path}: more than {_LARGEST} bytes, not a skill card")
        parts = re.split(r"^---\s*$", text.decode("utf-8"), maxsplit=2, flags=re.M)
        if len(parts) < 3:
            raise MoeplanError(f"{path}: no front matter between two --- lines")
        data = yaml.safe_load(parts[1])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as bad:
        raise MoeplanError(f"{path}: {' '.join(str(bad).split())}") from None
    if not isinstance(data, dict) or not isinstance(data.get("match"), dict):
        raise MoeplanError(f"{path}: match is missing")
    return SkillCard(
        str(data.get("id", path.stem)),
        {str(key): _words(value) for key, value in data["match"].items() if isinstance(value, list)},
        _speedup(path, data.get("expects")),
        str(_inside(data, "validation", "gpu") or ""),
        _version(str(_inside(data, "validation", "measured", "isolated") or "")),
    )


def _words(values: list[Any]) -> tuple[str, ...]:
    return tuple(str(one) for one in values if isinstance(one, str | int | float))


def _inside(data: Any, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _speedup(path: Path, expects: Any) -> float | None:
    value = _inside(expects, "isolated_speedup_min")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise MoeplanError(f"{path}: expects.isolated_speedup_min {value!r} is not a positive number")
    return float(value)


def _version(text: str) -> str | None:
    found = re.search(r"\d+(?:\.\d+)+", text)
    return found[0] if found else None


def compare(card: SkillCard, here: Mapping[str, str], document: Mapping[str, Any]) -> dict[str, Any]:
    """The card against a `pairing` document. here: generation, format, phase, version, empty where unknown."""
    reasons = []
    for key, known in (("gens", (here["generation"],)), ("dtypes", _ALIKE.get(here["format"], (here["format"],)))):
        wanted = card.match.get(key, ())
        if wanted and "*" not in wanted:
            word = "/".join(known) or "unknown"
            hit = bool(set(known) & set(wanted))
            reasons.append({"field": key, "holds": hit if any(known) else None, "here": word, "card": list(wanted)})
    regimes, phase = card.match.get("regimes", ()), here["phase"] or "decode"
    if regimes:
        reasons.append({"field": "regimes", "holds": phase in regimes, "here": phase, "card": list(regimes)})
    holds = [one["holds"] for one in reasons] + [gate["holds"] for gate in document["gates"]]
    applicable = document["verdict"] != "not applicable" and False not in holds
    return {
        "name": card.name,
        "expects": card.expects,
        "match": reasons,
        "mechanism": {"applies": None if applicable and None in holds else applicable},
        "numbers": _numbers(card, here),
    }


def _numbers(card: SkillCard, here: Mapping[str, str]) -> dict[str, Any]:
    if not card.version:
        return {"hold": False, "reason": "the card names no version that it was measured with"}
    if not here["version"]:
        return {"hold": None, "reason": f"measured with version {card.version}; give --installed"}
    if here["version"] != card.version:
        reason = f"measured with version {card.version}, installed is {here['version']}: measure again"
        return {"hold": False, "reason": reason}
    if here["generation"] and here["generation"] not in card.gpu:
        return {"hold": False, "reason": f"measured on {card.gpu}, this device is {here['generation']}: measure again"}
    return {"hold": True, "reason": f"the same version, {card.version}, and {card.gpu}"}
