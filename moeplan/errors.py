"""The two ways moeplan says no."""

from dataclasses import dataclass


class MoeplanError(Exception):
    """Something the user can act on: printed as one line, `error: ...`, exit status 2.

    The message names the file, the field and the value that are wrong.
    """


@dataclass(frozen=True, slots=True)
class Decline:
    """A path that does not apply here, with the reason. A decline is an answer, not an error."""

    path: str
    reason: str
