"""mlx-lm's expert paths: parity with the float64 twin, the primitives that really run, weights, declines."""

from dataclasses import replace

import numpy as np
import pytest

from moeplan.kernels.protocol import Arm, FloatArray, IntArray
from moeplan.runners.arms import draw
from moeplan.runners.parity import fresh_inputs, parity
from moeplan.runners.spec import PARITY_BOUND, make_arm
from moeplan.store import Store
from moeplan.traffic.routing import parse_routing
from moeplan.traffic.shape import LayerShape, WeightFormat

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

from moeplan.kernels.mlx_paths import KERNELS, ExpertPath, State  # noqa: E402  needs MLX's presence
from moeplan.kernels.mlx_weights import weights_of  # noqa: E402


def shape(form: str = "affine4-g64", down: str = "", hidden: int = 128, expert_hidden: int = 64) -> LayerShape:
    up = WeightFormat.parse(form)
    return LayerShape(hidden, expert_hidden, 8, 3, up, up, WeightFormat.parse(down or form))


def prepared(path: str, size: LayerShape, tokens: int, seed: int = 0) -> tuple[ExpertPath, State, Arm, IntArray]:
    arm = make_arm(path, size, tokens, "uniform", seed, (1, 3))
    ids = draw(arm, parse_routing("uniform", Store()))
    kernel = KERNELS[path]()
    return kernel, kernel.prepare(arm, ids), arm, ids


@pytest.mark.parametrize("path", ["gather", "gather_sorted"])
@pytest.mark.parametrize("tokens", [1, 7, 33])
@pytest.mark.parametrize(
    "size", [shape(), shape("affine8-g32"), shape("affine4-g64", "affine6-g64"), shape("f32", hidden=96)]
)
def test_parity_with_the_reference(path: str, tokens: int, size: LayerShape) -> None:
    kernel, state, arm, ids = prepared(path, size, tokens)
    assert kernel.declines(size, tokens) is None
    assert parity(kernel, state, arm, ids[0]) < 1e-5  # float32 sums of 128 terms; bf16 would stand at 1e-3


@pytest.mark.parametrize("path", ["gather", "gather_sorted"])
def test_padding_adds_nothing_and_any_duplicate_counts_twice(path: str) -> None:
    kernel, state, arm, ids = prepared(path, shape(), 7)
    holes = ids[0].copy()
    holes[2, 1] = holes[6, :] = -1
    holes[4, 0] = holes[4, 1]
    assert parity(kernel, state, arm, holes) < 1e-5
    x, scores = fresh_inputs(arm, holes)
    assert not kernel.layer(state, x, holes, scores)[6].any()


def test_parity_sees_a_kernel_that_is_two_percent_off() -> None:
    class Off(ExpertPath):
        def layer(self, state: State, x: FloatArray, ids: IntArray, scores: FloatArray) -> FloatArray:
            return np.asarray(super().layer(state, x, ids, scores) * 1.02, np.float32)

    _, state, arm, ids = prepared("gather", shape(), 4)
    assert parity(Off("gather", False), state, arm, ids[0]) > PARITY_BOUND


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_both_paths_agree(tokens: int) -> None:
    kernel, state, arm, ids = prepared("gather", shape(), tokens)
    x, scores = fresh_inputs(arm, ids[0])
    one = kernel.layer(state, x, ids[0], scores)
    other = KERNELS["gather_sorted"]().layer(state, x, ids[0], scores)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_signature_counts_what_is_in_the_graph() -> None:
    signs = {path: kernel.signature(state) for path in KERNELS for kernel, state, _, _ in [prepared(path, shape(), 2)]}
    assert "GatherQMM=3" in signs["gather"]
    assert "ArgSort" not in signs["gather"]
    assert "sorted_indices=False" in signs["gather"]
    assert "GatherQMM=3" in signs["gather_sorted"]
    assert "ArgSort=2" in signs["gather_sorted"]
    assert "sorted_indices=True" in signs["gather_sorted"]
    assert "Gather" not in signs["link"]
    assert "Add=1" in signs["link"]
    assert "GatherMM=3" in prepared("gather", shape("f32"), 2)[0].signature(prepared("gather", shape("f32"), 2)[1])


def test_a_chain_depends_on_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, state, _, _ = prepared("gather", shape(), 2)
    seen: list[int] = []
    layer = kernel._layer

    def spy(weights: object, index: int, *rest: object) -> object:
        seen.append(index)
        return layer(weights, index, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel, "_layer", spy)
    assert kernel.run(state, 3) > 0
    assert seen == [0, 1, 2]


def test_weights_are_reproducible_and_scaled_by_the_fan_in() -> None:
    size = shape(hidden=256, expert_hidden=128)
    gate, up, down = weights_of(size, 1).plane(3)
    assert (gate.shape, up.shape, down.shape) == ((128, 256), (128, 256), (256, 128))
    assert not np.array_equal(gate, up)
    for matrix in (gate, up, down):
        assert abs(float(matrix.mean())) < 0.02 * matrix.shape[1] ** -0.5 * 5
        assert float(matrix.std()) == pytest.approx(matrix.shape[1] ** -0.5, rel=0.1)
    other = replace(size, activation="geglu")
    np.testing.assert_array_equal(weights_of(other, 2).plane(3)[0], gate)
    first, second = weights_of(other, 2).layers
    assert not mx.array_equal(first.gate[0], second.gate[0])


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (replace(shape(), activation="geglu"), "activation geglu"),
        (replace(shape(), gate=None), "gate"),
        (replace(shape(), gate=WeightFormat.parse("affine8-g64")), "differs from up"),
        (shape("mxfp4"), "weight format mxfp4"),
        (shape("affine4-g64", hidden=96), "96 columns"),
        (shape("bf16"), "bf16"),
    ],
)
def test_declines_say_why(size: LayerShape, reason: str) -> None:
    if reason == "bf16" and mx.default_device().type == mx.gpu:
        pytest.skip("bf16 weights run on a GPU")
    said = KERNELS["gather"]().declines(size, 4)
    assert said is not None
    assert reason in said


def test_config_hash_tells_paths_apart_and_stays() -> None:
    hashes = {path: KERNELS[path]().config_hash() for path in KERNELS}
    assert len(set(hashes.values())) == len(KERNELS)
    assert hashes["gather"] == KERNELS["gather"]().config_hash()
