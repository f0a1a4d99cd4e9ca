"""The canonical layouts: what is written comes back, and what is broken or hostile is refused in one line."""

import io
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeplan.errors import MoeplanError
from moeplan.store import Store
from moeplan.traffic.arrays import load_arrays, map_array, read_rows
from moeplan.traffic.routing import parse_routing
from moeplan.traffic.trace import RoutingTrace, load_trace, open_trace, save_trace
from tests.traces import SHAPES, clean, save_npz, signed

LABELS = ("code", "math", 'odd "quotes"\n\x7f\x01 é 😀 \ud800', "code", "", "math", "code", "code")


def full(experts: int = 32, top_k: int = 4) -> RoutingTrace:
    trace = clean(experts, top_k)
    return replace(
        trace,
        layer_ids=np.array([1, 3, 4]),
        domains=LABELS,
        request_tokens=np.diff(trace.request_offsets) + 1,
        id_space="physical",
        provenance={"files": ["a", "b\\"], "count": 3, "share": 0.5, "deep": {"yes": True, "odd key": "v"}, "no": None},
    )


def same(one: RoutingTrace, other: RoutingTrace) -> None:
    assert (np.asarray(one.expert_ids) == np.asarray(other.expert_ids)).all()
    assert one.expert_ids.dtype == other.expert_ids.dtype
    for key in ("request_offsets", "layer_ids", "phase", "request_tokens"):
        assert np.array_equal(getattr(one, key), getattr(other, key)), key
    for key in ("experts", "id_space", "order", "name"):
        assert getattr(one, key) == getattr(other, key), key


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_a_directory_comes_back(tmp_path: Path, experts: int, top_k: int) -> None:
    trace = full(experts, top_k)
    save_trace(trace, tmp_path / "deep" / "t")
    back = load_trace(tmp_path / "deep" / "t")
    same(trace, back)
    assert isinstance(back.expert_ids, np.memmap)
    assert back.domains == (*LABELS[:2], 'odd "quotes"\n\x7f\x01 é 😀 ?', *LABELS[3:])
    assert back.provenance == {"files": ["a", "b\\"], "count": 3, "share": 0.5, "deep": {"yes": True, "odd key": "v"}}
    save_trace(back, tmp_path / "again")
    for file in (tmp_path / "again").iterdir():
        assert file.read_bytes() == (tmp_path / "deep" / "t" / file.name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "deep"]


def test_an_npz_comes_back(tmp_path: Path) -> None:
    trace = full()
    more = {"phase": trace.phase, "request_tokens": trace.request_tokens, "id_space": "physical", "order": "ranked"}
    path = save_npz(trace, tmp_path / "clean-32-4.npz", **more, domains=np.array(["a"] * 8), meta_json='{"a": [1]}')
    back = load_trace(path)
    same(trace, back)
    assert back.domains == ("a",) * 8
    assert back.provenance == {"a": [1]}


def test_defaults_claim_nothing(tmp_path: Path) -> None:
    trace = load_trace(save_npz(clean(8, 2), tmp_path / "t.npz"))
    assert (trace.phase, trace.domains, trace.request_tokens) == (None, None, None)
    assert (trace.id_space, trace.order, trace.name) == ("logical", "set", "t")
    assert trace.layer_ids.tolist() == [0, 1, 2]


