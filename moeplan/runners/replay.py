"""A runner without a device: answers arms from samples that were stored earlier. For tests of the planning code."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeplan.cost.samples import Sample, SampleFile
from moeplan.kernels.protocol import Arm


def replay(samples: Sequence[Sample], arms: Sequence[Arm], header: Mapping[str, Any], source: Path) -> SampleFile:
    """The stored sample of each arm's path, shape, tokens and routing (the first seed stored), under the arm's id.

    An arm that was never timed is among the failed, with that reason.
    """
    found: list[Sample] = []
    failed: dict[str, str] = {}
    for arm in arms:
        wanted = (arm.path, arm.shape, arm.tokens, arm.routing)
        stored = [s for s in samples if (s.path, s.shape, s.tokens, s.routing) == wanted]
        if stored:
            found.append(replace(min(stored, key=lambda s: (s.seed, s.arm)), arm=arm.id))
        else:
            failed[arm.id] = f"no stored sample of {arm.path} at {arm.tokens} tokens, {arm.routing} routing"
    return SampleFile(source, dict(header), tuple(found), failed)
