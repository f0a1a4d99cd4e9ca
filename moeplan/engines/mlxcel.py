"""mlxcel (lablup/mlxcel): a fused kernel for one token, else three `gather_qmm`, sorted from 64 slots on."""

from moeplan.engines.rules import Backend, Predicate, Rule, RuleBook

_FILE = "mlxcel src/models/switch_layers.rs"
# FUSED_MOE_MAX_DFF by backend: 4096 on Metal, 8192 on CUDA (the ROCm build takes the Metal figure)
_WIDEST: dict[Backend, int] = {"metal": 4096, "cuda": 8192, "rocm": 4096}


def _support() -> tuple[Predicate, ...]:
    """Formats that the fused kernel takes."""
    where = f"{_FILE}, fused-kernel support rule"
    return (
        Predicate("mode", "mode", "==", "affine", where),
        Predicate("gate bits", "gate_bits", "in", (4, 8), where),
        Predicate("gate and up bits", "gate_up_bits_differ", "==", 0, where),
        Predicate("down bits", "down_bits", "in", (4, 6, 8), where),
        Predicate("group sizes", "group_sizes", "==", 1, where),
        Predicate("6-bit down width", "six_bit_down_rest", "==", 0, f"{where}: 6-bit down needs Dff % 16 == 0"),
        Predicate("activation", "activation", "in", ("swiglu", "geglu"), f"{_FILE}: relu2 is off by default",
                  env="MLXCEL_FUSED_MOE_RELU2"),
    )  # fmt: skip


def rule_book(backend: Backend) -> RuleBook:
    """The rules on that backend."""
    fused = (
        Predicate("token gate", "tokens", "==", 1, f"{_FILE}, `array_shape(&x_flat)[0] == 1` in 15 to 16 families"),
        Predicate("Dff cap", "expert_hidden", "<=", _WIDEST[backend], f"{_FILE}, FUSED_MOE_MAX_DFF",
                  env="MLXCEL_FUSED_MOE_MAX_DFF"),
        *_support(),
        Predicate("kernel rows", "tokens", "==", 1, f"{_FILE}, the kernel's own check: x has one row (x_elems == din)",
                  place="kernel"),
    )  # fmt: skip
    sort = (Predicate("sort", "slots", ">=", 64, f"{_FILE}, total >= 64 slots"),)
    return RuleBook(
        "mlxcel",
        backend,
        (Rule("fused", fused), Rule("gather_sorted", sort), Rule("gather")),
        ("mlx",),
        ("MLXCEL_FUSED_MOE=0 switches the fused kernel off",),
    )


BOOKS = tuple(rule_book(backend) for backend in _WIDEST)
