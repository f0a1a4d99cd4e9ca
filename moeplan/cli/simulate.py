"""`simulate`: continuous batching on calibrated expert layers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeplan.cli.common import Calibrations, Cohorts, Json, Models, Seed, Traces, emit, note, numbers, store, table
from moeplan.errors import MoeplanError
from moeplan.units import percent, seconds

if TYPE_CHECKING:
    from moeplan.planning.span import ExpertCost
    from moeplan.serving.requests import Load
    from moeplan.serving.step import Policy
    from moeplan.store import Store


def register(app: typer.Typer) -> None:
    """Add `simulate`."""
    app.command("simulate")(simulate)


def simulate(  # noqa: PLR0913, PLR0917 - one argument an option
    model: Annotated[str, typer.Argument(help="Model card, config.json or card.toml.")],
    device: Annotated[str, typer.Option(help="Calibrated device.")],
    engine: Annotated[str, typer.Option(help="Engine whose default gates choose the path.")],
    clients: Annotated[str | None, typer.Option(help="Closed-loop clients, e.g. 4 or 1,2,4,8.")] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=10000, help="Requests that each client sends, one after the other.")
    ] = 4,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals a second, in place of --clients.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Requests of a Poisson stream.")] = 1000,
    requests: Annotated[Path | None, typer.Option(help="Request file (Azure, Mooncake, vidur, LLMServingSim).")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of a request.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=1, help="Generated tokens of a request.")] = 128,
    max_batch: Annotated[int, typer.Option(min=1, help="Decode slots.")] = 16,
    max_prefill_batch: Annotated[int, typer.Option(min=1, help="Prompts prefilled together.")] = 4,
    prefill_step: Annotated[int, typer.Option(min=1, help="Tokens of each prompt in one call.")] = 2048,
    decode_first: Annotated[bool, typer.Option(help="Decode between prompt chunks, or finish prompts first.")] = True,
    routing: Annotated[str, typer.Option(help="uniform, popularity:NAME, trace:FILE, ...")] = "uniform",
    cohort: Cohorts = "independent",
    path: Annotated[list[str] | None, typer.Option(help="Paths of --engine own, in order.")] = None,
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help="Price decode steps beyond the fits.")] = False,
    models: Models = None,
    traces: Traces = None,
    calibration: Calibrations = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Continuous batching: the steps that occur, TTFT and tokens a second, on the expert path alone."""
    from moeplan.serving.step import Policy

    where = store(models, traces, calibration)
    lengths = (prompt_tokens, max_tokens)
    runs = _loads(clients, rounds, requests, lengths) if rate is None else [_stream((rate, count, seed), lengths)]
    if rate is not None and (clients or requests):
        raise MoeplanError(f"--rate {rate}: goes neither with --clients nor with --requests")
    policy = Policy(max_batch, max_prefill_batch, prefill_step, decode_first, cohort=cohort)
    about = {"model": model, "device": device, "engine": engine, "routing": routing, "cohort": cohort, "seed": seed}
    cost, notes = _cost(about, path or [], extrapolate, where)
    documents = [about | _run(load, policy, cost) | {"notes": notes} for load in runs]
    if as_json:
        emit(documents[0] if len(documents) == 1 else about | {"runs": documents})
    else:
        _show(documents, notes)


def _loads(clients: str | None, rounds: int, file: Path | None, lengths: tuple[int, int]) -> list["Load"]:
    from moeplan.serving.requests import ClosedLoop, closed_loop, read_requests

    if clients is None:
        if file is None:
            raise MoeplanError("simulate: give --clients, --rate or --requests")
        return [read_requests(file)]
    counts = numbers(clients, "--clients")
    if file is None:
        return [closed_loop(n, *lengths, rounds) for n in counts]
    read = read_requests(file, timed=False).requests
    return [ClosedLoop(n, read) for n in counts]


def _stream(draw: tuple[float, int, int], lengths: tuple[int, int]) -> "Load":
    from moeplan.serving.requests import poisson

    rate, count, seed = draw
    return poisson(rate, count, *lengths, seed)


