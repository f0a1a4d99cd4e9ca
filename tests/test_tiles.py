"""Expert loads, block tables and run reads on cases worked by hand and on published fixtures."""

import numpy as np
import pytest

from moeplan.errors import MoeplanError
from moeplan.traffic.load import ExpertLoad
from moeplan.traffic.path import parse_path
from moeplan.traffic.tiles import BlockTable, run_reads, tiles_of


def load(*rows: int) -> ExpertLoad:
    return ExpertLoad(np.array(rows, np.int32), sum(rows))


def test_load_counts_rows_and_padding() -> None:
    found = ExpertLoad.from_ids(np.array([[0, 2], [2, -1], [3, 2]]), 5)
    assert found.rows.tolist() == [1, 0, 3, 1, 0]
    assert (found.tokens, found.slots, found.distinct, found.padding) == (3, 5, 3, 1)


def test_load_of_the_moe_align_docstring_example() -> None:
    # vLLM moe_align_block_size's own example: ids run 1..4, so five experts, the first without a token.
    ids = np.array([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]])
    found = ExpertLoad.from_ids(ids, 5)
    assert found.rows.tolist() == [0, 3, 3, 3, 3]
    assert BlockTable.of(found, 4).count == 4
    with pytest.raises(MoeplanError, match=r"4 is outside -1\.\.3"):
        ExpertLoad.from_ids(ids, 4)


@pytest.mark.parametrize("bad", [-2, 8])
def test_load_refuses_foreign_ids(bad: int) -> None:
    with pytest.raises(MoeplanError, match=f"{bad} is outside -1..7"):
        ExpertLoad.from_ids(np.array([[0, bad]]), 8)


def test_local_load_of_a_rank() -> None:
    whole = load(1, 2, 3, 4)
    assert whole.local(2, 1).rows.tolist() == [3, 4]
    assert whole.local(2, 1).tokens == whole.tokens
    with pytest.raises(MoeplanError, match="--ep 3"):
        whole.local(3, 0)


def test_block_table_by_hand() -> None:
    table = BlockTable.of(load(3, 0, 17, 64, 65), 16)
    assert table.blocks.tolist() == [1, 0, 2, 4, 5]
    assert (table.count, table.padded_rows, table.pairs, table.leaders) == (12, 12 * 16 - 149, 5, 7)
    assert table.occupancy == 149 / 192
    assert (table.pair_count_fraction, table.paired_block_fraction) == (5 / 12, 10 / 12)


def test_published_block_table_of_the_pairing_report() -> None:
    # 173 experts of one block, 84 of two, 2 of three: 347 blocks, 86 pairs, 261 leaders, 259 experts.
    rows = [64] * 173 + [128] * 84 + [192] * 2
    table = BlockTable.of(load(*rows), 64)
    assert (table.count, table.pairs, table.leaders) == (347, 86, 261)
    assert round(table.pair_count_fraction, 3) == 0.248
    assert round(table.paired_block_fraction, 3) == 0.496


def test_empty_load_has_no_blocks() -> None:
    table = BlockTable.of(load(0, 0), 16)
    assert (table.count, table.occupancy, table.pair_count_fraction) == (0, 0.0, 0.0)
    assert run_reads(load(0, 0).rows, 16) == 0


def test_run_reads_count_boundaries_inside_a_run() -> None:
    assert run_reads(load(16, 16).rows, 16) == 2  # boundaries fall between the runs
    assert run_reads(load(8, 16, 8).rows, 16) == 4  # the middle run is cut once
    assert run_reads(load(40).rows, 16) == 3


def test_gather_sorted_shares_planes_only_on_long_lists() -> None:
    path = parse_path("gather_sorted")
    few = ExpertLoad(np.array([15, 0], np.int32), 15)  # 15 slots: below 16
    assert tiles_of(path, few) == (15, 0)
    many = ExpertLoad(np.array([16, 0], np.int32), 16)
    assert tiles_of(path, many) == (1, 0)
    thin = ExpertLoad(np.full(32, 3, np.int32), 24)  # 96 slots, 3 an expert: below 4
    assert tiles_of(path, thin) == (96, 0)
    assert tiles_of(path, ExpertLoad(np.full(32, 4, np.int32), 32)) == (32, 32 * 16 - 128)


@pytest.mark.parametrize("name", ["grouped", "grouped:0", "grouped:24", "grouped:512", "grouped:x", "sorted", ""])
def test_unknown_paths_are_refused(name: str) -> None:
    with pytest.raises(MoeplanError, match="--path"):
        parse_path(name)


@pytest.mark.parametrize(
    ("experts", "top_k", "first"),  # first token count with the sorted kernel: max(16, 4 E) slots
    [(8, 2, 16), (32, 4, 32), (64, 8, 32), (64, 6, 43), (128, 8, 64), (128, 4, 128), (256, 8, 128), (512, 10, 205)],
)
def test_first_token_count_of_the_sorted_metal_kernel(experts: int, top_k: int, first: int) -> None:
    from moeplan.traffic.tiles import sorts

    path = parse_path("gather_sorted")
    assert not sorts(path, (first - 1) * top_k, experts)
    assert sorts(path, first * top_k, experts)
