"""Token counts as text."""

from collections.abc import Sequence


def listed(tokens: Sequence[int], most: int = 6) -> str:
    """`9..16, 512`: runs of neighbours, the middle left out where there are more than `most`.

    >>> listed([1, 2, 3, 8])
    '1..3, 8'
    """
    runs: list[list[int]] = []
    for count in sorted(tokens):
        if runs and count == runs[-1][1] + 1:
            runs[-1][1] = count
        else:
            runs.append([count, count])
    words = [str(low) if low == high else f"{low}..{high}" for low, high in runs]
    return ", ".join(words if len(words) <= most else [*words[: most - 2], "...", words[-1]])
