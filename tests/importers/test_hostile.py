"""Truncated, oversized, wrongly typed and hostile files are refused in one line, and nothing in them runs."""

import base64
import json
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeplan.errors import MoeplanError
from moeplan.traffic.importers import FORMATS, import_files
from moeplan.traffic.importers.record import Hints
from tests.importers import foreign

A = foreign.ids(9, seed=1)
HINTS = Hints(experts=8, top_k=2, layers=3, rule="softmax-topk")
TABLE = np.arange(1, 9, dtype=np.int32)
RECORD = {"topk_ids_of_layer": A.transpose(1, 0, 2).copy(), "positions": list(range(9)), "forward_mode": 2}
DUMP = {"records": [RECORD], "last_physical_to_logical_map": np.tile(np.arange(8), (3, 1))}
COUNTS = {"blk.0.ffn_up_exps.weight.counts": TABLE.astype(np.float32)[:, None]}


def npz(path: Path) -> Path:
    np.savez(path, layer_0=np.random.default_rng(0).random((9, 8)))
    return path


def npy(path: Path) -> Path:
    np.save(path, np.random.default_rng(0).random((2, 9, 8)))
    return path


# One sound file of every format: cut, changed and fed to every importer below.
SOUND: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "vllm": ("r.json", lambda p: foreign.vllm(p, [A.astype("u1")])),
    "sglang": ("r.json", lambda p: foreign.sglang(p, [A])),
    "route-jsonl": ("r.jsonl", lambda p: foreign.route_jsonl(p, [A])),
    "moe-cache-lab": ("r.jsonl", lambda p: foreign.moe_cache_lab(p, A, 4, 1)),
    "router-logits": ("r.npy", npy),
    "router-logits:npz": ("r.npz", npz),
    "mblt": ("r.bin", lambda p: foreign.mblt(p, [[A[:4, layer] for layer in range(3)]])),
    "moe-trace": ("r.csv", lambda p: p.write_text("0,1\n0,2\n1,3\n1,4\n") and p),
    "imatrix": ("r.gguf", lambda p: foreign.gguf(p, COUNTS)),
    "trtllm": ("r.safetensors", lambda p: foreign.safetensors(p, {"1_0": TABLE})),
    "sglang-recorder": ("r.pt", lambda p: foreign.torch_zip(p, DUMP)),
}


def read(path: Path, form: str) -> object:
    return import_files([path], form.partition(":")[0], HINTS)


def refused(path: Path, form: str, match: str) -> None:
    with pytest.raises(MoeplanError, match=match) as caught:
        read(path, form)
    text = str(caught.value)
    assert text.isascii()
    assert "\n" not in text
    assert len(text) <= 400
    assert path.name in text or path.stem in text


def test_a_sound_file_of_every_format_is_read(tmp_path: Path) -> None:
    assert {form.partition(":")[0] for form in SOUND} == set(FORMATS)
    for form, (name, write) in SOUND.items():
        assert read(write(tmp_path / name), form) is not None


@pytest.mark.parametrize("form", [name for name in SOUND if name not in ("moe-trace", "mblt")])
def test_a_truncated_file_is_refused(tmp_path: Path, form: str) -> None:
    """Line formats and MBLT stay sound at a record's end; these never do, except at the last line's."""
    name, write = SOUND[form]
    whole = write(tmp_path / name).read_bytes()
    for part in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
        (tmp_path / name).write_bytes(whole[: int(part * len(whole)) - (part == 0.99)])
        refused(tmp_path / name, form, ".")


def test_a_cut_mblt_header_or_csv_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.bin").write_bytes(struct.pack("<2i", 0x544C424D, 1))
    refused(tmp_path / "r.bin", "mblt", "too short")
    (tmp_path / "r.bin").write_bytes(struct.pack("<8i", 0x544C424D, 1, 8, 0, 2, 1000000, 1, 2))
    refused(tmp_path / "r.bin", "mblt", "no complete pass")
    (tmp_path / "r.csv").write_text("0,1\n0,")
    refused(tmp_path / "r.csv", "moe-trace", "line 2: '0,', expected layer,expert")


