import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from moeplan.kernels.reference import relative_rms  # noqa: E402
from tests.triton.layers import FINAL, Case, bound, shape_of  # noqa: E402

ROWS = (0, 16)
SIZES = [(8, 1, 1), (8, 1, 7), (60, 6, 2), (60, 6, 9), (8, 8, 3), (8, 8, 8), (60, 1, 33), (8, 1, 64)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", ["affine4-g64", "bf16"])
@pytest.mark.parametrize(("experts", "top_k", "tokens"), SIZES)
def test_parity(device, experts, top_k, tokens, form, rows):
    activation = "geglu" if tokens % 2 else "swiglu"
    shape = shape_of(form, experts, top_k, activation=activation)
    case = Case(shape, tokens, seed=tokens)
    assert relative_rms(case.run(rows, device), case.wanted()) < bound(shape, rows)


@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("form", ["affine4-g64", "bf16"])
def test_parity_of_larger_blocks(device, rows, form):
    ids = [[0, 1]] * 70 + [[2, 3], [-1, 0], [7, 1]]  # two experts with more rows than 64, some with one, some with none
    shape = shape_of(form)
    case = Case(shape, len(ids), ids=ids)
    assert relative_rms(case.run(rows, device), case.wanted()) < bound(shape, rows)


@pytest.mark.parametrize("rows", ROWS)
def test_sizes_that_fill_no_tile(device, rows):
    shape = shape_of(sizes=(320, 64), top_k=3)
    case = Case(shape, 5)
    assert relative_rms(case.run(rows, device), case.wanted()) < bound(shape, rows)
    plain = Case(shape_of("bf16", sizes=(72, 40), top_k=3), 5)
    assert relative_rms(plain.run(rows, device), plain.wanted()) < bound(plain.shape, rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", ["affine4-g64", "bf16"])
def test_padding_ids_add_nothing(device, rows, form):
    ids = [[0, -1], [-1, -1], [5, 0], [-1, 3]]
    case = Case(shape_of(form), 4, ids=ids)
    out = case.run(rows, device)
    assert not out[1].any()
    assert relative_rms(out, case.wanted()) < bound(case.shape, rows)


@pytest.mark.parametrize("rows", ROWS)
def test_identical_and_disjoint_cohorts(device, rows):
    for ids in ([[4, 6]] * 17, [[2 * t, 2 * t + 1] for t in range(4)]):
        case = Case(shape_of(), len(ids), ids=ids)
        assert relative_rms(case.run(rows, device), case.wanted()) < bound(case.shape, rows)


@pytest.mark.parametrize("rows", ROWS)
def test_residual_and_one_final_rounding(device, rows):
    case = Case(shape_of("bf16"), 3)
    plain = case.run(rows, device)
    residual = torch.randn((3, 128), generator=torch.Generator().manual_seed(1)).bfloat16()
    added = case.run(rows, device, residual=residual.to(device))
    np.testing.assert_allclose(added, plain + residual.float().numpy(), rtol=1e-5, atol=1e-5)
    rounded = case.run(rows, device, kind=torch.bfloat16)
    assert relative_rms(rounded, plain) < FINAL


def test_grouped_repeats_itself_bit_for_bit(device):
    case = Case(shape_of(experts=8, top_k=4), 21)
    assert (case.run(16, device) == case.run(16, device)).all()


@pytest.mark.parametrize("form", ["affine4-g64", "bf16"])
def test_fused_rows_do_not_depend_on_the_batch(device, form):
    case = Case(shape_of(form, top_k=1 if device == "cpu" else 4, sizes=(64, 64)), 64)
    alone = np.concatenate([case.row(t).run(0, device) for t in range(64)])
    counts = range(1, 65) if form == "bf16" or device == "cuda" else (2, 3, 7, 8, 9, 33, 64)
    for n in counts:
        assert (case.row(slice(0, n)).run(0, device) == alone[:n]).all(), n
