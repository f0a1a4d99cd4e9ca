"""The token count never specialises a compile: one key per kernel over 1..256 tokens."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

# Triton's own key of a launch (argument types, divisibility and ones, constants, options), computed by its binder for
# compute capability 9.0 without a device. `loose` shows that a token count left to itself does make new keys.
KEYS = """
import json, torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from tests.triton.layers import shape_of
from moeplan.kernels.formats import random_planes
from moeplan.kernels.triton_config import fused_tiles, grouped_tiles
from moeplan.kernels.triton_launch import run_fused, run_grouped
from moeplan.kernels.triton_layer import Call, make_scratch, to_device

backend, keys, binders = make_backend(GPUTarget("cuda", 90, 32)), {}, {}

def record(self, *args, grid, warmup, **options):
    name = self.__name__
    if name not in binders:
        binders[name] = create_function_from_signature(self.signature, self.params, backend)
    bound = binders[name](*args, **{"debug": False, "instrumentation_mode": "", **options})
    keys.setdefault(name, set()).add(str(bound[1]) + str(sorted(options.items())))

JITFunction.run = record

@triton.jit
def loose(x, n):
    tl.store(x, n)

for form in ("affine4-g64", "bf16"):
    shape = shape_of(form, sizes=(64, 64))
    experts = to_device(random_planes(shape, 0), shape, "cpu")
    for n in range(1, 257):
        ids = torch.zeros((n, 2), dtype=torch.int32)
        x = torch.zeros((n, 64)).bfloat16()
        call = Call(x, ids, torch.zeros((n, 2)), torch.empty_like(x), x)
        run_fused(experts, call, make_scratch(shape, n, 0, "cpu"), fused_tiles(shape))
        run_grouped(experts, call, make_scratch(shape, n, 16, "cpu"), grouped_tiles(shape, 16), 16)
        loose[(1,)](x, n)
print(json.dumps({name: len(found) for name, found in keys.items()}))
"""


def test_one_key_per_kernel():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", KEYS], capture_output=True, text=True, env=environment, check=False)
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
