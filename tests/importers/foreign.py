"""Writers of the foreign layouts: written from the formats' descriptions, apart from the readers under test."""

import base64
import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def ids(rows: int = 9, layers: int = 3, top_k: int = 2, experts: int = 8, seed: int = 0) -> np.ndarray:
    """Distinct ids in random order; never all zero in a layer."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((rows, layers, experts)), axis=2)[:, :, :top_k].astype(np.int32)


def vllm(path: Path, parts: list[Any], usage: tuple[int, int] | None = None) -> Path:
    """Each part is a response of one choice: an array (base64 .npy), or a value put in as it is."""
    out = []
    for part in parts:
        value = b64(npy(part)) if isinstance(part, np.ndarray) else part
        response = {"id": "x", "choices": [{"index": 0, "text": "", "routed_experts": value}]}
        if usage:
            response["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
        out.append(json.dumps(response))
    path.write_text("\n".join(out) + "\n")
    return path


def sglang(path: Path, parts: list[np.ndarray], prompt: int = 4, openai: bool = False) -> Path:
    texts = [b64(part.astype("<i4").tobytes()) for part in parts]
    if openai:
        document: Any = {"choices": [{"sgl_ext": {"routed_experts": text}} for text in texts]}
    else:
        counts = [{"prompt_tokens": prompt, "completion_tokens": len(part) + 1 - prompt} for part in parts]
        document = [
            {"text": "", "meta_info": {"routed_experts": text, **count}}
            for text, count in zip(texts, counts, strict=True)
        ]
    path.write_text(json.dumps(document, indent=1))
    return path


def route_jsonl(path: Path, parts: list[np.ndarray], same_request: bool = False) -> Path:
    lines = [{"type": "meta", "model_id": "m", "layers_logged": [1, 3, 4], "top_k": 2, "num_experts": 8}]
    for number, part in enumerate(parts):
        name = "r" if same_request else f"r{number}"
        for column, layer in enumerate([1, 3, 4]):  # layer by layer, as an engine runs
            for token, row in enumerate(part):
                event = {"type": "route", "req_id": name, "token_idx": token, "layer": layer}
                lines.append(event | {"topk_ids": row[column].tolist(), "topk_weights": [0.5, 0.5]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def moe_cache_lab(
    path: Path, part: np.ndarray, prompt: int, version: int, change: dict[str, Any] | None = None
) -> Path:
    meta: dict[str, Any] = {"record_type": "metadata", "format": "moe-cache-lab.routing-jsonl"}
    meta |= {"format_version": version, "model_id": "m"}
    stage = {"num_experts": 8, "assigned_experts_per_token": part.shape[2], "allows_unassigned": True}
    if version == 1:
        meta |= {"num_experts": 8, "experts_per_token": part.shape[2], "source_text": None}
    else:
        meta["routing_stages"] = [{"routing_stage": name, **stage} for name in ("encoder", "decoder")]
    layers = range(part.shape[1])
    order = [(t, c) for c in layers for t in range(prompt)]
    order += [(t, c) for t in range(prompt, len(part)) for c in layers]
    lines = [meta]
    for token, column in order:
        chosen = [int(e) for e in part[token, column] if e >= 0]
        event = {"record_type": "routing_selection", "token_position": token, "layer": column + 2}
        event |= {"phase": "prompt" if token < prompt else "generated", "selected_experts": chosen}
        event["selected_probabilities"] = []
        if version == 2:
            event |= {"phase": f"decoder_{event['phase']}", "routing_stage": "decoder"}
            event["assignment_state"] = "assigned" if chosen else "unassigned"
            event |= {} if chosen else {"unassigned_reason": "capacity"}
        lines.append(event)
    lines[-1] |= change or {}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def mblt(path: Path, passes: list[list[np.ndarray]], experts: int = 8) -> Path:
    """passes[p][layer] = ids [tokens, k]."""
    words = [0x544C424D, 1, experts]
    for one in passes:
        for layer, part in enumerate(one):
            words += [layer, part.shape[1], len(part), *part.reshape(-1).tolist()]
    path.write_bytes(np.array(words, "<i4").tobytes())
    return path


def gguf(path: Path, tensors: dict[str, np.ndarray], kind: str = "imatrix", rows: int | None = None) -> Path:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    keys = text("general.type") + struct.pack("<I", 8) + text(kind)
    keys += text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 2) + text("wiki") + text("code")
    keys += text("imatrix.chunk_count") + struct.pack("<II", 4, 7)
    keys += text("imatrix.chunk_size") + struct.pack("<II", 4, 512)
    infos, data = b"", b""
    for name, array in tensors.items():
        data += b"\0" * (-len(data) % 32)
        shape = array.shape[::-1] if rows is None else (1, rows)
        infos += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos += struct.pack("<IQ", 0 if array.dtype == np.float32 else 26, len(data))
        data += array.tobytes()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 4) + keys + infos
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def safetensors(path: Path, tensors: dict[str, np.ndarray], change: dict[str, Any] | None = None) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data, names = b"", {"int32": "I32", "int64": "I64", "float32": "F32"}
    for name, array in tensors.items():
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape)}
        header[name]["data_offsets"] = [len(data), len(data) + array.nbytes]
        header[name] |= change or {}
        data += array.tobytes()
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


class _Stub:
    """Pickles as a name of another module, so that no torch is needed to write torch's layout."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class TorchWriter(pickle._Pickler):
    """`torch.save` in pure Python: arrays become _rebuild_tensor_v2 over persistent storages."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def __init__(self, file: io.BytesIO, size: tuple[int, ...] | None = None) -> None:
        """`size`: what the first tensor claims instead of its own size."""
        super().__init__(file, 2)
        self.storages: dict[str, bytes] = {}
        self.size = size

    def save_stub(self, obj: _Stub) -> None:
        self.write(b"c" + f"{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    dispatch[_Stub] = save_stub

    def save_array(self, obj: np.ndarray) -> None:
        key = str(len(self.storages))
        kinds = {"int32": "IntStorage", "int64": "LongStorage", "float32": "FloatStorage"}
        self.storages[key] = obj.tobytes()
        self.save(_Stub("torch._utils", "_rebuild_tensor_v2"))
        self.write(pickle.MARK + pickle.MARK)
        for part in ("storage", _Stub("torch", kinds[obj.dtype.name]), key, "cpu", obj.size):
            self.save(part)
        self.write(pickle.TUPLE + pickle.BINPERSID)
        steps = tuple(step // obj.itemsize for step in obj.strides)
        size, self.size = self.size or obj.shape, None
        for part in (0, size, steps, False):
            self.save(part)
        self.save(_Stub("collections", "OrderedDict"))
        self.write(pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.TUPLE + pickle.REDUCE)

    dispatch[np.ndarray] = save_array


def torch_zip(
    path: Path,
    value: Any = None,
    raw: bytes | None = None,
    compress: int = zipfile.ZIP_STORED,
    size: tuple[int, ...] | None = None,
) -> Path:
    out = io.BytesIO()
    writer = TorchWriter(out, size)
    if raw is None:
        writer.dump(value)
        raw = out.getvalue()
    with zipfile.ZipFile(path, "w", compress) as archive:
        archive.writestr("dump/data.pkl", raw)
        archive.writestr("dump/byteorder", b"little")
        for key, data in writer.storages.items():
            archive.writestr(f"dump/data/{key}", data)
        archive.writestr("dump/version", b"3\n")
    return path