def header(shape: str, descr: str = "<u1") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize("form", list(SOUND))
def test_a_header_that_claims_a_million_million_rows_is_refused(tmp_path: Path, form: str) -> None:
    huge = 10**12
    path = tmp_path / SOUND[form][0]
    match form:
        case "vllm":
            foreign.vllm(path, [foreign.b64(header(f"({huge}, 3, 2)") + b"\1" * 64)])
        case "sglang":
            path.write_text(json.dumps({"meta_info": {"routed_experts": foreign.b64(b"\1" * 30)}}))
        case "route-jsonl" | "moe-cache-lab":
            text = SOUND[form][1](path).read_text().replace('"layer": 4', f'"layer": {huge}')
            path.write_text(text)
        case "router-logits":
            path.write_bytes(header(f"({huge}, 8)", "<f4") + b"\0" * 64)
        case "router-logits:npz":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("l0.npy", header(f"({huge}, 8)", "<f4") + b"\0" * 64)
        case "mblt":
            path.write_bytes(struct.pack("<8i", 0x544C424D, 1, 8, 0, 2, 2**31 - 1, 1, 2))
        case "moe-trace":
            path.write_text(f"{huge},1\n")
        case "imatrix":
            foreign.gguf(path, COUNTS, rows=huge)
        case "trtllm":
            foreign.safetensors(path, {"1_0": TABLE}, {"shape": [huge]})
        case _:
            foreign.torch_zip(path, DUMP, size=(3, huge, 8))
    refused(path, form, ".")


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    for size in ((3, 10, 8), (3, 10**12, 8), (3, 9)):
        refused(foreign.torch_zip(tmp_path / "r.pt", DUMP, size=size), "sglang-recorder", "storage|size|axes")


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path, protocol: int) -> None:
    ran = tmp_path / "ran"
    raw = pickle.dumps({"records": [Evil(ran)]}, protocol)
    refused(foreign.torch_zip(tmp_path / "r.pt", raw=raw), "sglang-recorder", "only plain data and tensors")
    np.save(tmp_path / "r.npy", np.array([Evil(ran)], dtype=object), allow_pickle=True)
    refused(tmp_path / "r.npy", "router-logits", "plain array of numbers")
    text = base64.b64encode((tmp_path / "r.npy").read_bytes()).decode()
    refused(foreign.vllm(tmp_path / "r.json", [text]), "vllm", "plain array of numbers")
    assert not ran.exists()
    pickle.loads(raw)
    assert ran.exists(), "the trap itself must work"


def test_wrong_types_are_refused(tmp_path: Path) -> None:
    refused(foreign.vllm(tmp_path / "a.json", [A.astype("f4")]), "vllm", "holds float32, expected uint8 or uint16")
    refused(foreign.vllm(tmp_path / "b.json", [[*A.tolist()[:2], [[1.5, 2]] * 3]]), "vllm", "1.5, expected a whole")
    refused(foreign.vllm(tmp_path / "c.json", [A.astype("u1") + 9]), "vllm", "expert id .* is outside 0..7")
    np.save(tmp_path / "d.npy", A)
    refused(tmp_path / "d.npy", "router-logits", "expected floating-point logits")
    bad = {"blk.0.ffn_up_exps.weight.counts": TABLE[:, None]}
    refused(foreign.gguf(tmp_path / "e.gguf", bad), "imatrix", "type 26")
    refused(foreign.gguf(tmp_path / "f.gguf", COUNTS, kind="model"), "imatrix", "general.type = 'model'")
    refused(foreign.safetensors(tmp_path / "g.safetensors", {"1_0": TABLE.astype("f4")}), "trtllm", "dtype 'F32'")
    floats = dict(DUMP, records=[dict(RECORD, topk_ids_of_layer=RECORD["topk_ids_of_layer"].astype("f4"))])
    refused(foreign.torch_zip(tmp_path / "h.pt", floats), "sglang-recorder", "holds FloatStorage")
    event = {"surprise": 1}
    refused(foreign.moe_cache_lab(tmp_path / "i.jsonl", A, 4, 1, event), "moe-cache-lab", "unknown field 'surprise'")
    event = {"token_position": 5}
    refused(foreign.moe_cache_lab(tmp_path / "j.jsonl", A, 4, 1, event), "moe-cache-lab", "out of order")
    np.savez(tmp_path / "k.npz", layer_0=np.array([[np.nan] * 8]))
    refused(tmp_path / "k.npz", "router-logits", "not finite")


def test_a_zip_bomb_is_refused(tmp_path: Path) -> None:
    zeros = b"\0" * (64 << 20)
    with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("layer_0.npy", header(f"({len(zeros) // 32}, 8)", "<f4") + zeros)
    refused(tmp_path / "b.npz", "router-logits", "zip bomb")
    path = foreign.torch_zip(tmp_path / "b.pt", DUMP, compress=zipfile.ZIP_DEFLATED)
    refused(path, "sglang-recorder", "is compressed, which this format never is")


def test_endless_nesting_and_oversized_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "n.json").write_text("[" * 200_000)
    refused(tmp_path / "n.json", "vllm", "not JSON")
    (tmp_path / "w.json").write_text("[" + "[]," * (1 << 22) + "[]]")
    refused(tmp_path / "w.json", "vllm", "4194306 lists and objects in one JSON text")
    foreign.torch_zip(tmp_path / "n.pt", raw=b"\x80\x02" + b"]" * (1 << 22) + b".")
    refused(tmp_path / "n.pt", "sglang-recorder", "more than 2097152 objects")
    loop = b"\x80\x02]q\0h\0a."  # a list that holds itself
    refused(foreign.torch_zip(tmp_path / "l.pt", raw=loop), "sglang-recorder", "holds no dict")
    with (tmp_path / "o.jsonl").open("wb") as file:
        file.truncate((1 << 32) + 1)  # sparse: claims 4 GiB, holds nothing
    for form in FORMATS:
        refused(tmp_path / "o.jsonl", form, "the limit is|bytes|--")
    with (tmp_path / "p.jsonl").open("wb") as file:
        file.truncate(1 << 31)  # one line of zeros
    for form in ("vllm", "route-jsonl", "moe-cache-lab", "moe-trace"):
        refused(tmp_path / "p.jsonl", form, "longer than")


