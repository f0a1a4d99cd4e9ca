"""Laws of the checker: chunks do not matter, clean rows stay clean, repairs converge, no file ends in a traceback."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import MoeplanError
from moeplan.traffic.check import check_trace
from moeplan.traffic.fix import REPAIRABLE, fix_trace
from moeplan.traffic.trace import RoutingTrace, load_trace, open_trace, save_trace
from tests.traces import clean

SPOILS = (
    "startup",
    "late run",
    "duplicate",
    "outside",
    "zero cell",
    "zero row",
    "padding",
    "dense",
    "unrecorded",
    "cut",
)


def spoiled(kinds: list[str], seed: int) -> RoutingTrace:
    """A small clean trace, spoiled in the ways named, at drawn places."""
    rng = np.random.default_rng(seed)
    trace = clean(32, 4, sizes=(90, 40, 1, 69))
    ids: npt.NDArray[np.int16] = trace.expert_ids.astype(np.int16)
    for kind in kinds:
        row, size, layer = int(rng.integers(0, 150)), int(rng.integers(1, 50)), int(rng.integers(0, 3))
        if kind == "startup":
            ids[:size] = ids[0]
        elif kind == "late run":
            ids[row : row + size] = ids[row]
        elif kind == "duplicate":
            ids[row : row + size, layer, 0] = ids[row : row + size, layer, 3]
        elif kind == "outside":
            ids[row, layer, 0] = rng.choice([-5, 32, 40, 900])
        elif kind == "zero cell":
            ids[row : row + size, layer] = 0
        elif kind == "zero row":
            ids[row : row + size] = 0
        elif kind == "padding":
            ids[row : row + size] = -1
        elif kind == "dense":
            ids[:, layer] = 0
        elif kind == "unrecorded":
            ids[:, layer] = -1
        elif kind == "cut":
            ids[:size, -1] = rng.choice([-1, 0])
    phase = trace.phase if seed % 2 else None
    return replace(trace, expert_ids=ids, phase=phase)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(SPOILS), max_size=4), st.integers(0, 10**6), st.integers(1, 5000))
def test_chunked_equals_whole(kinds: list[str], seed: int, size: int) -> None:
    trace = spoiled(kinds, seed)
    whole = check_trace(trace)
    assert check_trace(trace, chunk_bytes=size) == whole
    with tempfile.TemporaryDirectory() as folder:
        save_trace(trace, Path(folder) / "t")
        assert check_trace(open_trace(Path(folder) / "t"), chunk_bytes=size) == whole


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(SPOILS), min_size=1, max_size=4), st.integers(0, 10**6))
def test_repairs_leave_nothing_repairable(kinds: list[str], seed: int) -> None:
    """What was cleaned has no finding of a repairable code, except gaps of the last layer, which stay as -1."""
    trace = spoiled(kinds, seed)
    found = check_trace(trace)
    with tempfile.TemporaryDirectory() as folder:
        try:
            fixed = fix_trace(trace, found, Path(folder) / "out")
        except MoeplanError as bad:
            if "no route is left" not in str(bad):
                raise
            return
        if fixed.check is None:
            return
        left = {one.code for one in fixed.check.findings}
        assert left & set(REPAIRABLE) <= {"last-layer-cut", "startup-run"}
        back = open_trace(Path(folder) / "out")
        rows = {row.tobytes() for row in np.where(trace.expert_ids == 0, -1, trace.expert_ids)}
        columns = [int(np.flatnonzero(trace.layer_ids == n)[0]) for n in back.layer_ids]
        rows = {np.frombuffer(row, np.int16).reshape(3, 4)[columns].tobytes() for row in rows}
        kept = np.where(np.asarray(back.expert_ids) == 0, -1, back.expert_ids)
        assert all(row.tobytes() in rows for row in kept), "a repair invented a row"


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(8, 1), (8, 6), (32, 4), (60, 4), (128, 8), (257, 8), (512, 10)]),
    st.integers(1, 4),
    st.lists(st.integers(0, 120), min_size=2, max_size=8),
    st.integers(0, 10**6),
)
def test_no_false_alarm(shape: tuple[int, int], layers: int, sizes: list[int], seed: int) -> None:
    """Whatever the shape, the requests and the seed, clean rows raise no finding."""
    if not sum(sizes):
        sizes = [*sizes, 1]
    assert check_trace(clean(*shape, layers, seed, tuple(sizes))).findings == ()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400), st.sampled_from(["t.npz", "header.toml", "expert_ids.npy", "request_offsets.npy"]))
def test_arbitrary_bytes_never_end_in_a_traceback(data: bytes, name: str) -> None:
    hurt(lambda _: data, name)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(0, 255),
    st.sampled_from(["t.npz", "header.toml", "expert_ids.npy", "request_offsets.npy", "layer_ids.npy"]),
)
def test_one_wrong_byte_never_ends_in_a_traceback(at: int, byte: int, name: str) -> None:
    def flip(whole: bytes) -> bytes:
        place = at % len(whole)
        return whole[:place] + bytes([byte]) + whole[place + 1 :]

    hurt(flip, name)


def hurt(change: object, name: str) -> None:
    """Change a file of a sound trace and check it: findings, or a refusal in one line."""
    assert callable(change)
    trace = clean(8, 2, sizes=(5, 3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        if name.endswith(".npz"):
            path = path.with_suffix(".npz")
            arrays = {"expert_ids": trace.expert_ids, "request_offsets": trace.request_offsets}
            np.savez_compressed(path, **arrays, num_experts=np.array(8))
            path.write_bytes(change(path.read_bytes()))
        else:
            save_trace(trace, path)
            file = path / name
            file.write_bytes(change(file.read_bytes()))
        said = ""
        try:
            check_trace(open_trace(path))
            load_trace(path)
        except MoeplanError as bad:
            said = str(bad)
    assert "\n" not in said
