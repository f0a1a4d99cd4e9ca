"""moeplan's own Triton kernels behind gates of the kind that engines use: a fused path for few tokens, then blocks."""

from moeplan.engines.chain import Engine, Gate

_ROWS = "vLLM 0.33.0 vllm/model_executor/layers/fused_moe/fused_moe.py get_default_config: BLOCK_SIZE_M for M tokens"

ENGINE = Engine(
    name="moeplan-triton",
    runners=("triton",),
    gates=(
        Gate(
            name="n_tokens",  # the fused path serves fewer tokens than this: its cap + 1
            variable="tokens",
            threshold=2,
            below="fused",
            above="grouped:16",
            source="mlxcel src/models/switch_layers.rs, `array_shape(&x_flat)[0] == 1`: fused kernel at one token only",
        ),
        Gate("block_rows_32", "tokens", 33, "grouped:16", "grouped:32", f"{_ROWS}, 16 up to 32"),
        Gate("block_rows_64", "tokens", 97, "grouped:32", "grouped:64", f"{_ROWS}, 32 up to 96"),
        Gate("block_rows_128", "tokens", 513, "grouped:64", "grouped:128", f"{_ROWS}, 64 up to 512"),
    ),
)
