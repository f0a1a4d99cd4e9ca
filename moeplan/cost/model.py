"""A time with a band and an origin, and how such times compose."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds with a band; low <= seconds <= high. source, the most trustworthy first: measured, published,
    adjusted (measured, then moved by the fit to the mean of its routing), fitted, assumed, extrapolated.

    >>> layer = Estimate(36e-6, 35e-6, 38e-6, "fitted")
    >>> round(layer.repeated(48).high * 1e6)
    1824
    """

    seconds: float
    low: float
    high: float
    source: str

    def then(self, other: "Estimate") -> "Estimate":
        """In sequence. The bands add: errors from one fit are fully correlated."""
        source = weakest(self.source, other.source)
        return Estimate(self.seconds + other.seconds, self.low + other.low, self.high + other.high, source)

    def beside(self, other: "Estimate") -> "Estimate":
        """In parallel: the slower one counts."""
        source = weakest(self.source, other.source)
        return Estimate(max(self.seconds, other.seconds), max(self.low, other.low), max(self.high, other.high), source)

    def repeated(self, times: int) -> "Estimate":
        """In sequence with itself: 48 layers scale the band by 48, not by its root."""
        return replace(self, seconds=self.seconds * times, low=self.low * times, high=self.high * times)


_STRENGTH = ("measured", "published", "adjusted", "fitted", "assumed", "extrapolated")


def weakest(*sources: str) -> str:
    """The least trustworthy of some origins."""
    return max(sources, key=lambda source: _STRENGTH.index(source) if source in _STRENGTH else len(_STRENGTH))


@dataclass(frozen=True, slots=True)
class Drivers:
    """What a fit sees of one layer's work: means where the routing is random."""

    tokens: int
    slots: float
    distinct: float
    blocks: float = 0.0  # padded blocks of the path's own block rows; 0 where the path has none
