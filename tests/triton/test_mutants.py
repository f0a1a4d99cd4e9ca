"""Wrong kernels must fail the parity gate."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

from moeplan.kernels import triton_fused  # noqa: E402
from moeplan.kernels.reference import relative_rms  # noqa: E402
from tests.triton.layers import Case, bound, shape_of  # noqa: E402


@pytest.mark.parametrize("form", ["affine4-g64", "bf16"])
def test_each_experts_part_rounded_to_bf16(device, form):
    case = Case(shape_of(form, top_k=4), 6)
    early = case.run(0, device, between=lambda s: s.partial.copy_(s.partial.bfloat16().float()))
    assert relative_rms(early, case.wanted()) > 10 * bound(case.shape, 0)


@pytest.mark.parametrize("rows", [0, 16])
def test_expert_off_by_one(device, rows):
    case = Case(shape_of(), 16)
    wrong = (case.ids + 1) % case.shape.experts
    assert relative_rms(case.run(rows, device, ids=wrong), case.wanted()) > 0.5


@pytest.mark.parametrize("rows", [0, 16])
def test_scores_of_the_wrong_slot(device, rows):
    case = Case(shape_of(), 5)
    wanted = case.wanted()
    case.scores = case.scores[:, ::-1].copy()
    assert relative_rms(case.run(rows, device), wanted) > 0.1


@triton.jit
def careless(pointers, ok, EVEN: tl.constexpr):  # noqa: N803
    return tl.load(pointers)


@pytest.mark.filterwarnings("ignore")  # what lies beyond the tail may be infinite
@pytest.mark.parametrize(("form", "sizes"), [("affine4-g64", (192, 320)), ("bf16", (72, 40))])
def test_missing_tail_mask(device, form, sizes, monkeypatch):
    if device != "cpu":
        pytest.skip("reads out of bounds: only under the interpreter")
    case = Case(shape_of(form, sizes=sizes), 3, ids=np.array([[0, 1], [2, 0], [1, 2]]))
    assert relative_rms(case.run(0, device), case.wanted()) < bound(case.shape, 0)
    monkeypatch.setattr(triton_fused, "load_tile", careless)
    assert relative_rms(case.run(0, device), case.wanted()) > 10 * bound(case.shape, 0)
