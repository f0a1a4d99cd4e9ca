"""Fits on samples whose law is known, and on measured tables where they are at hand."""

import csv
import gzip
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeplan.cost.choose import choose
from moeplan.cost.curve import Table
from moeplan.cost.fit import Fit, fit_path
from moeplan.cost.forms import FORMS, Form, Law, solve
from moeplan.cost.holdout import band_of
from moeplan.cost.model import Drivers
from moeplan.cost.points import drivers_of
from moeplan.cost.samples import Sample
from moeplan.errors import MoeplanError
from tests.cost_samples import COUNTS, TOP_K, distinct, sample, samples, shape

KERNELS = Path(__file__).resolve().parents[2] / "shared/data/kernels"


def coefficients(fit: Fit) -> tuple[float, ...]:
    return fit.curve.pieces[0].law.coefficients


@pytest.mark.parametrize("seed", range(4))
def test_slot_law_is_found(seed: int) -> None:
    fit = fit_path(samples(lambda n, u, s: 18e-6 + 5.8e-6 * s, noise=0.01, seed=seed))
    assert fit.drivers == ("slots",)
    assert coefficients(fit)[2] == pytest.approx(5.8e-6, rel=0.01)
    assert coefficients(fit)[0] == pytest.approx(18e-6, rel=0.1)
    assert fit.holdout.mean < 0.015


@pytest.mark.parametrize("seed", range(4))
def test_distinct_law_is_found(seed: int) -> None:
    fit = fit_path(samples(lambda n, u, s: 30e-6 + 1.9e-6 * u, noise=0.01, seed=seed))
    assert fit.drivers == ("distinct",)
    assert coefficients(fit)[:2] == (pytest.approx(30e-6, rel=0.05), pytest.approx(1.9e-6, rel=0.02))


def test_mixed_law_is_found_and_its_errors_cover_the_truth() -> None:
    fit = fit_path(samples(lambda n, u, s: 12e-6 + 0.7e-6 * u + 0.2e-6 * s, noise=0.005, seed=3))
    assert set(fit.drivers) == {"distinct", "slots"}
    law = fit.curve.pieces[0].law
    for value, error, truth in zip(law.coefficients, law.errors, (12e-6, 0.7e-6, 0.2e-6), strict=False):
        assert error is not None
        assert abs(value - truth) < 4 * error
        assert error < 0.1 * truth


def test_smooth_maximum_of_memory_and_compute_is_found() -> None:
    def law(tokens: int, planes: float, slots: float) -> float:
        return 8e-6 + max(0.63e-6 * planes, 0.3e-6 * slots)

    counts = (*COUNTS, 48, 64, 128, 256, 512, 1024)
    fit = fit_path(samples(law, counts, noise=0.003))
    assert fit.curve.pieces[0].law.form == Form(("distinct", "slots"), smooth=True)
    assert fit.holdout.mean < 0.01
    sums = dict(fit.candidates)["a + b*distinct + c*slots"]
    assert sums > 3 * fit.holdout.mean


def test_blocks_of_a_grouped_path_are_found() -> None:
    def blocks(routing: str, tokens: int) -> float:
        planes = distinct(routing, tokens)
        return planes * math.ceil(TOP_K * tokens / planes / 16)

    arms = [
        sample(
            "grouped:16",
            tokens,
            routing,
            15e-6 + 1.1e-6 * blocks(routing, tokens),
            blocks={16: blocks(routing, tokens)},
        )
        for tokens in (*COUNTS, 64, 128, 256, 512)
        for routing in ("identical", "balanced", "uniform")
    ]
    fit = fit_path(arms)
    assert fit.drivers == ("blocks",)
    assert coefficients(fit)[3] == pytest.approx(1.1e-6, rel=1e-4)
    assert fit.estimate(Drivers(4, 32, 32, 32)).seconds == pytest.approx(15e-6 + 1.1e-6 * 32, rel=1e-4)
    with pytest.raises(MoeplanError, match=r"path grouped:16: its time follows blocks"):
        fit.estimate(Drivers(4, 32, 32))


def test_path_switch_is_fitted_as_two_pieces() -> None:
    def law(tokens: int, planes: float, slots: float) -> float:
        return 20e-6 + 1.1e-6 * slots if tokens <= 8 else 70e-6 + 0.1e-6 * slots + 0.3e-6 * planes

    counts = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
    fit = fit_path(samples(law, counts, noise=0.003))
    assert [(piece.first, piece.last) for piece in fit.curve.pieces] == [(1, 8), (10, 32)]
    below, above = (Drivers(n, 8 * n, distinct("uniform", n)) for n in (8, 10))
    assert fit.estimate(below).seconds == pytest.approx(law(8, 0, 64), rel=0.01)
    assert fit.estimate(above).seconds == pytest.approx(law(10, above.distinct, 80), rel=0.02)
    between = fit.estimate(Drivers(9, 72, distinct("uniform", 9)))
    assert between.low < law(10, distinct("uniform", 9), 72)
    assert between.high > 20e-6 + 1.1e-6 * 72


