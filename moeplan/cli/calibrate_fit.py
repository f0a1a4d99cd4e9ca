"""`calibrate fit` and `calibrate show`: from journals to fits."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeplan.cli.common import Calibrations, Json, emit, note, store, table
from moeplan.errors import MoeplanError
from moeplan.store import Store, read_json
from moeplan.units import percent, seconds

if TYPE_CHECKING:
    from moeplan.cost.fit import Fit


def register_fit(sub_app: typer.Typer) -> None:
    """Add `fit` and `show` to the calibrate group."""
    sub_app.command("fit")(fit)
    sub_app.command("show")(show)


def fit(
    target: Annotated[str, typer.Argument(metavar="DIR_OR_DEVICE", help="A folder of journals, or a device's name.")],
    calibration: Calibrations = None,
    as_json: Json = False,
) -> None:
    """Fit every path of a calibration and write fits.json beside its journals."""
    from moeplan.cost.calibrate import write_fits

    documents = []
    for directory in calibration_folders(target, store(calibration=calibration)):
        path = write_fits(directory)
        document = read_json(path)
        documents.append({"file": str(path)} | document)
        if not as_json:
            typer.echo(str(path))
            _print_fits(document)
    if as_json:
        emit({"files": documents})


def show(
    device: Annotated[str, typer.Option("--device", help="Folder name under calibration/.")],
    calibration: Calibrations = None,
    as_json: Json = False,
) -> None:
    """What was measured on a device, and the fits with their held-out errors."""
    from moeplan.cost.show import calibration_summary

    document = calibration_summary(store(calibration=calibration), device)
    if as_json:
        emit(document)
        return
    rows = [
        [
            row["path"],
            f"{row['runner']} {row['engine_version']}",
            row["model"],
            row["format"],
            row["routing"],
            str(row["tokens"]),
            seconds(row["median_s"]),
            seconds(row["spread_s"]) if row["rounds"] > 3 else "-",
            "-" if row["floor_s"] is None else seconds(row["floor_s"]),
        ]
        for row in document["paths"]
    ]
    table(["path", "runner", "model", "format", "routing", "tokens", "median", "spread", "floor"], rows)
    for line in document["notes"]:
        note(line)
    typer.echo("")
    fits = [
        [
            row["path"],
            row["runner"],
            row["form"],
            percent(row["holdout_mean"]).lstrip("+"),
            percent(row["holdout_p90"]).lstrip("+"),
            f"{row['valid'][0]}..{row['valid'][1]}",
        ]
        for row in document["fits"]
    ]
    table(["path", "runner", "form", "held-out mean", "p90", "tokens"], fits)


def calibration_folders(target: str, where: Store) -> list[Path]:
    """The folders of journals meant by a path or a device's name."""
    given = Path(target)
    roots = [given] if given.is_dir() else [folder / target for folder in where.folders("calibration")]
    found = [d for root in roots if root.is_dir() for d in [root, *sorted(root.iterdir())] if any(d.glob("*.jsonl"))]
    if not found:
        raise MoeplanError(f"{target}: no folder with calibration journals (*.jsonl), and no device of that name")
    return found


def _print_fits(document: dict[str, list[dict[str, object]]]) -> None:
    from moeplan.cost.fit import Fit

    for row in document["fits"]:
        _print_fit(Fit.from_dict(row))
    for row in document["unfitted"]:
        note(f"{row['path']}: not fitted: {row['reason']}")


def _print_fit(found: "Fit") -> None:
    held, ends = found.holdout, found.end_points
    typer.echo(f"\n{found.path}: {found.form}   tokens {found.valid[0]}..{found.valid[1]}, {found.n} points")
    rows = []
    for piece in found.curve.pieces:
        for part in piece.law.to_dict()["coefficients"]:
            unit = "a layer" if part["driver"] == "constant" else f"a {part['driver'].rstrip('s')}"
            error = part["standard_error"]
            span = f"{piece.first}..{piece.last}"
            rows.append([part["driver"], seconds(part["value"]), seconds(error) if error else "-", unit, span])
    table(["  term", "value", "std error", "unit", "tokens"], [["  " + row[0], *row[1:]] for row in rows])
    typer.echo(
        f"  held out: mean {held.mean:.1%}, p90 {held.p90:.1%}, max {held.max:.1%} (n {held.n}); "
        f"end points {ends.mean:.1%}; band {percent(found.band[0])} .. {percent(found.band[1])}"
    )
    if found.cache_resident:
        note(f"{found.path}: {found.cache_resident} cache-resident points left out")
    for warning in found.warnings:
        note(f"{found.path}: {warning}")
