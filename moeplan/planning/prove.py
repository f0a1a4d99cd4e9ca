"""Verify a plan file: measure both sides of every crossing here, judge, and write the verdict beside the plan."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeplan.cost.samples import SampleFile, load
from moeplan.errors import MoeplanError
from moeplan.kernels.protocol import Arm
from moeplan.planning.verify import SCHEMA, arms_of, crossings, judge, refuse, routing_arm
from moeplan.runners.session import Progress
from moeplan.runners.spec import MeasureRequest, RunnerSpec
from moeplan.store import Store, read_json, write_json
from moeplan.traffic.shape import LayerShape

RAW = "verify.jsonl"


@dataclass(frozen=True, slots=True)
class Trial:
    """How to verify. spec: None answers from stored samples (replay).

    device: what the user says this machine is. chain: layers of the short and long chain, None for the default.
    seed: of the routing that is drawn; another one than the calibration's, so that its ids are new.
    """

    spec: RunnerSpec | None
    store: Store = field(default_factory=Store)
    rounds: int = 8
    chain: tuple[int, int] | None = None
    seed: int = 1
    device: str | None = None
    draws: int = 3

    def seeds(self, routing: str) -> range:
        """The seeds of the routing draws."""
        fixed = routing in ("identical", "balanced", "disjoint") or self.spec is None
        return range(self.seed, self.seed + (1 if fixed else self.draws))


def prove(plan_path: Path, trial: Trial, progress: Progress | None = None) -> dict[str, Any]:
    """The verdict (schema moeplan.verdict/1), also written to verdict.json beside the plan.

    Raw times go to verify.jsonl there; a run that was killed continues in it. Raises MoeplanError for a file that
    is no plan, a machine that is not the plan's, a runner that cannot start, or a folder that cannot be written.
    """
    plan = read_json(plan_path)
    if not isinstance(plan, dict):
        raise MoeplanError(f"{plan_path}: not a plan")
    arms = _arms(plan_path, plan, trial)
    taken = _replayed(plan, arms, trial) if trial.spec is None else _measured(plan_path, plan, arms, trial, progress)
    document = {
        "schema": SCHEMA,
        "plan": plan_path.name,
        "plan_sha256": hashlib.sha256(plan_path.read_bytes()).hexdigest(),
        "runner": trial.spec.runner if trial.spec else "replay",
        "raw": taken.path.name,
        "provenance": {key: value for key, value in taken.header.items() if key not in ("type", "schema", "shape")},
        "changed": _changed(plan, taken),
        **judge(plan, taken, arms, replayed=trial.spec is None),
    }
    write_json(plan_path.parent / "verdict.json", document)
    return document


def _arms(plan_path: Path, plan: Mapping[str, Any], trial: Trial) -> tuple[Arm, ...]:
    """The arms to time, after a dry run of the judgement: a broken plan is found before any kernel runs."""
    try:
        arms = arms_of(plan, crossings(plan)[0], trial.seeds(routing_arm(plan)), trial.chain)
        nothing = SampleFile(plan_path, {}, ())
        judge(plan, nothing, arms)
        _changed(plan, nothing)
        dict(plan["keys"].get("signatures", {}))
    except MoeplanError as bad:
        raise MoeplanError(f"{plan_path}: {bad}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as bad:
        raise MoeplanError(f"{plan_path}: not a complete plan: {bad!r}") from bad
    return arms


def _measured(
    plan_path: Path, plan: Mapping[str, Any], arms: tuple[Arm, ...], trial: Trial, progress: Progress | None
) -> SampleFile:
    from moeplan.runners.host import driver
    from moeplan.runners.session import describe, measure

    spec = trial.spec
    assert spec is not None
    facts = describe(spec)
    here = {"runner": spec.runner, "engine_version": facts["engine_version"], "device_reported": facts["device"]}
    refuse(plan, here | {"driver": driver()}, trial.device)
    shape = LayerShape.from_dict(plan["keys"]["shape"])
    digest = hashlib.sha256(plan_path.read_bytes()).hexdigest()
    options: dict[str, object] = {"plan_sha256": digest, "rounds": trial.rounds, "draws": trial.draws}
    request = MeasureRequest(
        plan["device"], plan["model"], shape, arms, trial.rounds, trial.seed, None, trial.store, options
    )
    partial = plan_path.parent / f"verify-{digest[:8]}.partial.jsonl"  # the last verdict stands until this is whole
    measure(spec, request, partial, progress)
    os.replace(partial, plan_path.parent / RAW)
    return load(plan_path.parent / RAW)


def _replayed(plan: Mapping[str, Any], arms: tuple[Arm, ...], trial: Trial) -> SampleFile:
    from moeplan.cost.calibrate import load_calibration
    from moeplan.runners.replay import replay

    keys = plan["keys"]
    runner = f"{keys['runner']}-{keys['engine_version']}"
    found = load_calibration(trial.store, keys["device"], runner, LayerShape.from_dict(keys["shape"]))
    return replay(found.samples, arms, found.header, found.directory)


def _changed(plan: Mapping[str, Any], taken: SampleFile) -> list[str]:
    """Kernels whose source or settings are no longer those of the calibration."""
    known = plan["keys"]["config_hashes"]
    seen = {(s.path, s.config_hash) for s in taken.samples if known.get(s.path) and s.config_hash}
    return sorted(f"{path}: config hash {found}" for path, found in seen if found not in known[path])
