"""Which foreign format a file has, told from its content where that is unambiguous."""

from pathlib import Path
from typing import Any

from moeplan.errors import MoeplanError
from moeplan.traffic.importers import imatrix, mblt, moe_cache_lab, moe_trace
from moeplan.traffic.importers.arrays import is_archive, npy_file
from moeplan.traffic.importers.reading import fail, json_documents, read_head

_HEAD = 1 << 12


def detect(path: Path) -> str:
    """The name of the format. Raises MoeplanError where the content does not tell."""
    head = read_head(path, _HEAD)
    found = _by_magic(head, path) or _by_text(head, path)
    if found is None:
        raise fail(path, "format not recognised: give --format")
    return found


def _by_magic(head: bytes, path: Path) -> str | None:
    if head[:4] == imatrix.MAGIC:
        return "imatrix"
    if head[:4] == mblt.MAGIC.to_bytes(4, "little"):
        return "mblt"
    if head[:6] == b"\x93NUMPY":
        return "router-logits" if npy_file(path).dtype.kind == "f" else "vllm"
    if head[:4] == b"PK\x03\x04":
        archive = is_archive(path)
        names = archive.names if archive else []
        if any(name == "data.pkl" or name.endswith("/data.pkl") for name in names):
            return "sglang-recorder"
        if "expert_ids.npy" in names:
            raise fail(path, "is a canonical trace already")
        return "router-logits" if names and all(name.endswith(".npy") for name in names) else None
    return "trtllm" if len(head) > 8 and head[8:9] == b"{" and path.suffix == ".safetensors" else None


def _by_text(head: bytes, path: Path) -> str | None:
    if moe_trace.ROW.fullmatch(head.split(b"\n", 1)[0]):
        return "moe-trace"
    if head.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        record = next((document for _, document in json_documents(path)), {})
    except MoeplanError:
        return None
    return _by_record(record)


def _by_record(record: dict[str, Any]) -> str | None:
    if record.get("format") == moe_cache_lab.FORMAT:
        return "moe-cache-lab"
    if record.get("type") in ("meta", "route"):
        return "route-jsonl"
    if isinstance(record.get("meta_info"), dict):
        return "sglang"
    choices = record.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    if "sgl_ext" in choices[0]:
        return "sglang"
    return "vllm" if "routed_experts" in choices[0] else None
