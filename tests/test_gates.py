"""Chains of gates, the optimiser on cases that can be done by hand, and the engines' own defaults."""

import pytest

from moeplan.cost.model import Estimate
from moeplan.engines import ENGINES, find_engine
from moeplan.errors import MoeplanError
from moeplan.planning.evidence import fits_template, templates
from moeplan.planning.gates import Chain, Table, choose, gain, optimise, total
from tests.planning import exact, gate, shape, table, two

QWEN = shape(128, 8)


@pytest.mark.parametrize(
    ("tokens", "path"), [(1, "gather"), (7, "gather"), (8, "gather_sorted"), (64, "gather_sorted")]
)
def test_mlx_lm_sorts_from_64_slots(tokens: int, path: str) -> None:
    chain = Chain(ENGINES["mlx-lm"].gates, QWEN)
    assert chain.paths[chain.level(chain.defaults, tokens)] == path
    assert chain.gates[0].first_tokens(64, QWEN) == 8


@pytest.mark.parametrize(
    ("tokens", "path"),
    [(1, "fused"), (2, "grouped:16"), (32, "grouped:16"), (33, "grouped:32"), (96, "grouped:32"), (97, "grouped:64"),
     (512, "grouped:64"), (513, "grouped:128")],
)  # fmt: skip
def test_triton_defaults_follow_the_fused_cap_and_vllm_rows(tokens: int, path: str) -> None:
    chain = Chain(ENGINES["moeplan-triton"].gates, QWEN)
    assert chain.paths[chain.level(chain.defaults, tokens)] == path


def test_paths_without_a_calibration_are_declined_and_their_range_falls_to_the_neighbour() -> None:
    engine, declines = ENGINES["moeplan-triton"].limited_to({"fused", "grouped:16", "grouped:64"})
    assert engine.paths == ("fused", "grouped:16", "grouped:64")
    assert [(g.below, g.above, g.threshold) for g in engine.gates] == [
        ("fused", "grouped:16", 2), ("grouped:16", "grouped:64", 97)
    ]  # fmt: skip
    assert [no.path for no in declines] == ["grouped:32", "grouped:128"]
    first, _ = ENGINES["moeplan-triton"].limited_to({"grouped:16", "grouped:64"})
    assert first.paths == ("grouped:16", "grouped:64")
    with pytest.raises(MoeplanError, match="needs two calibrated paths"):
        ENGINES["moeplan-triton"].limited_to({"fused"})


def test_own_kernels_start_with_the_first_path_everywhere() -> None:
    engine = find_engine("own", ["mine", "yours"])
    chain = Chain(engine.gates, QWEN)
    assert chain.levels(chain.defaults, (1, 1000)) == (0, 0)
    for name, paths in (("own", ["mine"]), ("own", ["mine", "mine"]), ("vllm", []), ("mlx-lm", ["mine"])):
        with pytest.raises(MoeplanError):
            find_engine(name, paths)


def test_the_first_gate_that_holds_decides() -> None:
    chain = Chain((gate("one", "tokens", 8, "a", "b"), gate("two", "tokens", 2, "b", "c")), shape())
    assert chain.levels(chain.defaults, (1, 2, 7, 8)) == (0, 0, 0, 2)  # relaxing `two` reaches nothing below 8
    assert chain.levels((None, 2), (1, 100)) == (0, 0)


def test_slots_an_expert_is_a_whole_number() -> None:
    own = gate("g", "slots_per_expert", 4, "a", "b")
    assert own.first_tokens(4, QWEN) == 64  # MLX's sorted kernel at 128 experts, top 8
    assert own.value(63, QWEN) == 3
    assert own.value(64, QWEN) == 4


def test_threshold_lands_where_the_times_cross() -> None:
    rows = {n: (1.0, (1.0 * n, 3.0 + 0.2 * n)) for n in range(1, 9)}  # equal at 3.75
    assert optimise(two(), table(rows, "ab")) == (4,)
    assert optimise(two(7), table(rows, "ab")) == (4,)
    assert optimise(two(7, "slots"), table(rows, "ab")) == (7,)  # 7 slots first hold at 4 tokens too: left alone
    assert optimise(two(9, "slots"), table(rows, "ab")) == (8,)


def test_between_the_sizes_of_the_mix_the_ladder_decides() -> None:
    rows = {n: (1.0 if n in (1, 8) else 0.0, (1.0 * n, 3.0 + 0.2 * n)) for n in range(1, 9)}
    assert optimise(two(2), table(rows, "ab")) == (4,)


