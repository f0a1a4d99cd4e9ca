"""The command line: parse, call, print. One file a group of commands; no arithmetic here."""

import typer

app = typer.Typer(
    name="moeplan",
    help="Calibrated gates for Mixture-of-Experts kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _register() -> None:
    from importlib import import_module

    for name in ("model", "work", "estimate", "trace", "calibrate", "simulate", "pairing", "plan", "audit"):
        import_module(f"moeplan.cli.{name}").register(app)


_register()
