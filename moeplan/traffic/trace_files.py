"""Reading and writing the two canonical layouts of a routing trace (docs/trace-format.md)."""

import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.arrays import load_arrays, map_array
from moeplan.traffic.trace import CHUNK_BYTES, Ids, RoutingTrace
from moeplan.traffic.trace_parts import meta_of, whole

FORMAT, VERSION = "moeplan-trace", 1
HEADER_LIMIT = 1 << 24
"""Bytes of a header.toml."""

_OPTIONAL = ("layer_ids", "phase", "request_tokens")
_NPZ_OPTIONAL = (*_OPTIONAL, "prompt_len", "domains", "id_space", "order", "meta_json")


def read_npz(path: Path) -> RoutingTrace:
    """The npz layout. Raises MoeplanError naming file, field and value."""
    arrays = load_arrays(path, ("expert_ids", "request_offsets", "num_experts"), _NPZ_OPTIONAL)
    number = arrays["num_experts"]
    if number.ndim != 0:
        raise MoeplanError(f"{path}: num_experts has {number.ndim} axes, expected 0")
    if number.dtype.kind not in "iu":
        raise MoeplanError(f"{path}: num_experts holds {number.dtype}, expected integers")
    requests = max(0, arrays["request_offsets"].size - 1)
    meta, domains = meta_of(_word(path, arrays, "meta_json", "{}"), requests)
    labels = arrays.get("domains")
    if labels is not None:
        if labels.dtype.kind != "U" or labels.shape != (requests,):
            raise MoeplanError(f"{path}: domains is {labels.dtype} {labels.shape}, expected text ({requests},)")
        domains = tuple(str(label) for label in labels)
    about = {
        "experts": int(number),
        "name": path.stem,
        "id_space": _word(path, arrays, "id_space", "logical"),
        "order": _word(path, arrays, "order", "set"),
        "domains": domains,
        "provenance": meta,
    }
    _tokens(path, arrays)
    return whole(path, arrays, about)


