"""`trace record`: the routing of a local mlx-lm model while it answers prompts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeplan.cli.common import Json, Seed, emit, progress_bar
from moeplan.errors import MoeplanError

if TYPE_CHECKING:
    from moeplan.traffic.trace import RoutingTrace


def register_record(sub: typer.Typer) -> None:
    """Add `record` to the `trace` group."""
    sub.command("record")(record)


def record(  # noqa: PLR0913, PLR0917 - one argument an option
    model: Annotated[Path, typer.Option(help="Local folder of an mlx-lm model; nothing is downloaded.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the trace to write.")],
    prompts: Annotated[
        Path | None, typer.Option(help='One prompt a line; .jsonl: {"prompt": ..., "domain": ...} a line.')
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate a prompt.", min=1, max=1_000_000)] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt in the model's chat template.")] = False,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0.0)] = 0.0,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Generate with a local mlx-lm model and write which experts every token took."""
    from moeplan.runners.record import Sampling, load_local
    from moeplan.runners.record import record as run
    from moeplan.traffic.trace import save_trace

    if seed < 0:
        raise MoeplanError(f"--seed {seed}: must not be negative")
    if output.exists():
        raise MoeplanError(f"--output {output}: exists already")
    texts, domains = _read(prompts, prompt)
    loaded, tokenizer = load_local(model)
    batches = [[_encode(tokenizer, text, chat)] for text in texts]
    stop = frozenset(int(t) for t in tokenizer.eos_token_ids if t is not None)
    with progress_bar() as progress:
        trace = run(loaded, batches, max_tokens, Sampling(temperature, seed, stop), progress)
    about = dict(trace.provenance) | {"model": model.resolve().name, "chat_template": chat}
    trace = replace(trace, provenance=about, name=output.name, domains=domains)
    save_trace(trace, output)
    if as_json:
        emit(_document(trace, output))
    else:
        d = _document(trace, output)
        size = f"top-{d['top_k']} of {d['experts']}, {d['layers']} layers"
        rows = f"{d['prefill_rows']} prefill and {d['decode_rows']} decode rows"
        typer.echo(f"{output}: {rows} of {d['requests']} requests, {size}")


def _document(trace: "RoutingTrace", output: Path) -> dict[str, Any]:
    import numpy as np

    decode = 0 if trace.phase is None else int(np.count_nonzero(trace.phase))
    return {
        "output": str(output),
        "name": trace.name,
        "rows": trace.rows,
        "prefill_rows": trace.rows - decode,
        "decode_rows": decode,
        "requests": trace.requests,
        "layers": trace.layers,
        "layer_ids": trace.layer_ids.tolist(),
        "top_k": trace.top_k,
        "experts": trace.experts,
        "order": trace.order,
        "provenance": dict(trace.provenance),
    }


def _encode(tokenizer: Any, text: str, chat: bool) -> list[int]:
    if not chat:
        return [int(t) for t in tokenizer.encode(text)]
    if not getattr(tokenizer, "chat_template", None):
        raise MoeplanError("--chat: the model's tokenizer has no chat template")
    filled = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return [int(t) for t in tokenizer.encode(filled, add_special_tokens=False)]


def _read(file: Path | None, given: list[str] | None) -> tuple[list[str], tuple[str, ...] | None]:
    """Prompts, and their domains where every one has one."""
    if (file is None) == (not given):
        raise MoeplanError("give prompts by --prompts FILE or by --prompt TEXT, one of the two")
    if file is None:
        return list(given or []), None
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as bad:
        raise MoeplanError(f"--prompts {file}: cannot read: {' '.join(str(bad).split())[:200]}") from bad
    texts = [(i, line.rstrip("\r")) for i, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise MoeplanError(f"--prompts {file}: no prompt in it")
    if file.suffix != ".jsonl":
        return [text for _, text in texts], None
    found = [_object(file, number, text) for number, text in texts]
    domains = [one.get("domain") for one in found]
    labels = tuple(d for d in domains if isinstance(d, str))
    return [one["prompt"] for one in found], labels if len(labels) == len(found) else None


def _object(file: Path, number: int, text: str) -> dict[str, Any]:
    try:
        one = json.loads(text)
    except (ValueError, RecursionError):
        one = None
    if not isinstance(one, dict) or not isinstance(one.get("prompt"), str):
        raise MoeplanError(f'--prompts {file}: line {number}: expected an object with a text "prompt"')
    return one
