"""Published kernel tables and the affine fits that others derived from them.

Times in microseconds by tokens: 1 Mixtral bf16 TP2 and 2, 3 Qwen3-30B fp8 on an H100 (vllm pull request 24700, before
and after), 4 Qwen3-30B bf16 on an A100-40 (vllm pull request 19049). The tuner's routing is uniform. Derived by
relative least squares on distinct = E (1 - (1 - k/E)^n): constant (us), slope (ns an expert), mean error.
"""

import numpy as np
import pytest

from moeplan.cost.fit import fit_path
from moeplan.cost.forms import Form, solve
from moeplan.cost.points import table_of
from tests.cost_samples import distinct as expected
from tests.cost_samples import sample, shape

COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
TABLES = {
    "mixtral-bf16-h100": (
        (8, 2),
        (144.03, 229.28, 351.10, 434.98, 471.49, 478.27, 487.35, 487.85, 483.14, 494.42, 491.39, 536.77),
        (28.5, 57722, 0.019),
    ),
    "qwen3-30b-fp8-h100": (
        (128, 8),
        (44.54, 59.94, 90.46, 129.77, 185.40, 215.99, 238.37, 257.83, 262.73, 270.98, 273.72),
        (30.7, 1878, 0.015),
    ),
    "qwen3-30b-fp8-h100-pr": (
        (128, 8),
        (40.44, 56.15, 78.10, 118.64, 164.64, 193.48, 210.07, 230.59, 237.26, 244.33, 247.67),
        (28.4, 1673, 0.019),
    ),
    "qwen3-30b-bf16-a100": (
        (128, 8),
        (109.21, 159.81, 268.89, 403.13, 611.19, 730.19, 808.53, 885.97, 917.45, 943.14),
        (55.6, 6818, 0.015),
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_affine_fit_in_distinct_experts(name: str) -> None:
    (experts, top_k), times, (constant_us, slope_ns, error) = TABLES[name]
    arms = [
        sample(
            "fused",
            tokens,
            "uniform",
            time * 1e-6,
            slots=float(top_k * tokens),
            distinct=expected("uniform", tokens, experts, top_k),
            shape=shape("bf16"),
        )
        for tokens, time in zip((*COUNTS, 256), times, strict=False)
    ]
    table = table_of(arms)
    law = solve(Form(("distinct",)), table.points, table.seconds)
    assert law.coefficients[0] * 1e6 == pytest.approx(constant_us, abs=0.05)
    assert law.coefficients[1] * 1e9 == pytest.approx(slope_ns, rel=0.0005)
    off = np.abs(law.seconds(table.points) / table.seconds - 1)
    assert off.mean() == pytest.approx(error, abs=0.0006)
    fit = fit_path(arms)
    errors = dict(fit.candidates)
    assert "distinct" in fit.drivers
    assert errors["a + c*slots"] > 5 * errors["a + b*distinct"], "the distinct regime must win"
    assert fit.holdout.mean <= errors["a + b*distinct"] + 1e-9