def test_a_path_that_never_pays_is_put_beyond_the_table_and_none_stays_none() -> None:
    rows = {n: (1.0, (1.0, 2.0)) for n in range(1, 9)}
    assert optimise(two(3), table(rows, "ab")) == (9,)
    assert optimise(two(100), table(rows, "ab")) == (100,)
    assert optimise(two(None), table(rows, "ab")) == (None,)


def test_a_middle_path_may_be_skipped() -> None:
    chain = Chain((gate("one", "tokens", 2, "a", "b"), gate("two", "tokens", 6, "b", "c")), shape())
    rows = {n: (1.0, (1.0 * n, 50.0, 4.0)) for n in range(1, 9)}
    found = optimise(chain, table(rows, "abc"))
    assert chain.levels(found, range(1, 9)) == (0, 0, 0, 0, 2, 2, 2, 2)


def test_a_path_without_a_price_is_never_chosen() -> None:
    rows = {1: (1.0, (2.0, None)), 2: (1.0, (2.0, 1.0)), 3: (1.0, (2.0, None))}
    assert optimise(two(9), table(rows, "ab")) == (9,)  # from 2 on would need a price at 3


def test_gain_by_hand_and_its_band() -> None:
    rows = {1: (3.0, (1.0, 9.0)), 2: (1.0, (2.0, 1.0)), 3: (2.0, (4.0, 2.0))}
    found = gain(two(4), table(rows, "ab", 0.1), (4,), (2,))
    assert found.tokens == (2, 3)
    assert found.middle == pytest.approx(10 / 5 - 1)  # (2 + 2 * 4) / (1 + 2 * 2) - 1
    assert (found.low, found.high) == pytest.approx((9 / 5.5 - 1, 11 / 4.5 - 1))


def test_timed_points_err_each_for_itself() -> None:
    times = {"a": tuple(exact(4.0, 0.1, "measured") for _ in range(4)), "b": (exact(2.0),) * 4}
    found = gain(two(9), Table((1, 2, 3, 4), (1.0,) * 4, times), (9,), (1,))
    assert (found.middle, found.low, found.high) == pytest.approx((1.0, 0.9, 1.1))  # 16 +- 0.4 * sqrt(4) over 8


def test_a_path_on_both_sides_of_a_gain_moves_as_one() -> None:
    chain = Chain((gate("one", "tokens", 2, "a", "b"), gate("two", "tokens", 3, "b", "c")), shape())
    wide = Table((1, 2, 3), (1.0, 1.0, 1.0), {
        "a": (Estimate(1, 1, 1, "x"),) * 3, "b": (Estimate(2, 1, 3, "x"),) * 3, "c": (Estimate(1, 1, 1, "x"),) * 3,
    })  # fmt: skip
    found = gain(chain, wide, (1, 3), (2, 2))  # b, b, c -> a, c, c
    assert (found.middle, found.low, found.high) == pytest.approx((1.0, 0.0, 2.0))


def test_the_default_stays_unless_the_low_end_clears_the_floor() -> None:
    rows = {n: (1.0, (1.0, 0.9)) for n in range(1, 4)}
    sure, unsure = table(rows, "ab", 0.01), table(rows, "ab", 0.06)
    assert choose(two(9), sure, 0.02).chosen == (1,)
    kept = choose(two(9), unsure, 0.02)
    assert (kept.best, kept.chosen) == ((1,), (9,))
    assert kept.gains[0].low < 0.02 < kept.gains[0].middle


def test_a_gate_that_moves_no_step_of_the_mix_stays() -> None:
    rows = {n: (1.0 if n == 1 else 0.0, (1.0 * n, 1.5)) for n in range(1, 5)}
    found = choose(two(9), table(rows, "ab"), 0.0)
    assert (found.best, found.chosen, found.gains[0].tokens) == ((2,), (9,), ())


def test_total_wants_a_price_where_the_mix_goes() -> None:
    rows = {1: (1.0, (2.0, None)), 2: (0.0, (2.0, None))}
    assert total(two(2), table(rows, "ab"), (2,)) == 2.0
    with pytest.raises(ValueError, match="1 tokens"):
        total(two(2), table(rows, "ab"), (1,))


def test_signature_templates_keep_the_numbers_that_never_change() -> None:
    found = templates(["tile 16, grid 4", "tile 16, grid 8", "", "plain"])
    assert found == ["plain", "tile 16, grid #"]
    assert fits_template("tile 16, grid 123", found[1])
    assert not fits_template("tile 64, grid 8", found[1])
    assert not fits_template("tile 16, grid 8, more", found[1])
