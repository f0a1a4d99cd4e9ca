"""Commands of the calibrate group."""

import typer

from moeplan.cli.accuracy import accuracy
from moeplan.cli.calibrate_fit import register_fit
from moeplan.cli.calibrate_run import run


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    calibrate = typer.Typer(help="Measure this machine, fit the measurements, show them.", no_args_is_help=True)
    calibrate.command("run")(run)
    register_fit(calibrate)
    app.add_typer(calibrate, name="calibrate")
    app.command("accuracy")(accuracy)
