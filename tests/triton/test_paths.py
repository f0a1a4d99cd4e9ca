import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from moeplan.errors import MoeplanError  # noqa: E402
from moeplan.kernels import triton_paths  # noqa: E402
from moeplan.kernels.formats import code_std, from_bf16, to_bf16  # noqa: E402
from moeplan.kernels.protocol import Arm  # noqa: E402
from moeplan.kernels.reference import moe_layer, relative_rms  # noqa: E402
from moeplan.kernels.triton_config import declines  # noqa: E402
from moeplan.kernels.triton_launch import align  # noqa: E402
from moeplan.kernels.triton_layer import Call, make_scratch, most_blocks  # noqa: E402
from moeplan.traffic.load import ExpertLoad  # noqa: E402
from tests.triton.layers import FINAL, bound, shape_of  # noqa: E402


def _arm(name, shape, tokens, chain=(1, 3)):
    rng = np.random.default_rng(3)
    rows = [[rng.permutation(shape.experts)[: shape.top_k] for _ in range(tokens)] for _ in range(chain[1])]
    return Arm("arm-1", name, shape, tokens, "uniform", 1, chain), np.array(rows, np.int32)


@pytest.mark.parametrize("form", ["affine4-g64", "bf16"])
@pytest.mark.parametrize("name", ["fused", "grouped:16"])
def test_adapter_runs_chains_and_answers_parity(device, name, form):
    kernel, shape = triton_paths.KERNELS[name](), shape_of(form)
    assert kernel.name == name
    arm, ids = _arm(name, shape, 3)
    state = kernel.prepare(arm, ids)
    for layers in arm.chain:
        seconds = kernel.run(state, layers)
        assert (seconds is None) == (device == "cpu")
    assert torch.isfinite(state.buffers[0]).all()
    x = from_bf16(to_bf16(np.random.default_rng(0).standard_normal((3, shape.hidden))))
    scores = np.full((3, 2), 0.5, np.float32)
    wanted = moe_layer(x, ids[0], scores, lambda e: kernel.planes(state, e), shape.activation)
    rows = 16 if name != "fused" else 0
    assert relative_rms(kernel.layer(state, x, ids[0], scores), wanted) < FINAL + bound(shape, rows)
    signature = kernel.signature(state)
    assert signature.startswith(f"{name} rows={rows or 1} launches={4 if rows else 3} kernels=")
    assert ("grouped_gate_up" in signature) == bool(rows)


def test_chain_is_the_layers_one_after_the_other(device):
    kernel = triton_paths.KERNELS["fused"]()
    arm, ids = _arm("fused", shape_of("bf16"), 2)
    state = kernel.prepare(arm, ids)
    kernel.run(state, 3)
    x = base = state.x0.float().cpu().numpy()
    for layer in range(3):
        planes = state.experts[layer].dense
        part = moe_layer(x, ids[layer], state.scores[layer].cpu().numpy(), planes, "swiglu")
        x = from_bf16(to_bf16(base + part))
    assert relative_rms(state.buffers[0].float().cpu().numpy(), x) < 4 * FINAL
    assert np.allclose(state.scores.sum(-1).cpu(), 1.0, atol=1e-5)


def test_weights_are_kept_between_arms_and_have_the_stated_spread(device):
    kernel = triton_paths.KERNELS["fused"]()
    first, second = (kernel.prepare(*_arm("fused", shape_of(), tokens)) for tokens in (1, 2))
    assert first.experts is second.experts
    dense = np.concatenate([first.experts[0].up.dense(e) for e in range(8)])
    assert dense.std() * 128**0.5 == pytest.approx(1.0, rel=0.05)
    assert abs(dense.mean()) * 128**0.5 < 0.05
    assert code_std(4) == pytest.approx(4.61, abs=0.01)
    assert not np.array_equal(first.experts[0].up.dense(0), first.experts[1].up.dense(0))


def test_hashes_and_names():
    hashes = {name: make().config_hash() for name, make in triton_paths.KERNELS.items()}
    assert set(hashes) == {"fused", "grouped:16", "grouped:32", "grouped:64", "grouped:128"}
    assert len(set(hashes.values())) == 5
    with pytest.raises(MoeplanError, match="grouped:48"):
        triton_paths.GroupedKernel(48)


@pytest.mark.parametrize(
    ("shape", "tokens", "reason"),
    [
        (shape_of(activation="relu2"), 1, "relu2"),
        (shape_of("affine8-g64"), 1, "affine8-g64"),
        (shape_of("mxfp4"), 1, "mxfp4"),
        (shape_of(sizes=(96, 64)), 1, "multiples of the group"),
        (shape_of("bf16", sizes=(60, 64)), 1, "multiples of 8"),
        (shape_of(experts=4, top_k=5), 1, "top-5 of 4"),
        (shape_of(), 40000, "65535"),
        (shape_of(), 0, "0 tokens"),
    ],
)
def test_declines_with_a_reason(shape, tokens, reason):
    assert reason in (declines(shape, tokens) or "")
    assert declines(shape_of(), 32767) is None
    arm, ids = _arm("fused", shape_of(), 1)
    with pytest.raises(MoeplanError, match="declines"):
        triton_paths.FusedKernel().prepare(Arm("a", "fused", shape, tokens, "uniform", 0, arm.chain), ids)


@pytest.mark.parametrize(("experts", "top_k", "tokens", "rows"), [(8, 2, 1, 16), (60, 6, 33, 16), (8, 8, 70, 32)])
def test_block_table_is_the_stable_sort(device, experts, top_k, tokens, rows):
    shape = shape_of("bf16", experts, top_k)
    rng = np.random.default_rng(tokens)
    ids = np.argsort(rng.random((tokens, experts)))[:, :top_k].astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    x = torch.zeros((tokens, shape.hidden), device=device).bfloat16()
    call = Call(x, torch.from_numpy(ids).to(device), torch.zeros(ids.shape, device=device), x)
    scratch = make_scratch(shape, tokens, rows, device)
    align(shape, call, scratch, rows)
    load = ExpertLoad.from_ids(ids, experts)
    blocks = -(-np.asarray(load.rows) // rows)
    assert int(scratch.count) == blocks.sum() <= most_blocks(ids.size, experts, rows)
    used = scratch.block_expert.cpu().numpy()[: blocks.sum()]
    assert (used == np.repeat(np.arange(experts), blocks)).all()
    order = scratch.order.cpu().numpy().reshape(-1, rows)[: blocks.sum()]
    for expert in range(experts):
        mine = order[used == expert].ravel()
        slots = np.flatnonzero(ids.ravel() == expert)
        assert (mine[: slots.size] == slots).all()
        assert (mine[slots.size :] == -1).all()


def test_most_blocks_is_reached_and_never_passed():
    rng = np.random.default_rng(0)
    for _ in range(300):
        experts, slots, rows = rng.integers(1, 9), int(rng.integers(1, 80)), int(rng.choice([2, 4, 16]))
        counts = np.bincount(rng.integers(0, experts, slots), minlength=experts)
        assert (-(-counts // rows)).sum() <= most_blocks(slots, int(experts), rows)
    assert most_blocks(3, 8, 16) == 3
    assert most_blocks(8 + 16, 8, 16) == 9  # seven experts with one row, one with seventeen
