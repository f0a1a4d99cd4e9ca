"""The token count never specialises a compile: one key per kernel over 1..256 tokens."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")


def test_one_key_per_kernel():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton.keys"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("loose") > 1
    assert found.pop("align") == 2  # one a weight format: only 4-bit weights want x by nibble planes
    assert found.pop("combine") == 1
    assert len(found) == 8
    assert set(found.values()) == {1}


@pytest.mark.gpu
def test_device_cache_does_not_grow():
    import torch

    from moeplan.kernels import triton_common, triton_grouped
    from moeplan.kernels.triton_interpret import INTERPRETED
    from tests.triton.layers import Case, shape_of

    if INTERPRETED or not torch.cuda.is_available():
        pytest.skip("no CUDA device, or the interpreter is on: it compiles nothing")
    shape = shape_of(sizes=(64, 64))
    kernels = triton_common.combine, triton_grouped.align, triton_grouped.grouped_gate_up_affine4

    def cached():
        return [len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels]

    Case(shape, 1).run(16, "cuda")
    before = cached()
    for n in range(1, 257):
        Case(shape, n).run(16, "cuda")
    assert cached() == before
