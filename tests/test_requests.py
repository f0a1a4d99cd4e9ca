"""Request files: every known form, exact times, one-line errors."""

from pathlib import Path

import pytest

from moeplan.errors import MoeplanError
from moeplan.serving.requests import Request, closed_loop, poisson, read_requests

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "requests"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="public request traces are not beside this checkout")
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(folder: Path, text: str, name: str = "requests.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_keeps_the_seventh_digit_across_midnight(tmp_path: Path) -> None:
    rows = "2023-11-16 23:59:59.9999999,374,44\r\n2023-11-17 00:00:00.0000001,396,109\r\n"
    read = read_requests(written(tmp_path, AZURE + rows)).requests
    assert read == (Request(374, 44, 0.0), Request(396, 109, 2e-7))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.jsonl", '{"timestamp": 1000, "input_length": 7, "output_length": 5, "hash_ids": [0]}\n'
                    '{"timestamp": 2500, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n'),
        ("m.csv", "timestamp_ms,input_length,output_length,n_hash_ids\n1000,7,5,1\n2500,9,2,1\n"),
        ("v.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,7,5\n1.5,9,2\n"),
        ("s.jsonl", '{"input_toks":7,"output_toks":5,"arrival_time_ns":0}\n\n'
                    '{"input_toks":9,"output_toks":2,"arrival_time_ns":1500000000}\n'),
        ("later-first.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n2.5,9,2\n1.0,7,5\n"),
        ("bom.csv", "\ufeffarrived_at,num_prefill_tokens,num_decode_tokens\n1.0,7,5\n2.5,9,2\n"),
    ],
)  # fmt: skip
def test_forms_agree(tmp_path: Path, name: str, text: str) -> None:
    assert read_requests(written(tmp_path, text, name)).requests == (Request(7, 5, 0.0), Request(9, 2, 1.5))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", AZURE + "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15,1,1\n", "a.csv:3: TIMESTAMP: '2023-11-16 1"),
        ("a.csv", AZURE + "2023-11-16 18:15:46.68059001234,374,44\n", "a.csv:2: TIMESTAMP"),
        ("a.csv", AZURE + "2023-11-16 18:15:46.68,0,44\n", "a.csv:2: ContextTokens: '0'"),
        ("a.csv", AZURE + "2023-11-16 18:15:46.68,3,4.5\n", "a.csv:2: GeneratedTokens: '4.5'"),
        ("a.csv", AZURE + "2023-11-16 18:15:46.68,3\n", "a.csv:2: 2 fields under a heading of 3"),
        ("a.csv", AZURE, "a.csv: holds no request"),
        ("a.csv", "", "a.csv: holds no request"),
        ("a.csv", "time,in,out\n1,2,3\n", "a.csv: unknown columns 'time'"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n2,3\n", "no arrival times (column arrived_at)"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 7, "output_length": 5}\n{"timest', "a.jsonl:2: not JSON"),
        ("a.jsonl", "[1, 2]\n", "a.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"timestamp": null, "input_length": 7, "output_length": 5}\n', "a.jsonl:1: timestamp: None"),
        ("a.jsonl", '{"timestamp": NaN, "input_length": 7, "output_length": 5}\n', "a.jsonl:1: timestamp: nan"),
        ("a.jsonl", '{"timestamp": 1' + "0" * 400 + ', "input_length": 7, "output_length": 5}\n', "1: timestamp: 1000"),
        ("a.jsonl", '{"timestamp": 0, "input_length": true, "output_length": 5}\n', "a.jsonl:1: input_length: True"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(MoeplanError) as caught:
        read_requests(written(tmp_path, text, name))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(MoeplanError, match="cannot read"):
        read_requests(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MoeplanError, match="not UTF-8"):
        read_requests(tmp_path / "binary.csv")


def test_a_file_without_times_can_feed_clients(tmp_path: Path) -> None:
    path = written(tmp_path, "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n2,3,5,0.6\n")
    assert read_requests(path, timed=False).requests == (Request(2, 3),)


def test_closed_loop_and_poisson_refuse_nonsense() -> None:
    assert len(closed_loop(3, 512, 128, rounds=2).requests) == 6
    for bad in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(MoeplanError, match="is not at least 1"):
            closed_loop(*bad)
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(MoeplanError, match="rate"):
            poisson(rate, 5, 1, 1, 0)


def test_poisson_is_seeded_and_has_its_rate() -> None:
    one, same, other = (poisson(4.0, 4000, 10, 5, seed).requests for seed in (7, 7, 8))
    assert one == same
    assert one != other
    assert one[0].arrival_s == 0.0
    assert 3999 / one[-1].arrival_s == pytest.approx(4.0, rel=0.05)  # three standard errors of the mean gap


@needs_data
def test_public_traces_have_their_published_sizes() -> None:
    azure = read_requests(DATA / "AzureLLMInferenceTrace_conv.2023.csv").requests
    assert len(azure) == 19366
    assert azure[1] == Request(396, 109, 4.3145790)
    assert sum(request.max_tokens for request in azure) == 4_088_665
    assert len(read_requests(DATA / "AzureLLMInferenceTrace_code.2023.csv").requests) == 8819
    lines = read_requests(DATA / "mooncake.conversation_trace.first2000.jsonl").requests
    assert lines == read_requests(DATA / "mooncake.conversation_trace.lengths.csv").requests[:2000]
    assert len(read_requests(DATA / "vidur.arxiv_summarization.first3000.csv", timed=False).requests) == 2999
