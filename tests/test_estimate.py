"""Times by term: the terms add up, say what they stand for, and the command picks the fastest path."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moeplan.cli import app
from moeplan.cost.choose import whole
from moeplan.cost.curve import Curve, Piece, Table, leftover
from moeplan.cost.fit import Fit
from moeplan.cost.forms import FORMS, Form, Law
from moeplan.cost.holdout import Errors
from moeplan.cost.model import Drivers
from moeplan.cost.terms import HOST, LEFTOVERS, NAMES, split
from moeplan.errors import MoeplanError
from tests.planning import TINY, write_calibration

NOTHING = Errors(0.0, 0.0, 0.0, 0.0, 0)


def fit_of(curve: Curve) -> Fit:
    last = curve.pieces[-1].last
    return Fit(
        "grouped:16", curve, (1, last), (1.0, 1e6), (), 9, "measured", 0, NOTHING, NOTHING, (-0.1, 0.1),
        ((1, 1.0), (last, 1.0)), 0.0, (),
    )  # fmt: skip


def values(form: Form, draw: st.DataObject) -> tuple[float, float, float, float]:
    cost = st.floats(1e-7, 1e-5)
    found = [draw.draw(cost), 0.0, 0.0, 0.0]
    for name in form.drivers:
        found[("constant", "distinct", "slots", "blocks").index(name)] = draw.draw(cost)
    return found[0], found[1], found[2], found[3]


@given(st.sampled_from(FORMS), st.integers(1, 64), st.data())
def test_the_terms_of_every_form_add_up_to_its_time(form: Form, tokens: int, draw: st.DataObject) -> None:
    power = 3.0 if form.smooth else 1.0
    law = Law(form, values(form, draw), power, 2e-5 if form.host else 0.0)
    fit = fit_of(Curve((Piece(1, 64, law),)))
    drivers = Drivers(tokens, tokens * 4.0, min(16.0, tokens * 3.0), tokens * 3.5)
    terms = split(fit, drivers)
    assert sum(term.seconds for term in terms) == pytest.approx(fit.estimate(drivers).seconds, rel=1e-9)
    assert all(term.seconds >= 0 for term in terms)
    assert {term.name for term in terms} <= {*NAMES.values(), HOST}


def test_a_smooth_maximum_is_shared_by_what_each_term_moves() -> None:
    law = Law(Form(("distinct", "slots"), smooth=True), (0.0, 3e-6, 1e-6, 0.0), 2.0)
    terms = {term.name: term.seconds for term in split(fit_of(Curve((Piece(1, 64, law),))), Drivers(8, 30.0, 10.0))}
    whole = 1e-6 * (30**2 + 30**2) ** 0.5
    assert terms[NAMES["distinct"]] == pytest.approx(whole / 2)
    step = 1e-3  # the derivative, by moving the distinct experts
    more = law.seconds(np.array([[1.0, 10.0 * (1 + step), 30.0, 0.0]]))[0] - whole
    assert terms[NAMES["distinct"]] == pytest.approx(more / step, rel=1e-3)


def test_two_pieces_blend_and_leftovers_are_a_term_of_their_own() -> None:
    slow, fast = (Law(Form(("slots",)), (1e-5, 0.0, cost, 0.0)) for cost in (2e-6, 1e-6))
    fit = fit_of(Curve((Piece(1, 8, slow), Piece(16, 64, fast))))
    for tokens in (4, 8, 12, 16, 40):
        drivers = Drivers(tokens, 4.0 * tokens, 8.0)
        total = sum(term.seconds for term in split(fit, drivers))
        assert total == pytest.approx(fit.estimate(drivers).seconds)
    tokens = np.array([1.0, 2.0, 4.0, 8.0])
    points = np.stack([np.ones(4), tokens, 4 * tokens, tokens], axis=1)
    table = Table(tokens, points, 1e-5 + 1e-6 * points[:, 2] * np.array([1.0, 1.2, 0.9, 1.0]))
    fit = fit_of(leftover(whole(Form(("slots",))))(table))
    terms = split(fit, Drivers(2, 8.0, 2.0))
    assert terms[-1].name == LEFTOVERS
    assert sum(term.seconds for term in terms) == pytest.approx(fit.estimate(Drivers(2, 8.0, 2.0)).seconds)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    laws = {"fused": lambda w: 20e-6 + 2e-6 * w.slots, "grouped:16": lambda w: 60e-6 + 4e-6 * w.distinct}
    write_calibration(folder, "box", "triton", TINY, laws, (1, 2, 4, 8, 16, 32, 64))
    write_calibration(folder, "box", "mlx", TINY, {"gather": lambda w: 1e-3 + 1e-6 * w.slots}, (1, 4, 64))
    return folder


def run(box: Path, *words: str) -> dict[str, Any]:
    done = CliRunner().invoke(
        app, ["estimate", "tiny-moe-4bit", "--device", "box", "--calibration", str(box), "--json", *words]
    )
    assert done.exit_code == 0, done.exception
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_fastest_path_of_all_runners_by_term(box: Path) -> None:
    few, many = run(box, "--tokens", "2"), run(box, "--tokens", "48")
    assert (few["path"], few["limited_by"]) == ("fused", NAMES["constant"])
    assert (many["path"], many["source"], many["limited_by"]) == ("grouped:16", "fitted", NAMES["distinct"])
    assert many["seconds"] == pytest.approx(60e-6 + 4e-6 * 16, rel=0.01)
    terms = {term["name"]: term for term in many["terms"]}
    assert terms[NAMES["constant"]]["seconds"] == pytest.approx(60e-6, rel=0.02)
    assert sum(term["share"] for term in many["terms"]) == pytest.approx(1)
    assert [one["path"] for one in many["paths"]] == ["grouped:16", "fused", "gather"]
    assert run(box, "--runner", "mlx", "--tokens", "48")["path"] == "gather"


def test_a_step_is_all_layers_and_its_band_grows_with_them(box: Path) -> None:
    layer, step = run(box, "--tokens", "8"), run(box, "--tokens", "8", "--step")
    assert step["layers"] > 1
    for key in ("seconds", "low", "high"):
        assert step[key] == pytest.approx(layer[key] * step["layers"])
    assert sum(term["seconds"] for term in step["terms"]) == pytest.approx(step["seconds"])
    assert step["limit"] == layer["limit"]


@pytest.mark.parametrize(
    "words",
    [
        ("--device", "none"),
        ("--path", "nope"),
        ("--runner", "vllm"),
        ("--tokens", "4096"),
        ("--cohort", "stream:2"),
        ("--routing", "odd"),
    ],
)
def test_bad_questions_are_one_line(box: Path, words: tuple[str, ...]) -> None:
    base = ["estimate", "tiny-moe-4bit", "--device", "box", "--calibration", str(box)]
    done = CliRunner().invoke(app, [*base, *words])
    assert isinstance(done.exception, MoeplanError)
    assert "\n" not in str(done.exception)
