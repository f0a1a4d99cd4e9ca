"""Measure arms through a child process into a journal that survives SIGKILL and lost arms."""

import math
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from moeplan.cost.samples import SCHEMA, Journal, SampleFile, load
from moeplan.errors import MoeplanError
from moeplan.kernels.protocol import Arm
from moeplan.provenance import environment
from moeplan.runners.arms import draw, drivers, request_line
from moeplan.runners.child import Child, ChildLostError
from moeplan.runners.host import driver, host
from moeplan.runners.resume import Held, resume
from moeplan.runners.spec import PARITY_BOUND, MeasureRequest, RunnerSpec
from moeplan.traffic.routing import Routing, parse_routing

_KEPT = ("signature", "config_hash", "parity_rms", "batch_invariant")
_EXTRAS = ("clocks", "wall_short_s", "wall_long_s")

Progress = Callable[[int, int, str], None]
"""Called with (timings done, timings in all, what comes next)."""


def describe(spec: RunnerSpec) -> dict[str, Any]:
    """What the child says of itself: `paths`, `engine_version`, `device`.

    A program that does not say leaves `paths` empty, `engine_version` as the spec has it, or `local`, and the host
    as its device. Raises MoeplanError where the program cannot be started, or a runner lacks its packages.
    """
    with Child(spec.argv(), spec.timeout_s) as child:
        return _describe(spec, child)


def measure(
    spec: RunnerSpec, request: MeasureRequest, journal_path: Path, progress: Progress | None = None
) -> SampleFile:
    """Time every arm once a round, all arms interleaved in a seeded order, and return the journal as read back.

    An existing journal is continued: what it holds is not measured again. An arm whose child dies, hangs, answers
    garbage or misses parity is recorded as failed, an arm that the kernel declines as declined, and the rest goes
    on. Raises MoeplanError where the journal cannot be written, or was begun under other conditions.
    """
    argv = spec.argv()
    facts: dict[str, Any] = {}
    with _Link(argv, spec.timeout_s) as link:
        facts = _describe(spec, link.child())
        header = _header(spec, request, facts)
        state = resume(journal_path, header)
        journal = Journal(journal_path)
        try:
            if not state.begun:
                journal.write("header", **header)
            with tempfile.TemporaryDirectory(prefix="moeplan-") as folder:
                _Run(request, journal, link, state, Path(folder)).all_rounds(progress)
        finally:
            journal.close()
    return load(journal_path)


