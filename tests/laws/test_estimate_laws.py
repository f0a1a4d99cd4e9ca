"""Laws of times with bands, and of fits, whatever the numbers."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.cost.fit import Fit, fit_path
from moeplan.cost.forms import FORMS, Form, loss, solve
from moeplan.cost.model import Drivers, Estimate, weakest
from tests.cost_samples import distinct, samples

positive = st.floats(1e-9, 1e3)
origins = st.sampled_from(["measured", "published", "fitted", "assumed", "extrapolated"])


@st.composite
def estimates(draw: st.DrawFn) -> Estimate:
    low, middle, high = sorted(draw(st.tuples(positive, positive, positive)))
    return Estimate(middle, low, high, draw(origins))


@given(estimates(), estimates(), estimates())
def test_composition_keeps_order_and_origin(a: Estimate, b: Estimate, c: Estimate) -> None:
    for joined in (a.then(b), a.beside(b)):
        assert joined.low <= joined.seconds <= joined.high
        assert joined.source == weakest(a.source, b.source)
    assert a.then(b) == b.then(a)
    assert a.beside(b) == b.beside(a)
    assert a.beside(a) == a
    assert math.isclose(a.then(b).then(c).seconds, a.then(b.then(c)).seconds, rel_tol=1e-12)
    assert a.beside(b).seconds <= a.then(b).seconds


@given(estimates(), st.integers(0, 100))
def test_repeating_is_adding_to_itself(a: Estimate, times: int) -> None:
    total = Estimate(0.0, 0.0, 0.0, a.source)
    for _ in range(times):
        total = total.then(a)
    repeated = a.repeated(times)
    for one, other in zip(
        (total.seconds, total.low, total.high), (repeated.seconds, repeated.low, repeated.high), strict=True
    ):
        assert math.isclose(one, other, rel_tol=1e-9)


laws = st.tuples(st.floats(1e-6, 1e-4), st.floats(0, 5e-6), st.floats(0, 1e-6))


@settings(deadline=None, max_examples=15)
@given(laws, st.integers(0, 1000), st.floats(1.5, 1000))
def test_fit_laws(law: tuple[float, float, float], seed: int, scale: float) -> None:
    a, b, c = law
    arms = samples(lambda n, u, s: a + b * u + c * s, counts=(1, 2, 4, 8, 16), noise=0.02, seed=seed)
    fit = fit_path(arms)
    assert all(value >= 0 for piece in fit.curve.pieces for value in piece.law.coefficients)
    assert Fit.from_dict(fit.to_dict()) == fit
    assert fit_path(list(reversed(arms))) == fit, "the order of the samples is of no account"
    assert fit.band[0] <= 0 <= fit.band[1]
    for tokens in range(1, 17):
        inside = fit.estimate(Drivers(tokens, 8 * tokens, distinct("uniform", tokens)))
        assert 0 < inside.low <= inside.seconds <= inside.high
        assert inside.source == "fitted"
    tokens = max(17, int(16 * scale))
    outside = fit.estimate(Drivers(tokens, 8 * tokens, distinct("uniform", tokens)), extrapolate=True)
    assert 0 < outside.low <= outside.seconds <= outside.high
    assert outside.source == "extrapolated"
    assert outside.high / outside.seconds >= inside.high / inside.seconds - 1e-12


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(FORMS), st.floats(1e-3, 1e3), st.integers(0, 10_000))
def test_units_do_not_matter(form: Form, factor: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = np.stack([np.ones(20), *rng.uniform(1, 100, (3, 20))], axis=1)
    seconds = rng.uniform(1e-5, 1e-3, 20)
    one, other = solve(form, points, seconds), solve(form, points, seconds * factor)
    assert math.isclose(loss(one, points, seconds), loss(other, points, seconds * factor), rel_tol=1e-3)


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([form for form in FORMS if not form.smooth and not form.host]), st.integers(0, 10_000))
def test_no_small_step_improves_a_linear_solution(form: Form, seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = np.stack([np.ones(12), *rng.uniform(1, 100, (3, 12))], axis=1)
    seconds = rng.uniform(1e-5, 1e-3, 12)
    law = solve(form, points, seconds)
    best = loss(law, points, seconds)
    for i in [0] + [("distinct", "slots", "blocks").index(name) + 1 for name in form.drivers]:
        for step in (-1e-7, 1e-7):
            values = list(law.coefficients)
            values[i] = max(values[i] + step, 0.0)
            moved = type(law)(form, tuple(values), law.power)  # type: ignore[arg-type]
            assert loss(moved, points, seconds) >= best * (1 - 1e-9)