def test_labels_and_prompt_lengths_of_an_npz(tmp_path: Path) -> None:
    trace = clean(8, 2)
    meta = "[" + ", ".join(f'{{"category": "c{r % 2}"}}' for r in range(8)) + "]"
    assert load_trace(save_npz(trace, tmp_path / "a.npz", meta_json=meta)).domains == ("c0", "c1") * 4
    prompt = np.array([n // 3 for n in np.diff(trace.request_offsets)])
    whole = load_trace(save_npz(trace, tmp_path / "b.npz", phase=trace.phase, prompt_len=prompt))
    assert whole.request_tokens is not None
    assert (whole.request_tokens == np.diff(trace.request_offsets)).all()
    decode = load_trace(save_npz(trace, tmp_path / "c.npz", phase=np.ones(trace.rows, np.uint8), prompt_len=prompt))
    assert decode.request_tokens is None


def test_a_directory_is_a_routing_arm(tmp_path: Path) -> None:
    save_trace(clean(8, 2), tmp_path / "t")
    routing = parse_routing(f"trace:{tmp_path / 't'}", Store())
    assert routing.trace is not None
    assert routing.trace.rows == 800


@pytest.mark.parametrize("size", [1, 100, 1 << 24])
def test_chunks_cover_every_row_once(tmp_path: Path, size: int) -> None:
    save_trace(clean(32, 4), tmp_path / "t")
    trace = load_trace(tmp_path / "t")
    parts = list(trace.chunks(size))
    assert [first for first, _ in parts] == np.cumsum([0, *(len(ids) for _, ids in parts[:-1])]).tolist()
    assert (np.concatenate([ids for _, ids in parts]) == trace.expert_ids).all()
    assert not any(isinstance(ids, np.memmap) for _, ids in parts)


def test_nothing_is_overwritten_or_left_behind(tmp_path: Path) -> None:
    trace = clean(8, 2)
    save_trace(trace, tmp_path / "t")
    with pytest.raises(MoeplanError, match="exists already"):
        save_trace(trace, tmp_path / "t")
    (tmp_path / "file").write_text("")
    with pytest.raises(MoeplanError, match="cannot write"):
        save_trace(trace, tmp_path / "file" / "t")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "t"]


# --- what is refused ---

HEADER = "format = 'moeplan-trace'\nversion = 1\nexperts = 32\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "format = 'None'"),
        ("\x00", "not TOML"),
        ("format = 'other'", "format = 'other'"),
        (HEADER.replace("1", "2"), "version = 2, this program reads 1"),
        (HEADER.replace("32", "'x'"), "experts = x, expected a whole number"),
        (HEADER.replace("32", "true"), "experts = True"),
        (HEADER.replace("32", "3"), "num_experts = 3 with 4 slots"),
        (HEADER.replace("32", "1_000_000_000_000"), "at most 1048576"),
        (HEADER + "rows = 1_000_000_000_000\n", "rows = 1000000000000, the arrays have 800"),
        (HEADER + "top_k = 5\n", "top_k = 5, the arrays have 4"),
        (HEADER + "order = 'best'\n", "order = 'best', expected ranked or set"),
        (HEADER + "id_space = 3\n", "id_space = '3'"),
        (HEADER + "name = 3\n", "name = '3', expected str"),
        (HEADER + "provenance = 3\n", "provenance = '3', expected dict"),
        (HEADER + "domain_names = ['a']\n", "domain.npy: no such file"),
        (HEADER + "domain_names = 'a'\n", "must be a list"),
        (HEADER + "x = " + "[" * 5000 + "\n", "not TOML"),
    ],
)
def test_wrong_headers(tmp_path: Path, text: str, message: str) -> None:
    save_trace(clean(32, 4), tmp_path / "t")
    (tmp_path / "t" / "header.toml").write_text(text)
    refuse(tmp_path / "t", message)


def refuse(path: Path, message: str) -> None:
    with pytest.raises(MoeplanError) as caught:
        open_trace(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)


@pytest.mark.parametrize(
    ("key", "array", "message"),
    [
        ("expert_ids", np.zeros((800, 3), np.uint8), "expert_ids has 2 axes"),
        ("expert_ids", np.zeros((0, 3, 4), np.uint8), "is empty"),
        ("expert_ids", np.zeros((800, 3, 4)), "holds float64"),
        ("expert_ids", np.asfortranarray(np.zeros((800, 3, 4), np.uint8)), "column-major"),
        ("expert_ids", np.zeros((799, 3, 4), np.uint8), "must rise from 0 to 799"),
        ("request_offsets", np.array([0, 900, 800]), "must rise"),
        ("layer_ids", np.array([0, 1]), "layer_ids has 2 entries, expected 3"),
        ("layer_ids", np.array([0, 1, 1]), "layer_ids must be different"),
        ("layer_ids", np.array([0, 1, -1]), "layer_ids must be different"),
        ("phase", np.zeros(3, np.uint8), "phase has 3 entries, expected 800"),
        ("phase", np.full(800, 2, np.uint8), "phase must be 0"),
        ("request_tokens", np.zeros((8, 1), np.int64), "request_tokens has 2 axes"),
        ("domain", np.zeros(3, np.int32), "domain.npy has 3 entries"),
        ("domain", np.full(8, 9), "expected whole numbers 0..3"),
    ],
)
def test_wrong_arrays(tmp_path: Path, key: str, array: np.ndarray, message: str) -> None:
    save_trace(full(), tmp_path / "t")
    np.save(tmp_path / "t" / f"{key}.npy", array)
    refuse(tmp_path / "t", message)


