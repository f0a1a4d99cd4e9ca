"""From names to a setting: which calibration, which engine, which assumptions; and the demo's two settings."""

from dataclasses import replace

from moeplan.cost.calibrate import Calibration, engines_of, load_calibration
from moeplan.engines import find_engine
from moeplan.engines.chain import Engine
from moeplan.errors import Decline, MoeplanError
from moeplan.planning.mix import Traffic
from moeplan.planning.plan import FLOOR, Setting
from moeplan.planning.prices import Assumption
from moeplan.planning.span import LayerGroup, find_calibration
from moeplan.store import Store
from moeplan.traffic.model import ModelCard, load_card
from moeplan.traffic.routing import Routing, check_cohort, parse_routing
from moeplan.traffic.shape import LayerShape

SKEW = "popularity:gpt-oss-20b"  # the skew under which every plan is tried as well
DEMO_MODEL, DEMO_DEVICE, DEMO_CLIENTS = "qwen3-30b-a3b-4bit", "h200", (1, 2, 4, 8, 16, 32, 64)
DEMO_ENGINES = ("moeplan-triton", "mlx-lm")


def choose_engine(name: str, paths: list[str], runner: str | None) -> Engine:
    """An engine by name; `runner` narrows where its calibration is looked for. Raises MoeplanError."""
    engine = find_engine(name, paths)
    if runner is None:
        return engine
    if runner not in engine.runners:
        raise MoeplanError(f"--runner {runner}: --engine {name} is calibrated with {', '.join(engine.runners)}")
    return replace(engine, runners=(runner,))


def make_setting(
    store: Store, model: str, device: str, engine: Engine, traffic: Traffic, assumption: Assumption
) -> Setting:
    """A setting with the shipped alternatives. Raises MoeplanError for an unknown or dense model, an unknown device,
    a cohort that the routing cannot show, or where no MoE layer of the model is calibrated there."""
    card = load_card(model, store)
    card.require_moe()
    check_cohort(assumption.routing, assumption.cohort)
    groups, declines = _groups(store, card, device, engine)
    alternatives, missing = _alternatives(store, assumption)
    return Setting(card.name, engine, groups, traffic, assumption, alternatives, FLOOR, (*declines, *missing))


def demo_settings(store: Store) -> list[Setting]:
    """Both engines that are calibrated on the H200, over enough clients to cross their gates."""
    uniform, traffic = Assumption(Routing("uniform")), Traffic(DEMO_CLIENTS, max_batch=max(DEMO_CLIENTS))
    return [
        make_setting(store, DEMO_MODEL, DEMO_DEVICE, find_engine(name, []), traffic, uniform) for name in DEMO_ENGINES
    ]


def layer_groups(store: Store, card: ModelCard, device: str, runner: str | None) -> list[tuple[LayerGroup, ...]]:
    """Alike layers with their calibration, the most layers first; one tuple for every runner that has them all.

    runner: that one alone. Raises MoeplanError with every runner's reason where there is none.
    """
    shapes = sorted(card.groups(), key=lambda group: -group[1])
    found, failures = [], []
    for name in [runner] if runner is not None else engines_of(store, device):
        try:
            found.append(tuple(LayerGroup(load_calibration(store, device, name, s), layers) for s, layers in shapes))
        except MoeplanError as bad:
            failures.append(str(bad))
    if not found:
        raise MoeplanError("; ".join(failures) or f"--device {device}: nothing is calibrated there")
    return found


def _groups(
    store: Store, card: ModelCard, device: str, engine: Engine
) -> tuple[tuple[LayerGroup, ...], tuple[Decline, ...]]:
    """Alike layers with their calibration, the most first; a decline for layers that have none."""
    groups, declines, failures = [], [], []
    for shape, layers in card.groups():
        try:
            groups.append(LayerGroup(_calibration(store, device, engine, shape), layers))
        except MoeplanError as bad:
            failures.append(bad)
            declines.append(Decline("all", f"{layers} layers are not counted: {bad}"))
    if not groups:
        raise failures[0]
    return tuple(sorted(groups, key=lambda group: -group.layers)), tuple(declines)


def _calibration(store: Store, device: str, engine: Engine, shape: LayerShape) -> Calibration:
    """Of the first runner that timed all of the engine's paths, else of the first that timed the shape."""
    for runner in engine.runners:
        try:
            found = find_calibration(store, device, replace(engine, runners=(runner,)), shape)
        except MoeplanError:
            continue
        if set(engine.paths) <= set(found.paths):
            return found
    return find_calibration(store, device, engine, shape)


def _alternatives(store: Store, assumption: Assumption) -> tuple[tuple[Assumption, ...], tuple[Decline, ...]]:
    found = [replace(assumption, routing=Routing("uniform"), cohort="independent")]
    declines = []
    try:
        found.append(replace(assumption, routing=parse_routing(SKEW, store), cohort="independent"))
    except MoeplanError as bad:
        declines.append(Decline(SKEW, f"not tried: {bad}"))
    found.append(replace(assumption, routing=Routing("uniform"), cohort="identical"))
    return tuple(found), tuple(declines)
