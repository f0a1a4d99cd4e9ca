"""Derive the shipped stream parameters (lasting preference and memory, a layer) of a profile from its trace.

python benchmarks/derive_stream.py ROUTING/gpt-oss-20b.decode-topk.npz traces/gpt-oss-20b
"""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

from moeplan.traffic.recipe import recipe_of_trace, save_streams
from moeplan.traffic.trace import load_trace


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    own = tomllib.loads((folder / "header.toml").read_text(encoding="utf-8"))
    recipe = recipe_of_trace(replace(load_trace(source), name=folder.name), allow_thin=False, seed=0)
    header = {key: own[key] for key in ("model", "source", "repository", "commit", "licence")}
    said = f"fitted by moeplan to {recipe.tokens} rows in token order; overlap = mean over requests, windows pooled"
    save_streams(recipe, folder / "stream.toml", header | {"derived": said})


main()