class _Link:
    """A child that is started when needed and again after it was lost."""

    def __init__(self, argv: list[str], timeout_s: float) -> None:
        self._argv = argv
        self._timeout = timeout_s
        self._child: Child | None = None

    def child(self) -> Child:
        if self._child is None:
            self._child = Child(self._argv, self._timeout)
        return self._child

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.child().ask(message)
        except ChildLostError:
            self.close()
            raise

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def __enter__(self) -> "_Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Run:
    """One call of `measure`: the loop over rounds and arms."""

    def __init__(self, request: MeasureRequest, journal: Journal, link: _Link, state: Held, folder: Path) -> None:
        self.request = request
        self.journal = journal
        self.link = link
        self.state = state
        self.folder = folder
        self._files: dict[str, tuple[str, dict[str, Any]]] = {}
        self._routings: dict[str, Routing] = {}

    def all_rounds(self, progress: Progress | None) -> None:
        state, request = self.state, self.request
        total = request.rounds * len(request.arms)
        done = 0
        for round_ in range(request.rounds):
            order = list(request.arms)
            Random(f"{request.seed}/{round_}").shuffle(order)
            todo = [arm for arm in order if arm.id not in state.lost and (arm.id, round_) not in state.times]
            if todo and round_ not in state.rounds:
                self._anchor(round_)
            done += len(order) - len(todo)
            for arm in todo:
                if progress:
                    progress(done, total, f"round {round_ + 1}/{request.rounds}: {arm.path} at {arm.tokens}")
                if arm.id not in state.lost:
                    self._time(arm, round_)
                done += 1
        if progress:
            progress(total, total, "done")

    def _anchor(self, round_: int) -> None:
        try:
            answer = self.link.ask({"arm": "anchor", "path": "anchor", "round": round_})
        except ChildLostError as lost:
            answer = {"error": str(lost)}
        kept = {key: value for key, value in answer.items() if key not in ("arm", "type", "round")}
        self.journal.write("round", round=round_, time=_now(), **kept)

    def _time(self, arm: Arm, round_: int) -> None:
        ids_file, facts = self._prepared(arm)
        try:
            answer = self.link.ask(request_line(arm, ids_file, round_))
        except ChildLostError as lost:
            return self._give_up("failed", arm, round_, str(lost))
        for word in ("declined", "error"):
            if answer.get(word):
                return self._give_up("declined" if word == "declined" else "failed", arm, round_, str(answer[word]))
        wrong = _wrong(answer)
        if wrong:
            return self._give_up("failed", arm, round_, wrong)
        kept = {key: answer[key] for key in _KEPT if answer.get(key) is not None}
        if arm.id not in self.state.arms:
            line = {key: value for key, value in request_line(arm, "", 0).items() if key not in ("ids_file", "round")}
            if arm.shape == self.request.shape:
                del line["shape"]
            self.journal.write("arm", **line, **facts, **kept)
            self.state.arms[arm.id] = kept
        self._same_kernel(arm, kept)
        drawn = self.state.arms[arm.id].setdefault("ids_sha256", facts["ids_sha256"])
        if drawn != facts["ids_sha256"]:
            raise MoeplanError(
                f"{self.journal.path}: routing {arm.routing} of arm {arm.id} draws other experts than the journal has:"
                " the trace or profile changed, start a new journal"
            )
        times = {key: float(answer[key]) for key in ("short_s", "long_s")}
        extras = {key: answer[key] for key in _EXTRAS if answer.get(key) is not None}
        self.journal.write("time", arm=arm.id, round=round_, **times, **extras)
        return None

    def _prepared(self, arm: Arm) -> tuple[str, dict[str, Any]]:
        if arm.id not in self._files:
            if arm.routing not in self._routings:
                self._routings[arm.routing] = parse_routing(arm.routing, self.request.store)
            routing = self._routings[arm.routing]
            ids = draw(arm, routing)
            path = self.folder / f"ids-{len(self._files)}.i32"
            path.write_bytes(ids.tobytes())
            stretched = routing.note(arm.shape.experts, arm.shape.top_k)
            facts = {"routing_note": stretched} if stretched else {}
            self._files[arm.id] = (str(path), facts | drivers(arm, ids, self.request.cache_bytes))
        return self._files[arm.id]

    def _give_up(self, type_: str, arm: Arm, round_: int, reason: str) -> None:
        self.journal.write(type_, arm=arm.id, round=round_, reason=reason)
        self.state.lost.add(arm.id)

    def _same_kernel(self, arm: Arm, kept: dict[str, Any]) -> None:
        for key in ("config_hash", "signature"):
            before = self.state.arms[arm.id].get(key, "")
            if kept.get(key, "") != before:
                raise MoeplanError(
                    f"{self.journal.path}: {key} of arm {arm.id} is {kept.get(key, '')!r}, the journal has {before!r}:"
                    " the kernel changed, start a new journal"
                )


def _describe(spec: RunnerSpec, child: Child) -> dict[str, Any]:
    try:
        answer = child.ask({"arm": "describe", "path": "describe"})
    except ChildLostError as lost:
        raise MoeplanError(f"--runner {spec.runner}: asked to describe itself: {lost}") from None
    if answer.get("error") and spec.runner != "exec":
        raise MoeplanError(f"--runner {spec.runner}: {answer['error']}")
    paths = answer.get("paths")
    return {
        "paths": [str(path) for path in paths] if isinstance(paths, list) else [],
        "engine_version": spec.engine_version or str(answer.get("engine_version") or "local"),
        "device": answer.get("device") or host(),
    }


def _header(spec: RunnerSpec, request: MeasureRequest, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": "measured",
        "device": request.device,
        "device_reported": facts["device"],
        "engine": spec.runner,
        "engine_version": facts["engine_version"],
        "model": request.model,
        "shape": request.shape.to_dict(),
        "driver": driver(),
        "host": host(),
        "date": _now(),
        "options": {"seed": request.seed, "kernel": spec.kernel, "command": spec.command} | request.options,
        "parity_bound": PARITY_BOUND,
        "environment": environment(),
    }


def _wrong(answer: dict[str, Any]) -> str | None:
    for key in ("short_s", "long_s"):
        value = answer.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            return f"{key} {value!r} is not a time in seconds"
    rms = answer.get("parity_rms")
    if rms is not None and (not isinstance(rms, int | float) or not rms <= PARITY_BOUND):
        return f"parity: relative RMS {rms} against the float64 reference, bound {PARITY_BOUND}"
    return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