def test_no_two_pieces_where_one_law_holds() -> None:
    counts = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
    for seed in range(3):
        fit = fit_path(samples(lambda n, u, s: 20e-6 + 0.6e-6 * u, counts, noise=0.02, seed=seed))
        assert len(fit.curve.pieces) == 1
        assert not fit.curve.nodes


def test_leftovers_carry_a_bump_that_no_law_has() -> None:
    def law(tokens: int, planes: float, slots: float) -> float:
        return (20e-6 + 0.6e-6 * planes) * (1 + 0.15 * math.sin(1.5 * math.log2(tokens)))

    counts = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
    fit = fit_path(samples(law, counts, noise=0.003))
    assert fit.curve.nodes
    assert fit.form.endswith("* leftovers")
    assert fit.holdout.mean < 0.02
    assert Fit.from_dict(fit.to_dict()) == fit


def test_band_covers_new_noise() -> None:
    """Statistical, fixed seeds: 24 fits, six new points each between the fitted counts, 90 % wanted."""
    tokens = np.repeat(np.array(COUNTS, dtype=float), 2)
    planes = np.array([distinct(("uniform", "balanced")[i % 2], int(n)) for i, n in enumerate(tokens)])
    points = np.stack([np.ones(20), planes, 8 * tokens, 0 * tokens], axis=1)
    new = np.array([5.0, 7, 10, 14, 20, 28])
    seen = np.array([distinct("uniform", int(n)) for n in new])
    fresh = np.stack([np.ones(6), seen, 8 * new, 0 * new], axis=1)
    inside = 0
    for seed in range(24):
        rng = np.random.default_rng(seed)
        seconds = (20e-6 + 1.5e-6 * planes) * np.exp(0.03 * rng.standard_normal(20))
        table = Table(tokens, points, seconds)
        choice = choose(table)
        low, high = band_of(table, choice.residuals)
        truth = (20e-6 + 1.5e-6 * seen) * np.exp(0.03 * rng.standard_normal(6))
        off = truth / choice.curve.seconds(new, fresh) - 1
        inside += int(((off >= low) & (off <= high)).sum())
    assert 0.80 <= inside / (24 * 6) <= 0.98


def test_outside_the_range_is_refused_or_labelled() -> None:
    fit = fit_path(samples(lambda n, u, s: 30e-6 + 1.9e-6 * u, noise=0.01))
    with pytest.raises(MoeplanError, match=r"path gather: tokens 64 \(valid 1\.\.32\)"):
        fit.estimate(Drivers(64, 512, 126))
    assert fit.estimate(Drivers(64, 512, 126), extrapolate=True).source == "extrapolated"
    alone = fit_path(
        samples(lambda n, u, s: 30e-6 + 1.9e-6 * u, routings=("uniform", "disjoint"), counts=(4, 8, 12, 16))
    )
    with pytest.raises(MoeplanError, match=r"distinct 8 \(valid 29.1"):
        alone.estimate(Drivers(8, 64, 8))


def test_cache_resident_points_stay_out() -> None:
    arms = samples(lambda n, u, s: 30e-6 + 1.9e-6 * u, counts=(1, 2, 4, 8, 16))
    cached = [
        replace(one, arm=one.arm + "c", seed=1, cache_resident=True, long_s=tuple(t / 2 for t in one.long_s))
        for one in arms
        if one.tokens == 1
    ]
    fit = fit_path(arms + cached)
    assert (fit.cache_resident, fit.n) == (len(cached), len(arms))
    assert coefficients(fit)[1] == pytest.approx(1.9e-6, rel=1e-3)
    only = fit_path([replace(one, cache_resident=True) for one in arms])
    assert (only.cache_resident, only.n) == (0, len(arms))
    assert "cache" in only.warnings[0]


def test_impossible_bandwidth_is_a_warning() -> None:
    plane = shape().plane_bytes
    arms = samples(lambda n, u, s: 1e-6 + u * plane / 6e12)
    assert any("cache" in text and "GB/s" in text for text in fit_path(arms, 4.8e12).warnings)
    assert not fit_path(arms, 7e12).warnings


def test_constant_path_is_a_constant_and_reads_nothing() -> None:
    fit = fit_path(samples(lambda n, u, s: 5e-6, noise=0.1, seed=2), 1e12)
    assert (fit.form, fit.drivers, fit.warnings) == ("a", (), ())
    assert coefficients(fit)[0] == pytest.approx(5e-6, rel=0.1)


def test_regime_that_was_not_told_apart_is_said() -> None:
    fit = fit_path(samples(lambda n, u, s: 1e-6 + 1e-6 * s, counts=(1, 2, 4, 8), routings=("disjoint",)))
    assert any("not identified" in text for text in fit.warnings)


def test_repeat_spread_is_the_least_band() -> None:
    wobble = (0.9, 0.95, 1.0, 1.05, 1.1)
    arms = [sample("gather", n, "uniform", 10e-6 + 1e-6 * n, wobble=wobble) for n in (1, 2, 4, 8, 16)]
    fit = fit_path(arms)
    assert fit.spread > 0.04
    assert fit.band[0] <= -fit.spread
    assert fit.band[1] >= fit.spread