def npy(shape: str, descr: str = "|u1", data: bytes = b"") -> bytes:
    """A .npy file that claims what it likes."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


HOSTILE = {
    "10^12 rows": (npy("(1000000000000, 24, 4)"), "needs 96000000000000 bytes, found 0"),
    "more digits than a number": (npy("(" + "9" * 4000 + ", 1, 1)"), "axes beyond any array"),
    "a negative axis": (npy("(-1, 3, 4)"), "describes no plain array"),
    "objects": (npy("(1, 1, 1)", "|O", b"\x80\x04."), "an array of objects"),
    "a structure": (npy("(1, 1, 1)").replace(b"'|u1'", b"[('a', '|u1')]"), "describes no plain array"),
    "code for a shape": (npy("__import__('os').getpid()"), "describes no plain array"),
    "an unknown type": (npy("(1, 1, 1)", "<f9", b"abcdefghi"), "not understood"),
    "a letter for another type": (npy("(1, 1, 1)", "|a1", b"a"), "describes no plain array"),
    "a long header": (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", "a header of 2147483647 bytes"),
    "nothing": (b"", "no .npy header"),
    "a torn header": (npy("(1, 1, 1)")[:30], "no plain array"),
    "an unknown version": (b"\x93NUMPY\x09\x00" + b" " * 100, "no .npy header"),
    "too few bytes": (npy("(10, 3, 4)", data=b"\0" * 119), "needs 120 bytes, found 119"),
    "too many bytes": (npy("(10, 3, 4)", data=b"\0" * 121), "needs 120 bytes, found 121"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arrays_in_a_directory(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    save_trace(clean(32, 4), tmp_path / "t")
    (tmp_path / "t" / "expert_ids.npy").write_bytes(data)
    with pytest.raises(MoeplanError, match=r"expert_ids\.npy: not a readable \.npy") as caught:
        open_trace(tmp_path / "t")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arrays_in_an_npz(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    path = member(tmp_path, lambda archive: archive.writestr("expert_ids.npy", data))
    refuse(path, message)


def member(folder: Path, write: Callable[[zipfile.ZipFile], object]) -> Path:
    path = folder / "t.npz"
    buffer = {"request_offsets": np.array([0, 10]), "num_experts": np.array(32)}
    np.savez(path, **buffer)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        write(archive)
    return path


def test_a_decompression_bomb(tmp_path: Path) -> None:
    zeros = npy("(33554432, 1, 1)", data=bytes(1 << 25))
    path = member(tmp_path, lambda archive: archive.writestr("expert_ids.npy", zeros))
    assert path.stat().st_size < 100_000
    refuse(path, "a decompression bomb")


@pytest.mark.parametrize("claimed", [1 << 31, 0xFFFFFFFE])
def test_an_archive_that_lies_about_sizes(tmp_path: Path, claimed: int) -> None:
    path = member(tmp_path, lambda archive: archive.writestr("expert_ids.npy", npy("(10, 3, 4)", data=b"\1" * 120)))
    raw = bytearray(path.read_bytes())
    at = raw.rfind(b"expert_ids.npy") - 46 + 24  # uncompressed size in the central directory (APPNOTE 4.3.12)
    raw[at : at + 4] = claimed.to_bytes(4, "little")
    path.write_bytes(bytes(raw))
    refuse(path, f"expands to {claimed} bytes")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    save_trace(full(), tmp_path / "t")
    for name in ("expert_ids", "request_offsets", "layer_ids", "phase", "domain"):
        file = tmp_path / "t" / f"{name}.npy"
        whole = file.read_bytes()
        for keep in (0, 5, 9, 40, 127, 128, len(whole) - 1):
            file.write_bytes(whole[:keep])
            with pytest.raises(MoeplanError, match=name):
                open_trace(tmp_path / "t")
        file.write_bytes(whole)
    (tmp_path / "t" / "expert_ids.npy").unlink()
    refuse(tmp_path / "t", "no such file")


def test_ids_are_read_before_they_are_trusted(tmp_path: Path) -> None:
    trace = clean(32, 4)
    ids = signed(trace)
    ids[777, 2, 1] = 32
    save_trace(replace(trace, expert_ids=ids), tmp_path / "t")
    open_trace(tmp_path / "t")
    with pytest.raises(MoeplanError, match=r"expert_ids\[777, 2, 1\] = 32 is outside -1\.\.31"):
        load_trace(tmp_path / "t")


def test_mapped_rows_are_read_from_the_file(tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.int16).reshape(20, 3)
    np.save(tmp_path / "a.npy", array)
    mapped = map_array(tmp_path / "a.npy")
    assert (read_rows(mapped, 5, 99) == array[5:]).all()
    assert (read_rows(mapped[3:], 1, 4) == array[4:7]).all()
    (tmp_path / "b.npy").write_bytes((tmp_path / "a.npy").read_bytes())
    other = map_array(tmp_path / "b.npy")
    (tmp_path / "b.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-10])
    with pytest.raises(MoeplanError, match="became shorter"):
        read_rows(other, 0, 20)


def test_only_asked_arrays_are_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], dtype=object), allow_pickle=True)
    path = member(tmp_path, lambda archive: archive.writestr("other.npy", buffer.getvalue()))
    assert set(load_arrays(path, ("num_experts",), ("absent",))) == {"num_experts"}
    with pytest.raises(MoeplanError, match="no array 'expert_ids'"):
        open_trace(path)


def test_hostile_files_take_no_memory(tmp_path: Path) -> None:
    """The command refuses under a limit on address space, in which 10^12 rows or an expanded bomb do not fit."""
    (tmp_path / "t").mkdir()
    save_trace(clean(32, 4), tmp_path / "t" / "t")
    (tmp_path / "t" / "t" / "expert_ids.npy").write_bytes(HOSTILE["10^12 rows"][0])
    zeros = npy("(1600000000, 1, 1)", data=b"")

    def bomb(archive: zipfile.ZipFile) -> None:
        with archive.open("expert_ids.npy", "w", force_zip64=True) as file:
            file.write(zeros)
            for _ in range(200):
                file.write(bytes(8_000_000))

    for path in (tmp_path / "t" / "t", member(tmp_path, bomb)):
        done = subprocess.run(
            [sys.executable, "-m", "moeplan", "trace", "check", str(path)],
            capture_output=True,
            text=True,
            check=False,
            env={"OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
        )
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
