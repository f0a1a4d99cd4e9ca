"""mlx-lm: three `gather_qmm` calls a layer, sorted by expert from 64 slots on."""

from moeplan.engines.chain import Engine, Gate
from moeplan.engines.rules import Predicate, Rule, RuleBook, Variant

ENGINE = Engine(
    name="mlx-lm",
    runners=("mlx",),
    gates=(
        Gate(
            name="sort",
            variable="slots",
            threshold=64,
            below="gather",
            above="gather_sorted",
            source="mlx-lm d78bf58e mlx_lm/models/switch_layers.py:181 and :222, `indices.size >= 64`",
        ),
    ),
    notes=(
        "Metal: the kernel for sorted rows runs only from 16 slots on and with at least 4 slots an expert (mlx"
        " 846d1762 mlx/backend/metal/quantized.cpp:1898, `M == 1 && B >= 16 && right_sorted && B / E >= 4`); below,"
        " sorting is paid for and the unsorted kernel runs",
        "CUDA: `right_sorted` is ignored for quantized weights, so sorting only orders the rows (mlx 846d1762"
        " mlx/backend/cuda/quantized/quantized.cpp, GatherQMM)",
        "passing lhs_indices switches the sorted kernel off (mlx 846d1762 mlx/ops.cpp, gather_qmm)",
    ),
)

_METAL = (
    "mlx 846d1762 mlx/backend/metal/quantized.cpp:1898 GatherQMM::eval_gpu, `B >= 16 && right_sorted && B / E >= 4`"
)
_CUDA = "mlx 846d1762 mlx/backend/cuda/quantized/quantized.cpp GatherQMM, `can_use_qmv && M * B < 8`"
_SORT = (Predicate("sort", "slots", ">=", 64, ENGINE.gates[0].source),)
_SORTED = (
    Predicate("sorted kernel, slots", "slots", ">=", 16, _METAL, place="kernel"),
    Predicate("sorted kernel, slots an expert", "slots_per_expert", ">=", 4, _METAL, place="kernel"),
)
_ON_CUDA = (
    Variant("gather_qmv", (Predicate("vector kernel", "slots", "<", 8, _CUDA, place="kernel"),)),
    Variant("qmm_sm80"),
)

BOOKS = (
    RuleBook(
        "mlx-lm",
        "metal",
        (
            Rule("gather_sorted", _SORT, (Variant("gather_qmm_rhs", _SORTED), Variant("gather_qmv"))),
            Rule("gather", (), (Variant("gather_qmv"),)),
        ),
        ENGINE.runners,
        ENGINE.notes,
    ),
    RuleBook(
        "mlx-lm",
        "cuda",
        (Rule("gather_sorted", _SORT, _ON_CUDA), Rule("gather", (), _ON_CUDA)),
        ENGINE.runners,
        ENGINE.notes,
    ),
)
