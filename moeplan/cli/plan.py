"""`recommend`, `verify` and `demo`: choose the gates, prove them, and the main job on what is shipped."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeplan.cli.common import (
    Calibrations,
    Cohorts,
    Json,
    Models,
    Seed,
    Traces,
    chain_of,
    emit,
    note,
    numbers,
    progress_bar,
    store,
    table,
)
from moeplan.errors import MoeplanError
from moeplan.units import seconds

if TYPE_CHECKING:
    from moeplan.runners.spec import RunnerSpec


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command("recommend")(recommend)
    app.command("verify")(verify)
    app.command("demo")(demo)


def recommend(  # noqa: PLR0913, PLR0917 - one argument an option
    model: Annotated[str, typer.Argument(help="Model card, config.json or card.toml.")],
    device: Annotated[str, typer.Option(help="Calibrated device.")],
    engine: Annotated[str, typer.Option(help="mlx-lm, moeplan-triton, or own with two --path or more.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for plan.json and report.md.")] = None,
    clients: Annotated[str, typer.Option(help="Closed-loop clients, each count simulated.")] = "1,2,4,8,16",
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Prompt tokens of a request.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Generated tokens of a request.")] = 128,
    max_batch: Annotated[int, typer.Option(min=1, help="Decode slots.")] = 32,
    max_prefill_batch: Annotated[int, typer.Option(min=1, help="Prompts prefilled together.")] = 8,
    rounds: Annotated[
        int, typer.Option(min=1, max=10000, help="Requests that each client sends, one after the other.")
    ] = 4,
    routing: Annotated[str, typer.Option(help="uniform, popularity:NAME, trace:FILE, ...")] = "uniform",
    cohort: Cohorts = "independent",
    path: Annotated[list[str] | None, typer.Option(help="Paths of --engine own, smallest batches first.")] = None,
    runner: Annotated[str | None, typer.Option(help="Take the calibration of this runner.")] = None,
    floor: Annotated[float, typer.Option(min=0, max=1000, help="Gain that the low end must clear, a fraction.")] = 0.02,
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help="Let fits leave their range, labelled.")] = False,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallel ranks.")] = 1,
    models: Models = None,
    traces: Traces = None,
    calibration: Calibrations = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Choose the gates for this traffic, with the evidence; a default stays unless a change surely pays."""
    from dataclasses import replace

    from moeplan.planning.mix import Traffic
    from moeplan.planning.plan import recommend as choose
    from moeplan.planning.prices import Assumption
    from moeplan.planning.setting import choose_engine, make_setting
    from moeplan.traffic.routing import parse_routing

    for option, value in (("--tp", tp), ("--ep", ep)):
        if value > 1:
            raise MoeplanError(
                f"{option} {value}: gates over several ranks are not planned yet; calibrate one rank's shape"
            )
    where = store(models, traces, calibration)
    traffic = Traffic(
        tuple(numbers(clients, "--clients")), prompt_tokens, max_tokens, max_batch, max_prefill_batch, rounds
    )
    assumption = Assumption(parse_routing(routing, where), cohort, seed, extrapolate)
    named = [name for word in path or [] for name in word.split(",") if name]
    setting = make_setting(where, model, device, choose_engine(engine, named, runner), traffic, assumption)
    _deliver(choose(replace(setting, floor=floor)), output, as_json)


def _deliver(plan: dict[str, Any], output: Path | None, as_json: bool) -> None:
    from moeplan import report

    written = report.write_plan(output, plan) if output else []
    if as_json:
        emit(plan)
        return
    typer.echo(f"{plan['model']} on {plan['device']}, engine {plan['engine']}: expert path of one step\n")
    headings, rows = report.ladder(plan)
    table(headings, [[*row] for row in rows])
    typer.echo("")
    for line in report.gate_lines(plan):
        typer.echo(line)
    for gate in plan["gates"]:
        typer.echo(f"  {gate['name']}: {report.stakes(gate)}")
    typer.echo("")
    table(*report.fits(plan))
    for no in plan["declines"]:
        note(f"declined: {no['path']}: {no['reason']}")
    if written:
        typer.echo(f"\nwritten: {', '.join(str(file) for file in written)}")


