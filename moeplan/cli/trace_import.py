"""`trace import`: foreign routing files to a canonical trace, or to counts where they hold no more."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeplan.cli.common import Json, Models, emit, note, store
from moeplan.errors import MoeplanError

if TYPE_CHECKING:
    from moeplan.traffic.importers.counts import ExpertCounts
    from moeplan.traffic.importers.record import Hints
    from moeplan.traffic.trace import RoutingTrace

_FORMATS = (
    "vllm, sglang, route-jsonl, moe-cache-lab, router-logits, mblt, moe-trace, imatrix, trtllm or sglang-recorder;"
    " told from the content where that is unambiguous."
)


def register_import(sub: typer.Typer) -> None:
    """Add `trace import`."""
    sub.command("import")(import_)


def import_(  # noqa: PLR0913, PLR0917 - one argument an option
    files: Annotated[list[Path], typer.Argument(help="Files of one format, in order.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")],
    form: Annotated[str | None, typer.Option("--format", help=_FORMATS)] = None,
    model: Annotated[str | None, typer.Option(help="Model card, config.json or card.toml.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="All decoder layers, dense ones too.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Experts a token takes.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Routed experts a layer.")] = None,
    rule: Annotated[str | None, typer.Option(help="Router logits: softmax-topk, topk-softmax or sigmoid.")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Router logits: expert groups (n_group).")] = None,
    top_groups: Annotated[int | None, typer.Option(min=1, help="Router logits: groups kept (topk_group).")] = None,
    models: Models = None,
    as_json: Json = False,
) -> None:
    """Convert foreign routing files. Aggregate counts give popularity, never co-activation, and are marked."""
    from moeplan.traffic.importers import import_files
    from moeplan.traffic.importers.counts import ExpertCounts, save_counts
    from moeplan.traffic.trace import save_trace

    given = {"layers": layers, "top_k": top_k, "experts": experts}
    hints = _hints(model, {**given, "rule": rule, "groups": groups, "top_groups": top_groups}, models)
    if output.exists():
        raise MoeplanError(f"-o {output}: exists already")
    found = import_files(files, form, hints)
    if isinstance(found, ExpertCounts):
        save_counts(found, output)
        document = _counts_document(found, output)
    else:
        save_trace(found, output)
        document = _trace_document(found, output)
    for line in document["notes"]:
        note(line)
    if as_json:
        emit(document)
        return
    kept = "trace" if document["kind"] == "trace" else "counts (popularity only)"
    size = f"{document['layers']} layers, top-{document['top_k'] or '?'} of {document['experts']}"
    rows = f"{document['rows']} rows of {document['requests']} requests, " if "rows" in document else ""
    typer.echo(f"{output}: {kept} from {document['format']}: {rows}{size}")


def _hints(model: str | None, options: dict[str, Any], models: Path | None) -> "Hints":
    """The card's numbers; options that contradict it are refused."""
    from dataclasses import replace

    from moeplan.traffic.importers.record import Hints, hints_of
    from moeplan.traffic.model import load_card

    hints = hints_of(load_card(model, store(models))) if model else Hints()
    for key, value in options.items():
        known = getattr(hints, key)
        if value is not None and known not in (None, value):
            raise MoeplanError(f"--{key.replace('_', '-')} {value}: --model {model} has {known}")
    return replace(hints, **{key: value for key, value in options.items() if value is not None})


def _trace_document(trace: "RoutingTrace", output: Path) -> dict[str, Any]:
    return {
        "kind": "trace",
        "path": str(output),
        "rows": len(trace.expert_ids),
        "requests": len(trace.request_offsets) - 1,
        "layers": int(trace.expert_ids.shape[1]),
        "top_k": int(trace.expert_ids.shape[2]),
        "experts": trace.experts,
        "id_space": trace.id_space,
        "order": trace.order,
        **trace.provenance,
    }


def _counts_document(counts: "ExpertCounts", output: Path) -> dict[str, Any]:
    return {
        "kind": "counts",
        "path": str(output),
        "layers": len(counts.layer_ids),
        "top_k": counts.top_k,
        "experts": int(counts.counts.shape[1]),
        "tokens": counts.tokens,
        "pairs": int(counts.counts.sum()),
        **counts.provenance,
    }