def test_what_cannot_be_fitted_is_said() -> None:
    with pytest.raises(MoeplanError, match="2 token counts"):
        fit_path(samples(lambda n, u, s: 1e-6, counts=(1, 2)))
    with pytest.raises(MoeplanError, match="one path and one shape"):
        fit_path([sample("gather", 1, "uniform", 1e-6), sample("fused", 1, "uniform", 1e-6)])
    with pytest.raises(MoeplanError, match="not positive"):
        fit_path([sample("gather", n, "uniform", -1e-6) for n in (1, 2, 4)])


def test_blocks_follow_the_path() -> None:
    assert drivers_of(sample("grouped:32", 4, "uniform", 1e-6, blocks={16: 9.0, 32: 7.0})).blocks == 7
    assert drivers_of(sample("fused", 4, "uniform", 1e-6, blocks={16: 9.0})).blocks == 0
    assert drivers_of(sample("my_kernel", 4, "uniform", 1e-6, blocks={16: 9.0})).blocks == 0


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_form_recovers_itself(form: Form) -> None:
    rng = np.random.default_rng(0)
    points = np.stack([np.ones(60), *rng.uniform(1, 100, (3, 60))], axis=1)
    wanted = [2.0] + [0.5 if name in form.drivers else 0.0 for name in ("distinct", "slots", "blocks")]
    floor = 60.0 * 1.06**2 if form.host else 0.0
    truth = Law(form, tuple(wanted), 3.0 if form.smooth else 1.0, floor)  # type: ignore[arg-type]
    found = solve(form, points, truth.seconds(points))
    assert np.allclose(found.seconds(points), truth.seconds(points), rtol=2e-3)
    assert found.power == truth.power


def test_host_floor_is_found() -> None:
    counts = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
    fit = fit_path(samples(lambda n, u, s: max(120e-6, 30e-6 + 2e-6 * s), counts, noise=0.003))
    law = fit.curve.pieces[0].law
    assert law.form == Form(("slots",), host=True)
    assert law.floor == pytest.approx(120e-6, rel=0.03)
    assert law.coefficients[2] == pytest.approx(2e-6, rel=0.01)
    assert law.coefficients[0] == pytest.approx(30e-6, rel=0.05)


def noisy(tokens: int, factor: float) -> list[Sample]:
    """Five rounds that scatter by 12 % around `factor` times the law, or by 0.4 % around the law."""
    wide = (0.82, 0.9, 1.0, 1.1, 1.18) if factor != 1 else (0.994, 0.997, 1.0, 1.003, 1.006)
    wobble = tuple(factor * one for one in wide)
    return [sample("gather", tokens, r, 20e-6 + 2e-6 * 8 * tokens, wobble=wobble) for r in ("uniform", "identical")]


def test_noisy_counts_weigh_less_and_get_a_wider_band() -> None:
    loud, quiet = {1: 1.2, 2: 0.85, 3: 1.1}, (4, 6, 8, 12, 16, 24, 32, 64)
    arms = [one for tokens, factor in loud.items() for one in noisy(tokens, factor)]
    arms += [one for tokens in quiet for one in noisy(tokens, 1.0)]
    fit = fit_path(arms)
    assert fit.form == "a + c*slots"
    assert coefficients(fit)[2] == pytest.approx(2e-6, rel=0.01)
    assert coefficients(fit)[0] == pytest.approx(20e-6, rel=0.06)
    (low, high), (least, most) = fit.band_at(2), fit.band_at(24)
    assert high - low > 2 * (most - least)
    between = fit.band_at(5)
    assert between == pytest.approx(fit.band_at(4), rel=0.2)


def measured_rows(system: str, version: str, dtype: str, model: str) -> list[dict[str, str]]:
    path = KERNELS / "aiconfigurator.moe_perf.h100-h200-b200.tp1ep1.le1024tok.csv.gz"
    if not path.is_file():
        pytest.skip("the extract of the aiconfigurator kernel database is not here")
    wanted = (system, "VLLM", version, dtype, model, "balanced")
    with gzip.open(path, "rt", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (
                row["system"],
                row["framework"],
                row["version"],
                row["moe_dtype"],
                row["model"],
                row["distribution"],
            )
            == wanted
        ]
    return [row for row in rows if int(row["num_tokens"]) <= 128 and row["kernel_source"] == "vllm_fused_moe"]


@pytest.mark.parametrize("version", ["0.18.0", "0.22.0"])
def test_triton_on_h200_follows_distinct_experts(version: str) -> None:
    rows = measured_rows("h200_sxm", version, "bfloat16", "Qwen3-30B-A3B")
    assert len(rows) >= 8
    arms = [
        sample("fused", int(r["num_tokens"]), "balanced", float(r["latency"]) / 1e3, shape=shape("bf16")) for r in rows
    ]
    fit = fit_path(arms)
    errors = dict(fit.candidates)
    assert "distinct" in fit.drivers
    assert errors["a + c*slots"] > 4 * errors["a + b*distinct"]
    implied = shape("bf16").plane_bytes / coefficients(fit)[1]
    assert 3e12 < implied < 4.8e12  # HBM3e of an H200: 4.8 TB/s at most (NVIDIA data sheet)