def _cost(about: dict[str, Any], paths: list[str], extrapolate: bool, where: "Store") -> tuple["ExpertCost", list[str]]:
    """The price of a span, and what has to be said about it."""
    from moeplan.engines import find_engine
    from moeplan.planning.prices import Assumption, layer_price
    from moeplan.planning.span import SCOPE, LayerGroup, engine_cost, find_calibration
    from moeplan.traffic.model import load_card
    from moeplan.traffic.routing import check_cohort, parse_routing

    card = load_card(about["model"], where)
    card.require_moe()
    engine = find_engine(about["engine"], paths)
    groups = [
        LayerGroup(find_calibration(where, about["device"], engine, shape), layers) for shape, layers in card.groups()
    ]
    arm = parse_routing(about["routing"], where)
    check_cohort(arm, about["cohort"])
    assumption = Assumption(arm, about["cohort"], about["seed"], extrapolate)
    cost, declines = engine_cost(groups, engine, lambda group, name, rows: layer_price(group, name, rows, assumption))
    notes = [
        SCOPE,
        f"calls with prompts are priced in chunks of at most {cost.chunk_rows} rows, the largest size timed",
    ]
    notes += [f"{decline.path}: {decline.reason}" for decline in declines]
    notes += {note for shape, _ in card.groups() if (note := arm.note(shape.experts, shape.top_k))}
    return cost, notes


def _run(load: "Load", policy: "Policy", cost: "ExpertCost") -> dict[str, Any]:
    from time import perf_counter

    from moeplan.serving.batching import simulate as run
    from moeplan.serving.requests import ClosedLoop

    start = perf_counter()
    done = run(load, policy, cost)
    wall = perf_counter() - start
    fields = (
        "requests", "completed", "simulated_tokens", "steps", "overloaded", "aggregate_tok_s", "decode_tok_s_mean",
        "ttft_mean_s", "ttft_p95_s", "tpot_mean_s",
    )  # fmt: skip
    mix = [
        {"decode_rows": c.decode_rows, "prefill_rows": c.prefill_rows, "steps": c.steps, "padding_rows": c.padding_rows}
        for c in done.mix
    ]
    head = {"clients": load.clients if isinstance(load, ClosedLoop) else None, "wall_s": wall, "source": cost.source}
    return head | {name: getattr(done, name) for name in fields} | {"batch_mix": mix}


def _show(documents: list[dict[str, Any]], notes: list[str]) -> None:
    """Times and rates a line a run; then the mix of each run."""
    rows = [
        [
            "-" if run["clients"] is None else str(run["clients"]),
            str(run["completed"]),
            seconds(run["ttft_mean_s"]),
            seconds(run["ttft_p95_s"]),
            "-" if run["tpot_mean_s"] is None else seconds(run["tpot_mean_s"]),
            "-" if run["decode_tok_s_mean"] is None else f"{run['decode_tok_s_mean']:.1f}",
            f"{run['aggregate_tok_s']:.1f}",
            "overloaded" if run["overloaded"] else "",
        ]
        for run in documents
    ]
    table(["clients", "requests", "TTFT", "TTFT p95", "TPOT", "decode tok/s", "aggregate tok/s", ""], rows)
    typer.echo("")
    mix = [
        [
            "-" if run["clients"] is None else str(run["clients"]),
            str(count["decode_rows"]),
            str(count["prefill_rows"]),
            str(count["padding_rows"]),
            str(count["steps"]),
            percent(count["steps"] / run["steps"]).lstrip("+"),
        ]
        for run in documents
        for count in _most(run["batch_mix"])
    ]
    table(["clients", "decode rows", "prompt rows", "padding", "steps", "share"], mix)
    if any(len(run["batch_mix"]) > _SHOWN for run in documents):
        note(f"the {_SHOWN} most frequent step sizes of each run; --json has all")
    typer.echo(f"\ntimes: {documents[0]['source']}")
    for line in notes:
        note(line) if line != notes[0] else typer.echo(line)


_SHOWN = 12


def _most(mix: list[dict[str, int]]) -> list[dict[str, int]]:
    """The most frequent step sizes, in order of size."""
    frequent = sorted(mix, key=lambda count: -count["steps"])[:_SHOWN]
    return [count for count in mix if count in frequent]
