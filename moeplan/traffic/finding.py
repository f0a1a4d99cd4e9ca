"""One thing that is wrong with a trace, as data."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """code: see docs/trace-format.md; layer: the model's layer number, None = all.

    first_row: the first row concerned; rows: how many are, not always without gaps.
    """

    code: str
    severity: Literal["error", "warning"]
    layer: int | None
    first_row: int
    rows: int
    message: str
    remedy: str
