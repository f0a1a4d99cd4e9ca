"""Foreign routing files: one module a format, each with `read(paths, hints) -> RoutingTrace | ExpertCounts`.

No importer unpickles, imports or calls anything that a file names, and none needs torch. Whatever is wrong with a
file is one MoeplanError.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from moeplan.errors import MoeplanError
from moeplan.traffic.importers.counts import ExpertCounts
from moeplan.traffic.importers.detect import detect
from moeplan.traffic.importers.record import Hints
from moeplan.traffic.trace import RoutingTrace

FORMATS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "route-jsonl": "route_jsonl",
    "moe-cache-lab": "moe_cache_lab",
    "router-logits": "logits",
    "mblt": "mblt",
    "moe-trace": "moe_trace",
    "imatrix": "imatrix",
    "trtllm": "trtllm",
    "sglang-recorder": "sglang_recorder",
}


def import_files(
    paths: Sequence[Path], form: str | None = None, hints: Hints | None = None
) -> RoutingTrace | ExpertCounts:
    """Read files of one foreign format; `form` is one of FORMATS, or None to tell it from the first file.

    Raises MoeplanError naming file, field and value.
    """
    if not paths:
        raise MoeplanError("trace import: no file given")
    name = form or detect(paths[0])
    if name not in FORMATS:
        raise MoeplanError(f"--format {name}: expected one of {', '.join(FORMATS)}")
    module = import_module(f"moeplan.traffic.importers.{FORMATS[name]}")
    read: RoutingTrace | ExpertCounts = module.read(list(paths), hints or Hints())
    return read
