"""`moeplan simulate` on the shipped M1 Ultra calibration."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moeplan.cli import app
from moeplan.errors import MoeplanError

BASE = ["simulate", "qwen3-30b-a3b-4bit", "--device", "m1-ultra", "--engine", "mlx-lm"]
FIELDS = {
    "requests", "completed", "simulated_tokens", "steps", "wall_s", "overloaded", "aggregate_tok_s",
    "decode_tok_s_mean", "ttft_mean_s", "ttft_p95_s", "tpot_mean_s", "batch_mix",
}  # fmt: skip
SCOPE = "expert path only: attention, head and host are not included"


def run(*words: str) -> str:
    done = CliRunner().invoke(app, [*BASE, *words], catch_exceptions=False, standalone_mode=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def document(*words: str) -> dict[str, Any]:
    found = json.loads(run(*words, "--json"))
    assert isinstance(found, dict)
    return found


def test_json_has_the_stable_fields() -> None:
    found = document("--clients", "4", "--prompt-tokens", "64", "--max-tokens", "10", "--rounds", "2")
    assert set(found) >= FIELDS
    assert (found["requests"], found["completed"], found["simulated_tokens"]) == (8, 8, 80)
    assert found["batch_mix"] == [
        {"decode_rows": 0, "prefill_rows": 252, "steps": 2, "padding_rows": 0},
        {"decode_rows": 4, "prefill_rows": 0, "steps": 20, "padding_rows": 0},
    ]
    assert found["notes"][0] == SCOPE
    assert found["tpot_mean_s"] == pytest.approx(9.69e-3)  # 48 layers at 4 tokens, as published (9.71 and 9.67 ms)


def test_same_seed_same_bytes_but_for_wall_s() -> None:
    def stream(seed: str) -> dict[str, Any]:
        found = document("--rate", "0.5", "--count", "40", "--max-batch", "8", "--seed", seed)
        assert found.pop("wall_s") > 0
        return found

    assert stream("1") == stream("1")
    assert stream("1")["ttft_mean_s"] != stream("2")["ttft_mean_s"]


def test_several_client_counts_are_a_list_of_runs() -> None:
    found = document("--clients", "1,2,4", "--rounds", "1")
    assert [one["clients"] for one in found["runs"]] == [1, 2, 4]
    rates = [one["aggregate_tok_s"] for one in found["runs"]]
    assert rates == sorted(rates)


def test_text_says_what_is_priced() -> None:
    text = run("--clients", "1,2")
    assert SCOPE in text.splitlines()
    assert "aggregate tok/s" in text


def test_request_file_with_and_without_clients(tmp_path: Path) -> None:
    file = tmp_path / "requests.csv"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,9,5\n100.0,9,5\n")
    timed = document("--requests", str(file))
    assert {count["decode_rows"] for count in timed["batch_mix"]} == {0, 1}  # 100 s apart: never together
    together = document("--requests", str(file), "--clients", "2")
    assert {count["decode_rows"] for count in together["batch_mix"]} == {0, 2}


def test_beyond_the_calibrated_sizes_is_refused_or_labelled() -> None:
    with pytest.raises(MoeplanError, match="outside the calibrated range"):
        run("--clients", "16")
    assert document("--clients", "16", "--extrapolate")["source"] == "extrapolated"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --clients, --rate or --requests"),
        (["--clients", "2", "--rate", "1"], "--rate 1.0: goes neither"),
        (["--clients", "x"], "--clients: 'x'"),
        (["--requests", "absent.csv"], "absent.csv: cannot read"),
        (["--clients", "1", "--routing", "popularity:absent"], "popularity:absent"),
        (["--clients", "1", "--path", "gather"], "--path gather"),
    ],
)
def test_errors_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(MoeplanError) as caught:
        run(*words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
