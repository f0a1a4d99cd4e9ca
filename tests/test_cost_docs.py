"""docs/cost-model.md states the held-out errors of the shipped fits: its rows are those that fits.json gives."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def rows() -> list[str]:
    """One table row a shipped fit."""
    found = []
    for path in sorted(ROOT.glob("calibration/*/*/fits.json")):
        for fit in json.loads(path.read_text())["fits"]:
            held, ends = fit["holdout"], fit["end_points"]
            cells = [
                f"{path.parent.parent.name} {path.parent.name}, {', '.join(fit['models'])}",
                f"`{fit['path']}`",
                fit["form"],
                f"{held['mean']:.1%}",
                f"{held['p90']:.1%}",
                f"{ends['mean']:.1%}",
                f"{fit['band'][0]:+.1%} .. {fit['band'][1]:+.1%}",
                str(held["n"]),
            ]
            found.append(f"| {' | '.join(cells)} |")
    return found


def test_held_out_errors_in_the_document_are_current() -> None:
    text = (ROOT / "docs/cost-model.md").read_text(encoding="utf-8")
    wanted = rows()
    assert wanted
    missing = [row for row in wanted if row not in text]
    assert not missing, "print the rows with `python -m tests.test_cost_docs`:\n" + "\n".join(missing)
    assert text.count("| h200 ") + text.count("| m1-ultra ") + text.count("| cpu ") == len(wanted), "stale rows"


if __name__ == "__main__":
    print("\n".join(rows()))
