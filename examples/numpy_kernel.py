"""A kernel of your own in Python: `--runner python --kernel examples.numpy_kernel:NumpyKernel`."""

import numpy as np


class NumpyKernel:
    name = "numpy"

    def declines(self, shape, tokens):
        return None if shape.activation == "swiglu" else f"activation {shape.activation}: only swiglu is written"

    def config_hash(self):
        return f"1, numpy {np.__version__}"

    def prepare(self, arm, ids):
        shape, rng = arm.shape, np.random.default_rng(0)
        sizes = [(shape.expert_hidden, shape.hidden)] * 2 + [(shape.hidden, shape.expert_hidden)]
        planes = [rng.standard_normal((shape.experts, *s), np.float32) / np.float32(s[1] ** 0.5) for s in sizes]
        x = rng.standard_normal((arm.tokens, shape.hidden), np.float32)
        return planes, x, ids, np.full(ids.shape, 1 / shape.top_k, np.float32)

    def run(self, state, layers):
        _, x, ids, scores = state
        for i in range(layers):  # a real kernel has weights of its own in every layer
            x = state[1] + self.layer(state, x, ids[i], scores[i])

    def layer(self, state, x, ids, scores):
        gate, up, down = state[0]
        y = np.zeros_like(x)
        for token, slot in np.ndindex(ids.shape):
            e, row = ids[token, slot], x[token]
            g = gate[e] @ row
            y[token] += scores[token, slot] * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ row)))
        return y

    def planes(self, state, expert):
        return tuple(matrix[expert] for matrix in state[0])

    def signature(self, state):
        return "numpy, three products a slot"
