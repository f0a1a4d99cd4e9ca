"""`accuracy`: what the fits of a calibration are worth."""

from typing import Annotated, Any

import typer

from moeplan.cli.calibrate_fit import calibration_folders
from moeplan.cli.common import Calibrations, Json, emit, store, table


def accuracy(
    target: Annotated[str, typer.Argument(metavar="DIR_OR_DEVICE", help="A folder of journals, or a device's name.")],
    tokens_max: Annotated[
        int | None, typer.Option("--tokens-max-token", min=1, help="Judge held-out token counts up to this one.")
    ] = None,
    calibration: Calibrations = None,
    as_json: Json = False,
) -> None:
    """Errors at token counts that a fit did not see, beside plain baselines."""
    from moeplan.cost.accuracy import accuracy as judge

    document = judge(calibration_folders(target, store(calibration=calibration)), tokens_max)
    if as_json:
        emit(document)
        return
    headings = ["path", "runner", "model", "mean", "median", "p90", "max", "n", "end points", "90 % band covers"]
    rows = []
    for one in document["tables"]:
        labels = [one["kernel_source"], f"{one['framework']} {one['version']}", one["model"]]
        ends = _cells(one["end_points"])[0]
        rows.append([*labels, *_cells(one["token_holdout"]), ends, _share(one["coverage90"])])
    pooled = document["pooled"]
    rows.append(["all", "", "", *_cells(pooled["token_holdout"]), "", _share(pooled["coverage90"])])
    for one in document["baselines"]:
        beaten = f"beaten on {one['tables_beaten']} of {one['tables']}"
        rows.append([f"baseline: {one['name']}", "", "", *_cells(one["token_holdout"]), "", beaten])
    table(headings, rows)


def _cells(errors: dict[str, Any] | None) -> list[str]:
    if errors is None:
        return ["-"] * 5
    return [f"{errors[key]:.1%}" for key in ("mean", "median", "p90", "max")] + [str(errors["n"])]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
