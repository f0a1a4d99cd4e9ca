import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import MoeplanError
from moeplan.kernels.formats import code_std, dequantize, from_bf16, pack, random_planes, to_bf16, unpack
from moeplan.traffic.shape import LayerShape, WeightFormat

AFFINE4, AFFINE8, BF16 = (WeightFormat.parse(n) for n in ("affine4-g64", "affine8-g64", "bf16"))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([4, 8]), st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_unpack_inverts_pack(bits, rows, words, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, words * 32 // bits))
    assert (unpack(pack(codes, bits), bits) == codes).all()


def test_golden_word():
    assert pack([[1, 2, 3, 4, 5, 6, 7, 8]], 4).tolist() == [[0x87654321]]
    assert pack([[1, 2, 3, 255]], 8).tolist() == [[0xFF030201]]


@pytest.mark.parametrize(("codes", "bits"), [([[16] * 8], 4), ([[-1] * 8], 4), ([[1] * 7], 4), ([[1] * 8], 6)])
def test_bad_codes_are_refused(codes, bits):
    with pytest.raises(MoeplanError, match="affine packing"):
        pack(codes, bits)


def test_bf16_is_round_to_nearest_even():
    golden = {1.0: 0x3F80, 1.00390625: 0x3F80, 1.01171875: 0x3F82, -2.5: 0xC020, 3.4e38: 0x7F80, np.inf: 0x7F80}
    assert [int(b) for b in to_bf16(list(golden))] == list(golden.values())
    assert np.isnan(from_bf16(to_bf16([np.nan])))[0]


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120))
def test_bf16_takes_the_nearest_neighbour(value):
    bits = int(to_bf16([value])[0])
    here = abs(float(from_bf16(np.array([bits]))[0]) - value)
    others = [b for b in (bits - 1, bits + 1) if 0 <= b < 1 << 16 and (b & 0x7FFF) < 0x7F80]
    assert all(here <= abs(float(from_bf16(np.array([b]))[0]) - value) for b in others)


@pytest.mark.parametrize("bits", [4, 8])
def test_same_layout_as_mlx(bits):
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    rng = np.random.default_rng(bits)
    weights = rng.standard_normal((5, 192)).astype(np.float32)
    words, scales, biases = mx.quantize(mx.array(weights), group_size=64, bits=bits)
    ours = dequantize(np.array(words), np.array(scales), np.array(biases), bits, 64)
    theirs = np.array(mx.dequantize(words, scales, biases, group_size=64, bits=bits))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert np.abs(ours - weights).max() < 1.01 * np.abs(np.array(scales)).max()
    assert (pack(unpack(np.array(words), bits), bits) == np.array(words)).all()


@pytest.mark.parametrize("form", [AFFINE4, AFFINE8, BF16])
def test_random_planes_have_the_stated_distribution(form):
    shape = LayerShape(256, 128, 3, 2, form, form, form)
    planes = random_planes(shape, 5)
    for matrix, fan_in in ((planes.gate, 256), (planes.up, 256), (planes.down, 128)):
        dense = matrix.dense(1)
        assert dense.std() * np.sqrt(fan_in) == pytest.approx(1.0, rel=0.05)
        assert abs(dense.mean()) * np.sqrt(fan_in) < 0.05
    assert planes.gate.dense(0).shape == (128, 256)
    assert planes.down.dense(0).shape == (256, 128)
    again, other = random_planes(shape, 5), random_planes(shape, 6)
    assert (again.up.weight == planes.up.weight).all()
    assert (other.up.weight != planes.up.weight).any()


def test_code_std():
    assert code_std(4) == pytest.approx(np.arange(16).std())


def test_unsupported_formats_are_refused():
    fp4 = WeightFormat.parse("mxfp4")
    with pytest.raises(MoeplanError, match="mxfp4"):
        random_planes(LayerShape(64, 64, 2, 1, fp4, fp4, fp4), 0)
    with pytest.raises(MoeplanError, match="96 inputs"):
        random_planes(LayerShape(96, 64, 2, 1, AFFINE4, AFFINE4, AFFINE4), 0)
    with pytest.raises(MoeplanError, match="groups"):
        dequantize(np.zeros((1, 8), np.uint32), np.ones((1, 2)), np.ones((1, 2)), 4, 64)
