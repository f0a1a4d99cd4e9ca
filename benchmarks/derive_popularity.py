"""Derive the shipped popularity profiles (share of tokens that pick each expert, a layer) from routing data.

    python benchmarks/derive_popularity.py ROUTING traces

Profiles of fewer than 2,000 tokens are not shipped: their tail is sampling noise.
"""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeplan.store import write_text

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Profile:
    name: str
    counts: Counts  # [layers, experts] picks
    tokens: int
    source: dict[str, object]


def gpt_oss(folder: Path) -> Profile:
    with np.load(folder / "gpt-oss-20b.decode-topk.npz", allow_pickle=False) as data:
        ids, experts = data["expert_ids"], int(data["num_experts"])
    counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=experts) for layer in range(ids.shape[1])])
    source = {
        "model": "openai/gpt-oss-20b",
        "source": "greedy decode rows of 702 requests over public benchmarks, transformers router hooks",
        "repository": "AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting",
        "commit": "72b368f60045221f21eeb65debb27d58de92e565",
        "licence": "Apache-2.0",
    }
    return Profile("gpt-oss-20b", counts, len(ids), source)


def gemma(folder: Path) -> Profile:
    with np.load(folder / "gemma-4-26b-a4b-q6.layer-expert-counts.npz", allow_pickle=False) as data:
        counts = data["all"].astype(np.int64)
    source = {
        "model": "google/gemma-4-26B-A4B",
        "source": "expert demand counts of a Q6 build, four workload families together",
        "repository": "crankysmh47/Expertflow",
        "commit": "b6b5f45b72d7b9aac042831dfd3d12eb7170a28c",
        "licence": "MIT",
    }
    return Profile("gemma-4-26b-a4b", counts, int(counts[0].sum()) // 8, source)


def olmoe(folder: Path) -> Profile:
    name = "olmoe-bf16.per-example-layer-expert-counts-256ex.npz"
    with np.load(folder / name, allow_pickle=False) as data:
        counts = data["counts"].sum(axis=0, dtype=np.int64)
    source = {
        "model": "allenai/OLMoE-1B-7B",
        "source": "teacher-forced prompt tokens of 256 examples, bf16",
        "repository": "pjordanandrsn/experts4bit-qlora",
        "commit": "6abb0ad123a05d2fea0a36fc14cd9893ce196c8b",
        "licence": "MIT",
    }
    return Profile("olmoe-1b-7b", counts, int(counts[0].sum()) // 8, source)


def mixtral(folder: Path) -> Profile:
    with np.load(folder / "olmoe+mixtral.layers-0-7-15.domain-counts.npz", allow_pickle=False) as data:
        domains = [key for key in data.files if key.startswith("mistral__expert_counts__")]
        counts = np.sum([data[key] for key in domains], axis=0, dtype=np.int64)
    source = {
        "model": "mistralai/Mixtral-8x7B",
        "source": "layers 0, 7 and 15 only; arxiv, book, c4, github and wikipedia in equal parts",
        "repository": "allenai/OLMoE",
        "commit": "357454f4f647385839c0ff6b99a688dc7cd9c13f",
        "licence": "Apache-2.0",
    }
    return Profile("mixtral-8x7b", counts, int(counts[0].sum()) // 2, source)


def write(profile: Profile, traces: Path) -> None:
    shares = profile.counts / profile.tokens
    top_k = round(float(shares[0].sum()))
    header = {
        **profile.source,
        "kind": "popularity",
        "tokens": profile.tokens,
        "layers": shares.shape[0],
        "experts": shares.shape[1],
        "top_k": top_k,
    }
    folder = traces / profile.name
    write_text(folder / "header.toml", "".join(f"{key} = {json.dumps(value)}\n" for key, value in header.items()))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, popularity=shares.astype(np.float64))
    (folder / "popularity.npz").write_bytes(buffer.getvalue())


def main(routing: Path, traces: Path) -> None:
    for derive in (gpt_oss, gemma, olmoe, mixtral):
        write(derive(routing), traces)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
