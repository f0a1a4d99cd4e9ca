"""`trace synth`: a routing trace made from a popularity and stream parameters."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from moeplan.cli.common import Json, Seed, Traces, emit, note, store, table
from moeplan.errors import MoeplanError


def register_synth(sub: typer.Typer) -> None:
    """Add `synth` to the `trace` group."""
    sub.command("synth")(synth)


def synth(  # noqa: PLR0913, PLR0917 - one argument an option
    source: Annotated[str, typer.Argument(help="Profile under traces/, or a trace (folder or .npz) to fit.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the trace to write.")],
    requests: Annotated[int, typer.Option(help="Requests.", min=1, max=100_000)] = 256,
    length: Annotated[int, typer.Option(help="Decode tokens a request.", min=1, max=100_000)] = 256,
    skew: Annotated[float, typer.Option(help="Power of the popularity: 1 as it is, 0 uniform.")] = 1.0,
    stream: Annotated[
        str | None, typer.Option(help="Profile whose stream parameters are taken (default: its own).")
    ] = None,
    allow_thin: Annotated[bool, typer.Option("--allow-thin", help="Take a source of fewer than 2,000 tokens.")] = False,
    traces: Traces = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write a synthetic trace and compare it with what it was made from."""
    import numpy as np

    from moeplan.traffic.recipe import recipe_of_profile, recipe_of_trace, skewed, synth_document, synthesize
    from moeplan.traffic.trace import load_trace, save_trace

    if seed < 0:
        raise MoeplanError(f"--seed {seed}: must not be negative")
    if output.exists():
        raise MoeplanError(f"--output {output}: exists already")
    if Path(source).exists():
        if stream is not None:
            raise MoeplanError(f"--stream {stream}: a trace brings its own stream parameters")
        recipe = recipe_of_trace(load_trace(Path(source)), allow_thin, seed)
    else:
        recipe = recipe_of_profile(source, store(traces=traces), allow_thin, stream)
    if skew != 1.0:
        bent, said = skewed(recipe.shares, recipe.top_k, skew), f"popularity to the power {skew:g}: not measured"
        recipe = replace(recipe, shares=bent, overlap={}, window={}, notes=(*recipe.notes, said))
    trace = synthesize(recipe, np.full(requests, length, dtype=np.int64), seed)
    save_trace(trace, output)
    document = synth_document(recipe, trace, seed) | {"output": str(output)}
    for line in document["notes"]:
        note(line)
    if as_json:
        emit(document)
    else:
        _print(document)


def _print(document: dict[str, Any]) -> None:
    d = document
    size = f"top-{d['top_k']} of {d['experts']}, {d['layers']} layers"
    typer.echo(f"{d['output']}: {d['name']}, {d['rows']} rows of {d['requests']} requests, {size}")
    typer.echo(f"streams {d['streams']}; synthetic, seed {d['seed']}\n")
    rows = [[f"batch {r['batch']}, distinct", f"{r['mean']:.2f}", _maybe(r["wanted"])] for r in d["distinct"]]
    rows += [[f"window {r['tokens']}, distinct", f"{r['distinct']:.2f}", _maybe(r["wanted"])] for r in d["window"]]
    rows += [[f"lag {r['lag']}, shared", f"{r['shared']:.2f}", _maybe(r["wanted"])] for r in d["overlap"]]
    table(["", "this trace", "wanted"], rows)


def _maybe(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