HUNGRY = """
import sys
from pathlib import Path
from moeplan.errors import MoeplanError
from moeplan.traffic.importers import import_files
from moeplan.traffic.importers.record import Hints
for name in sys.argv[1:]:
    form, _, file = name.partition("=")
    try:
        import_files([Path(file)], form, Hints(experts=8, top_k=2, layers=3, rule="softmax-topk"))
    except MoeplanError:
        pass
    else:
        raise SystemExit(f"{name} was accepted")
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_refusals_take_little_memory(tmp_path: Path) -> None:
    """Peak resident memory of one process that refuses them all, in MiB."""
    (tmp_path / "a.npy").write_bytes(header(f"({10**12}, 8)", "<f4") + b"\0" * 64)
    foreign.gguf(tmp_path / "b.gguf", COUNTS, rows=10**12)
    with zipfile.ZipFile(tmp_path / "c.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("l0.npy", header(f"({4 << 20}, 8)", "<f4") + b"\0" * (128 << 20))
    foreign.torch_zip(tmp_path / "d.pt", raw=b"\x80\x02" + b"]\x94" * (1 << 22) + b".")
    (tmp_path / "e.bin").write_bytes(struct.pack("<8i", 0x544C424D, 1, 8, 0, 2, 2**31 - 1, 1, 2))
    forms = ("router-logits", "imatrix", "router-logits", "sglang-recorder", "mblt")
    files = sorted(path for path in tmp_path.iterdir())
    words = [f"{form}={path}" for form, path in zip(forms, files, strict=True)]
    done = subprocess.run([sys.executable, "-c", HUNGRY, *words], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 512


def mutated() -> st.SearchStrategy[tuple[str, list[tuple[float, int]], float]]:
    """A format, bytes to overwrite at relative places, and where to cut."""
    changes = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6)
    return st.tuples(st.sampled_from(sorted(SOUND)), changes, st.sampled_from([1.0, 1.0, 0.9, 0.5]))


def attempt(path: Path) -> None:
    """Every importer, and detection, on one file: a record or one MoeplanError, nothing else."""
    for form in (None, *FORMATS):
        refusal = ""
        try:
            import_files([path], form, HINTS)
        except MoeplanError as bad:
            refusal = str(bad)
        assert "\n" not in refusal


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), prefix=st.sampled_from([b"", b"GGUF\x03\0\0\0", b"MBLT\x01\0\0\0", b"PK\x03\x04"]))
def test_arbitrary_bytes_never_give_a_traceback(tmp_path: Path, data: bytes, prefix: bytes) -> None:
    path = tmp_path / "any.npz"
    path.write_bytes(prefix + data)
    attempt(path)
    attempt(path.rename(tmp_path / "any.safetensors"))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=mutated())
def test_damaged_files_never_give_a_traceback(tmp_path: Path, case: tuple[str, list[tuple[float, int]], float]) -> None:
    form, changes, keep = case
    name, write = SOUND[form]
    raw = bytearray(write(tmp_path / name).read_bytes())
    for place, value in changes:
        raw[int(place * len(raw))] = value
    (tmp_path / name).write_bytes(raw[: int(keep * len(raw))])
    attempt(tmp_path / name)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=80), changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255))))
def test_arbitrary_pickles_never_give_a_traceback(
    tmp_path: Path, body: bytes, changes: list[tuple[float, int]]
) -> None:
    path = foreign.torch_zip(tmp_path / "r.pt", raw=b"\x80\x02" + body)
    attempt(path)
    foreign.torch_zip(path, DUMP)
    with zipfile.ZipFile(path) as archive:
        members = {name: bytearray(archive.read(name)) for name in archive.namelist()}
    raw = members["dump/data.pkl"]
    for place, value in changes:
        raw[int(place * len(raw))] = value
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, bytes(content))
    attempt(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["choices", "routed_experts", "meta_info", "type", "layer", "usage"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(form=st.sampled_from(["vllm", "sglang", "route-jsonl", "moe-cache-lab"]), data=st.data())
def test_sound_records_with_any_value_anywhere_never_give_a_traceback(
    tmp_path: Path, form: str, data: st.DataObject
) -> None:
    name, write = SOUND[form]
    text = write(tmp_path / name).read_text()
    documents = [json.loads(line) for line in text.splitlines()] if form != "sglang" else json.loads(text)
    target = data.draw(st.sampled_from(documents))
    while True:
        key = data.draw(st.sampled_from(list(target) if isinstance(target, dict) else list(range(len(target)))))
        if not isinstance(target[key], dict | list) or not target[key] or data.draw(st.booleans()):
            break
        target = target[key]
    target[key] = data.draw(json_values)
    (tmp_path / name).write_text("\n".join(json.dumps(one) for one in documents))
    attempt(tmp_path / name)
