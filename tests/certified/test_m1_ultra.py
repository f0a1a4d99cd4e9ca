"""The published M1 Ultra chain: the shipped journal is that table, and what follows from it.

Table: lablup/mlxcel docs/benchmark_results/moe-batched-decode-m1ultra-2026-09-04.md, MLX 0.32.2, milliseconds of a
48-layer chain, Qwen3-30B-A3B 4-bit group 64; (disjoint, identical) experts.
"""

import pytest

from moeplan.cost.calibrate import Calibration, load_calibration
from moeplan.cost.model import Drivers
from moeplan.errors import MoeplanError
from moeplan.store import Store
from moeplan.traffic.shape import LayerShape, WeightFormat

TOKENS = (1, 2, 4, 8)
PUBLISHED = {
    "gather": ((3.07, 3.10), (5.31, 5.29), (9.71, 9.67), (18.72, 18.68)),
    "gather_sorted": ((4.13, 4.09), (5.75, 5.71), (9.31, 9.30), (17.10, 17.00)),
    "fused_per_token": ((3.90, 3.86), (7.45, 7.27), (14.72, 14.64), (29.17, 29.64)),
    "fused": ((3.55, 3.46), (6.03, 6.05), (11.07, 11.08), (20.71, 20.59)),
}
# chain ms = a + b * tokens, fitted elsewhere by relative least squares
PUBLISHED_FITS = {
    "gather": (0.84, 2.23),
    "gather_sorted": (2.25, 1.81),
    "fused_per_token": (0.29, 3.60),
    "fused": (1.08, 2.47),
}


def shape() -> LayerShape:
    four = WeightFormat.parse("affine4-g64")
    return LayerShape(2048, 768, 128, 8, four, four, four)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return load_calibration(Store(), "m1-ultra", "mlx", shape())


def test_journal_is_the_published_table(calibration: Calibration) -> None:
    seen = 0
    for path, rows in PUBLISHED.items():
        for tokens, row in zip(TOKENS, rows, strict=True):
            for routing, chain_ms in zip(("disjoint", "identical"), row, strict=True):
                found = calibration.measured(path, tokens, routing)
                assert found is not None
                assert found.source == "published"
                assert found.seconds * 48e3 == pytest.approx(chain_ms, rel=1e-9)
                assert found.low < found.seconds < found.high
                seen += 1
    assert seen == len(calibration.samples) == 32
    for sample in calibration.samples:
        assert sample.slots == 8 * sample.tokens
        assert sample.distinct == (8 if sample.routing == "identical" else 8 * sample.tokens)


@pytest.mark.parametrize("path", PUBLISHED)
def test_every_path_follows_slots(calibration: Calibration, path: str) -> None:
    fit = calibration.fits[path]
    assert fit.drivers == ("slots",)
    assert fit.form == "a + c*slots"
    constant, _, slots, _ = fit.curve.pieces[0].law.coefficients
    a, b = PUBLISHED_FITS[path]
    assert constant * 48e3 == pytest.approx(a, abs=0.05)
    assert slots * 8 * 48e3 == pytest.approx(b, rel=0.01)
    distinct = dict(fit.candidates)["a + b*distinct"]
    assert distinct > 5 * fit.holdout.mean, "the distinct regime must lose clearly here"


def test_sorting_breaks_even_near_27_slots(calibration: Calibration) -> None:
    def gain(slots: float) -> float:
        work = Drivers(4, slots, slots)
        return calibration.estimate("gather", work).seconds - calibration.estimate("gather_sorted", work).seconds

    low, high = 8.0, 64.0
    assert gain(low) < 0 < gain(high)
    for _ in range(40):
        low, high = ((low + high) / 2, high) if gain((low + high) / 2) < 0 else (low, (low + high) / 2)
    assert low == pytest.approx(27, abs=1)


def test_gain_at_four_tokens_is_inside_the_noise_of_the_table(calibration: Calibration) -> None:
    base = calibration.measured("gather", 4, "disjoint")
    other = calibration.measured("gather_sorted", 4, "disjoint")
    assert base is not None
    assert other is not None
    assert base.seconds / other.seconds - 1 == pytest.approx(0.043, abs=0.002)
    assert base.low / other.high - 1 < 0


def test_outside_the_table_is_refused(calibration: Calibration) -> None:
    with pytest.raises(MoeplanError, match=r"path gather: tokens 16 \(valid 1\.\.8\)"):
        calibration.estimate("gather", Drivers(16, 128, 82))
    far = calibration.estimate("gather", Drivers(16, 128, 82), extrapolate=True)
    near = calibration.estimate("gather", Drivers(8, 64, 64))
    assert (far.source, near.source) == ("extrapolated", "fitted")
    assert far.high / far.seconds > near.high / near.seconds
    assert calibration.measured("gather", 3, "disjoint") is None
