"""Write a small routing trace in the layout that moeplan reads: python own_trace.py OUT.npz.

A real one comes from hooks in your engine: expert_ids [tokens, layers, top_k] (-1 = padding) and request_offsets,
so that request r owns rows offsets[r] to offsets[r + 1]. Here a skewed router is drawn at random.
"""

import sys

import numpy as np

TOKENS, LAYERS, EXPERTS, TOP_K = 400, 4, 16, 4

rng = np.random.default_rng(0)
logits = rng.normal(size=(LAYERS, EXPERTS)) + rng.gumbel(size=(TOKENS, LAYERS, EXPERTS))
expert_ids = np.argsort(-logits, axis=-1)[..., :TOP_K].astype(np.uint8)
np.savez(sys.argv[1], expert_ids=expert_ids, request_offsets=np.arange(0, TOKENS + 1, 20), num_experts=EXPERTS)
