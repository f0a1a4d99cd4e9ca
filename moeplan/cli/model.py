"""`model list` and `model show`."""

from typing import Annotated, Any

import typer

from moeplan.cli.common import Json, Models, emit, note, store, table
from moeplan.errors import MoeplanError
from moeplan.units import size


def register(app: typer.Typer) -> None:
    """Add the `model` group."""
    group = typer.Typer(help="Model cards: geometry and bytes of the experts.", no_args_is_help=True)
    group.command("list")(list_models)
    group.command("show")(show)
    app.add_typer(group, name="model")


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _plane(document: dict[str, Any]) -> str:
    low, high = document.get("plane_bytes_min"), document.get("plane_bytes_max")
    if low is None or high is None:
        return "-"
    return size(low) if low == high else f"{size(low)}..{size(high)}"


def list_models(models: Models = None, as_json: Json = False) -> None:
    """Every card within reach; a card that cannot be read is named on stderr and left out."""
    from moeplan.traffic.documents import list_entry
    from moeplan.traffic.model import load_card

    where = store(models)
    found: list[dict[str, Any]] = []
    for name in where.names("models", "*.toml"):
        try:
            found.append(list_entry(load_card(name, where)))
        except MoeplanError as bad:
            note(f"skipped: {bad}")
    if as_json:
        emit({"models": found})
        return
    headings = ["model", "MoE layers", "experts", "top-k", "shared", "hidden", "width", "format", "plane"]
    keys = ("moe_layers", "experts", "top_k", "shared_experts", "hidden", "expert_hidden", "format")
    table(headings, [[row["name"], *(_text(row[key]) for key in keys), _plane(row)] for row in found])


def show(
    model: Annotated[str, typer.Argument(help="Name of a card, a config.json, or a card.toml.")],
    models: Models = None,
    as_json: Json = False,
) -> None:
    """Geometry, weight formats and plane bytes of one model."""
    from moeplan.traffic.documents import show_document
    from moeplan.traffic.model import load_card

    document = show_document(load_card(model, store(models)))
    if as_json:
        emit(document)
        return
    keys = ("name", "model_type", "source", "all_layers", "moe_layers", "hidden", "experts", "top_k", "expert_hidden")
    more = ("activation", "weight_position", "dense_hidden", "vocabulary")
    rows = [[key, _text(document[key])] for key in (*keys, *more)]
    width = max(len(row[0]) for row in rows)
    for key, value in rows:
        typer.echo(f"{key.ljust(width)}  {value}")
    shared = document["shared"]
    if shared:
        kind = f"{shared['experts']} experts" if shared["experts"] else "a dense MLP"
        typer.echo(f"{'shared'.ljust(width)}  {kind} of width {shared['expert_hidden']}, run {shared['run']}")
    for group in document["groups"]:
        plane = f"{group['plane_bytes']:,} bytes a plane ({size(group['plane_bytes'])})"
        typer.echo(f"{'layers'.ljust(width)}  {group['layers']}: {group['format']}, {plane}")
    for line in document["notes"]:
        note(line)