def _tokens(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """request_tokens from prompt_len, where prompt rows are recorded: prompt tokens + decode rows."""
    prompt, phase, edges = arrays.pop("prompt_len", None), arrays.get("phase"), arrays["request_offsets"]
    if prompt is None or phase is None or "request_tokens" in arrays or phase.shape != arrays["expert_ids"].shape[:1]:
        return
    if prompt.shape != (edges.size - 1,) or prompt.dtype.kind not in "iu":
        raise MoeplanError(
            f"{path}: prompt_len is {prompt.dtype} {prompt.shape}, expected whole numbers, one a request"
        )
    if not (phase == 0).any() or edges.dtype.kind not in "iu" or int(edges.min()) < 0 or int(edges.max()) > phase.size:
        return
    decoded = np.concatenate([[0], np.cumsum(phase == 1)])
    arrays["request_tokens"] = prompt.astype(np.int64) + np.diff(decoded[edges.astype(np.int64)])


def _word(path: Path, arrays: Mapping[str, npt.NDArray[Any]], key: str, default: str) -> str:
    array = arrays.get(key)
    if array is None:
        return default
    if array.ndim != 0 or array.dtype.kind != "U":
        raise MoeplanError(f"{path}: {key} is {array.dtype} {array.shape}, expected one text")
    return str(array)


def read_folder(folder: Path) -> RoutingTrace:
    """The directory layout; arrays stay in their files. Raises MoeplanError naming file, field and value."""
    header = _header(folder / "header.toml")
    arrays = {key: map_array(folder / f"{key}.npy") for key in ("expert_ids", "request_offsets")}
    arrays |= {key: map_array(folder / f"{key}.npy") for key in _OPTIONAL if (folder / f"{key}.npy").exists()}
    trace = whole(folder, arrays, {"id_space": "logical", "order": "set", "name": folder.name} | header)
    counts = {"rows": trace.rows, "layers": trace.layers, "top_k": trace.top_k}
    for key, found in counts.items():
        if key in header and header[key] != found:
            raise MoeplanError(f"{folder / 'header.toml'}: {key} = {header[key]!r}, the arrays have {found}")
    if trace.domains is not None and len(trace.domains) != trace.request_offsets.size - 1:
        raise MoeplanError(f"{folder}: domain.npy has {len(trace.domains)} entries, expected one a request")
    return trace


def _header(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > HEADER_LIMIT:
            raise MoeplanError(f"{path}: larger than {HEADER_LIMIT} bytes")
        header = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as bad:
        raise MoeplanError(f"{path}: cannot read: {bad.strerror or bad}") from bad
    except (ValueError, RecursionError) as bad:
        raise MoeplanError(f"{path}: not TOML: {' '.join(str(bad).split())[:200]}") from bad
    if header.get("format") != FORMAT:
        raise MoeplanError(f"{path}: format = {str(header.get('format'))[:40]!r}, expected {FORMAT!r}")
    if header.get("version") != VERSION:
        raise MoeplanError(f"{path}: version = {str(header.get('version'))[:40]}, this program reads {VERSION}")
    if type(header.get("experts")) is not int:
        raise MoeplanError(f"{path}: experts = {str(header.get('experts'))[:40]}, expected a whole number")
    for key, kind in (("name", str), ("provenance", dict)):
        if key in header and not isinstance(header[key], kind):
            raise MoeplanError(f"{path}: {key} = {str(header[key])[:40]!r}, expected {kind.__name__}")
    header.pop("domains", None)
    names = header.pop("domain_names", None)
    if names is not None:
        header["domains"] = _domains(path, names)
    return header


def _domains(path: Path, names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise MoeplanError(f"{path}: domain_names must be a list of texts")
    file = path.parent / "domain.npy"
    which = map_array(file)
    if which.ndim != 1 or which.dtype.kind not in "iu" or not ((which >= 0) & (which < len(names))).all():
        raise MoeplanError(f"{file}: expected whole numbers 0..{len(names) - 1}, one a request")
    return tuple(names[int(i)] for i in which)


def write_folder(trace: RoutingTrace, folder: Path, pieces: Iterable[Ids] | None = None) -> None:
    """See `trace.save_trace`. Ids are copied in chunks, so a mapped trace larger than memory can be saved.

    pieces: the ids in order, where trace.expert_ids has only their shape and type.
    """
    if folder.exists():
        raise MoeplanError(f"{folder}: exists already")
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        _fill(trace, temporary, pieces if pieces is not None else (ids for _, ids in trace.chunks(CHUNK_BYTES)))
        os.chmod(temporary, 0o755)
        os.rename(temporary, folder)
    except OSError as bad:
        raise MoeplanError(f"{folder}: cannot write: {bad.strerror or bad}") from bad
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _fill(trace: RoutingTrace, folder: Path, pieces: Iterable[Ids]) -> None:
    small: dict[str, npt.NDArray[Any]] = {
        "request_offsets": trace.request_offsets.astype("<i8"),
        "layer_ids": trace.layer_ids.astype("<i8"),
    }
    if trace.phase is not None:
        small["phase"] = trace.phase
    if trace.request_tokens is not None:
        small["request_tokens"] = trace.request_tokens.astype("<i8")
    names = sorted(set(trace.domains)) if trace.domains is not None else None
    if names is not None and trace.domains is not None:
        place = {name: i for i, name in enumerate(names)}
        small["domain"] = np.array([place[name] for name in trace.domains], dtype="<i4")
    for key, array in small.items():
        np.save(folder / f"{key}.npy", np.asarray(array), allow_pickle=False)
    dtype = trace.expert_ids.dtype.newbyteorder("<")
    with (folder / "expert_ids.npy").open("wb") as file:
        shape = tuple(int(n) for n in trace.expert_ids.shape)
        np.lib.format.write_array_header_1_0(
            file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        )
        for ids in pieces:
            file.write(np.ascontiguousarray(ids, dtype=dtype).data)
    (folder / "header.toml").write_text(_toml(trace, names), encoding="utf-8")


def _toml(trace: RoutingTrace, names: list[str] | None) -> str:
    head = {
        "format": FORMAT,
        "version": VERSION,
        "name": trace.name,
        "rows": trace.rows,
        "layers": trace.layers,
        "top_k": trace.top_k,
        "experts": trace.experts,
        "id_space": trace.id_space,
        "order": trace.order,
    }
    if names is not None:
        head["domain_names"] = names
    lines = [f"{key} = {_value(value)}" for key, value in head.items()]
    lines += ["", "[provenance]"]
    lines += [f"{_text(key)} = {_value(value)}" for key, value in trace.provenance.items() if value is not None]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """One TOML value: texts, numbers, lists and tables of them; anything else as text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(one) for one in value if one is not None) + "]"
    return _text(value)


def _text(value: Any) -> str:
    """A TOML basic string: JSON's escapes, plus DEL; halves of surrogate pairs become question marks."""
    plain = str(value).encode("utf-8", "replace").decode("utf-8")
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007F")