def verify(  # noqa: PLR0913, PLR0917 - one argument an option
    plan: Annotated[Path, typer.Argument(help="plan.json, as `recommend` wrote it.")],
    runner: Annotated[str, typer.Option(help="mlx, triton, python, exec, or replay (from stored samples).")],
    kernel: Annotated[str, typer.Option(help="Your Python kernel: package.module:object.")] = "",
    command: Annotated[str, typer.Option(help="Your program that speaks the exec protocol.")] = "",
    rounds: Annotated[int, typer.Option(min=4, max=10000, help="Times each arm is timed; four give a spread.")] = 8,
    draws: Annotated[int, typer.Option(min=1, help="Routing draws each path is timed on; both see the same ids.")] = 3,
    chain: Annotated[str, typer.Option(help="Layers of the short and long chain, e.g. 12,48.")] = "",
    device: Annotated[str | None, typer.Option(help="This machine's device name, where it cannot be read.")] = None,
    engine_version: Annotated[str, typer.Option(help="Engine version, where the runner has none.")] = "",
    timeout: Annotated[float, typer.Option(min=1, max=86400, help="Longest time of one arm, seconds.")] = 900.0,
    models: Models = None,
    traces: Traces = None,
    calibration: Calibrations = None,
    seed: Seed = 1,
    as_json: Json = False,
) -> None:
    """Run both paths at gate - 1, gate and gate + 1; exit 3 where the plan does not hold."""
    from moeplan.planning.prove import Trial, prove
    from moeplan.planning.verify import REFUSED

    spec = _spec(runner, kernel, command, engine_version, timeout)
    where = store(models, traces, calibration)
    trial = Trial(spec, where, rounds, chain_of(chain) if chain else None, seed, device, draws)
    with progress_bar() as progress:
        verdict = prove(plan, trial, progress)
    if as_json:
        emit(verdict)
    else:
        _show_verdict(verdict)
        typer.echo(f"\nwritten: {plan.parent / 'verdict.json'}")
    if verdict["outcome"] in REFUSED:
        raise typer.Exit(3)


def _spec(runner: str, kernel: str, command: str, engine_version: str, timeout: float) -> "RunnerSpec | None":
    from moeplan.runners.spec import RunnerSpec

    return None if runner == "replay" else RunnerSpec(runner, kernel, command, engine_version, timeout)


def _show_verdict(verdict: dict[str, Any]) -> None:
    rows = [
        [
            f"{row['gate']} {row['path']}",
            str(row["tokens"]),
            row["role"],
            *("-" if row[key] is None else seconds(row[key]) for key in ("predicted_s", "measured_s", "spread")),
            "-" if row["parity_rms"] is None else f"{row['parity_rms']:.1e}",
            row["outcome"],
            row["note"],
        ]
        for row in verdict["verdicts"]
    ]
    table(["gate, path", "tokens", "role", "predicted", "measured", "spread", "parity", "outcome", ""], rows)
    typer.echo("")
    for gate in verdict["gates"]:
        typer.echo(f"{gate['gate']} at {gate['first_tokens']} tokens: {gate['outcome']}")
    for gate in verdict["not_tried"]:
        typer.echo(f"{gate['gate']}: not tried: {gate['reason']}")
    for line in verdict["changed"]:
        note(f"note: the kernel is not the calibrated one: {line}")
    typer.echo(f"outcome: {verdict['outcome']}")


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")] = Path("reports/demo"),
    models: Models = None,
    traces: Traces = None,
    calibration: Calibrations = None,
) -> None:
    """The main job on the shipped calibration: gates for Qwen3-30B-A3B 4-bit on an H200, two engines."""
    from moeplan.planning.plan import recommend as choose
    from moeplan.planning.setting import demo_settings

    for number, setting in enumerate(demo_settings(store(models, traces, calibration))):
        if number:
            typer.echo("\n" + "-" * 100 + "\n")
        plan = choose(setting)
        _deliver(plan, output if number == 0 else output / plan["engine"], as_json=False)
