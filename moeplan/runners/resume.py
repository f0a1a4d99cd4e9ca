"""What a journal already holds, and whether a run may continue it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeplan.cost.samples import lines
from moeplan.errors import MoeplanError
from moeplan.provenance import MUST_AGREE


@dataclass(slots=True)
class Held:
    """What a journal already holds."""

    begun: bool = False
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    times: set[tuple[str, int]] = field(default_factory=set)
    rounds: set[int] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)


def resume(path: Path, header: dict[str, Any]) -> Held:
    """Read what is there; raises MoeplanError where the header says that it was taken under other conditions."""
    state = Held()
    if not path.exists():
        return state
    for line in lines(path):
        match line["type"]:
            case "header":
                _must_agree(path, line, header)
                state.begun = True
            case "arm":
                state.arms[line["arm"]] = line
            case "time":
                state.times.add((line["arm"], line["round"]))
            case "round":
                state.rounds.add(line["round"])
            case "failed" | "declined":
                state.lost.add(line["arm"])
    return state


def _must_agree(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    for key in ("schema", "kind", "model", "shape", "options", *MUST_AGREE):
        if old.get(key) != new.get(key):
            raise MoeplanError(
                f"{path}: {key}: the journal has {old.get(key)!r}, this run {new.get(key)!r}; write to another folder"
            )
