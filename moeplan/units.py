"""The only place where numbers become text. Inside: seconds, bytes, fractions."""


def seconds(value: float) -> str:
    """Three significant digits in the unit that suits the size: `36.2 us`, `4.13 ms`, `1.20 s`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return "0 s" if value == 0 else f"{value / 1e-9:.3g} ns"


def size(value: float) -> str:
    """Bytes with a decimal prefix: `2.65 MB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def percent(fraction: float) -> str:
    """A fraction as a percentage with its sign: `+4.1 %`."""
    return f"{fraction * 100:+.1f} %"
