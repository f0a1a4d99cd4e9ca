"""Prices: a timed point stands for its routing's mean, not for the draws it was timed on."""

import json
from pathlib import Path

import pytest

from moeplan.cost.calibrate import load_calibration
from moeplan.planning.prices import Assumption, layer_price, mean_drivers
from moeplan.planning.span import LayerGroup
from moeplan.store import Store
from moeplan.traffic.routing import Routing
from tests.planning import TINY, Law, write_calibration

UNIFORM = Assumption(Routing("uniform"))


def group(folder: Path, law: Law, off: float) -> LayerGroup:
    """A calibration whose uniform draws woke `off` times as many experts as uniform routing does in the mean."""
    path = write_calibration(folder, "box", "triton", TINY, {"p": law}, (1, 2, 3, 4, 6, 8), jitter=0.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    moved = {}
    for line in lines:
        if line["type"] == "arm" and line["routing"] == "uniform":
            before = mean_drivers(UNIFORM, "p", line["tokens"], TINY)
            line["distinct"] *= off
            after = type(before)(before.tokens, before.slots, line["distinct"], 0.0)
            moved[line["arm"]] = law(after)
        if line["type"] == "time" and line["arm"] in moved:
            line |= {"short_s": 1e-5 + 4 * moved[line["arm"]], "long_s": 1e-5 + 12 * moved[line["arm"]]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return LayerGroup(load_calibration(Store(calibration=folder), "box", "triton", TINY), 1)


def test_a_point_is_moved_from_its_draws_to_the_mean(tmp_path: Path) -> None:
    def by_distinct(work: object) -> float:
        return 1e-5 + 2e-6 * work.distinct  # type: ignore[attr-defined]

    found = group(tmp_path, by_distinct, 1.05)
    for tokens in (2, 4, 8):
        price = layer_price(found, "p", tokens, UNIFORM)
        assert price.source == "adjusted"
        assert price.seconds == pytest.approx(by_distinct(mean_drivers(UNIFORM, "p", tokens, TINY)), rel=0.005)
        assert price.low <= price.seconds <= price.high


def test_a_point_on_mean_draws_or_without_a_share_in_them_stays_measured(tmp_path: Path) -> None:
    exact = group(tmp_path / "a", lambda work: 1e-5 + 2e-6 * work.distinct, 1.0)
    assert layer_price(exact, "p", 4, UNIFORM).source == "measured"
    slots = group(tmp_path / "b", lambda work: 1e-5 + 2e-6 * work.slots, 1.05)
    assert layer_price(slots, "p", 4, UNIFORM).source == "measured"
    assert layer_price(slots, "p", 5, UNIFORM).source == "fitted"
