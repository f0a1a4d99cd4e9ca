import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import MoeplanError
from moeplan.kernels.reference import activate, gelu_tanh, moe_layer, relative_rms, silu


def _draw(seed, tokens, experts, top_k, gated=True):
    rng = np.random.default_rng(seed)
    hidden, inner = 6, 5
    x = rng.standard_normal((tokens, hidden))
    ids = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)], np.int32)
    gate = rng.standard_normal((experts, inner, hidden)) if gated else None
    up, down = rng.standard_normal((experts, inner, hidden)), rng.standard_normal((experts, hidden, inner))
    return x, ids, rng.random((tokens, top_k)), (gate, up, down)


def _everywhere(x, ids, scores, planes, activation):
    """All experts on all tokens, then a dense routing matrix: another formulation of the same layer."""
    gate, up, down = planes
    weight = np.zeros((len(x), len(up)))
    for t, s in np.ndindex(ids.shape):
        if ids[t, s] >= 0:
            weight[t, ids[t, s]] += scores[t, s]
    u = np.einsum("th,eih->tei", x, up)
    g = None if gate is None else np.einsum("th,eih->tei", x, gate)
    act = {
        "swiglu": lambda: g / (1 + np.exp(-g)) * u,
        "geglu": lambda: 0.5 * g * (1 + np.tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u,
        "relu2": lambda: np.where(u > 0, u * u, 0.0),
    }[activation]()
    return np.einsum("te,tei,ehi->th", weight, act, down)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 7), st.data())
def test_layer_equals_all_experts_with_a_routing_matrix(seed, tokens, experts, data):
    top_k = data.draw(st.integers(1, experts))
    name = data.draw(st.sampled_from(["swiglu", "geglu", "relu2"]))
    x, ids, scores, (gate, up, down) = _draw(seed, tokens, experts, top_k, gated=name != "relu2")
    ids[np.random.default_rng(seed).random(ids.shape) < 0.2] = -1
    out = moe_layer(x, ids, scores, lambda e: (None if gate is None else gate[e], up[e], down[e]), name)
    np.testing.assert_allclose(out, _everywhere(x, ids, scores, (gate, up, down), name), rtol=1e-10, atol=1e-10)


def test_only_chosen_experts_are_touched_and_padding_adds_nothing():
    x, ids, scores, (gate, up, down) = _draw(1, 3, 4, 2)
    ids[:] = [[0, 2], [2, -1], [-1, -1]]
    asked = []
    out = moe_layer(x, ids, scores, lambda e: (asked.append(e), (gate[e], up[e], down[e]))[1], "swiglu")
    assert asked == [0, 2]
    assert not out[2].any()
    assert out[1].any()


def test_golden_values():
    one = np.array([1.0])
    assert silu(one)[0] == pytest.approx(0.7310585786300049, rel=1e-14)
    assert gelu_tanh(one)[0] == pytest.approx(0.8411919906082768, rel=1e-14)  # the exact GELU would be 0.84134474
    assert silu(np.array([-1e4]))[0] == 0.0
    planes = (np.array([[1.0, 0.0]]), np.array([[0.0, 2.0]]), np.array([[3.0], [-1.0]]))
    out = moe_layer([[1.0, 1.0]], [[0]], [[0.5]], lambda e: planes, "swiglu")
    np.testing.assert_allclose(out, [[0.5 * 0.7310585786300049 * 2 * 3, -0.7310585786300049]])


def test_unknown_activation_is_refused():
    with pytest.raises(MoeplanError, match="mish"):
        activate(np.ones(1), np.ones(1), "mish")
    with pytest.raises(MoeplanError, match="swiglu"):
        activate(None, np.ones(1), "swiglu")


def test_relative_rms():
    assert relative_rms([3.0, 4.4], [3.0, 4.0]) == pytest.approx(0.08)
    assert relative_rms([np.nan, 4.0], [3.0, 4.0]) == float("inf")
    assert relative_rms([[1.0]], [1.0]) == float("inf")
    assert relative_rms([0.0], [0.0]) == 0.0
