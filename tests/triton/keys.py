"""Prints how many launch keys each kernel meets over 1..256 tokens, as JSON.

The key is Triton's own (argument types, divisibility and ones, constants, options), computed by its binder for compute
capability 9.0 without a device. `loose` shows that a token count left to itself does make new keys.
"""

import json

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from moeplan.kernels.formats import random_planes
from moeplan.kernels.triton_config import fused_tiles, grouped_tiles
from moeplan.kernels.triton_launch import run_fused, run_grouped
from moeplan.kernels.triton_layer import Call, make_scratch, to_device
from tests.triton.layers import shape_of

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
