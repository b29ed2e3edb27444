"""Mean and centred sums up to the fourth power, and how those of two sets of values merge."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Moments:
    """Of `count` values: their mean m and the sums of (x - m)^2, (x - m)^3 and (x - m)^4; NaN if not gathered."""

    count: int = 0
    mean: float = 0.0
    second: float = 0.0
    third: float = math.nan
    fourth: float = math.nan

    def merge(self, other: "Moments") -> "Moments":
        """Those of both together (Pebay 2008), with a, b the shares of the two counts n_a, n_b and D = m_b - m_a:

        m  = m_a + D b
        M2 = M2_a + M2_b + D^2 n_a b
        M3 = M3_a + M3_b + D^3 n_a b (a - b) + 3 D (a M2_b - b M2_a)
        M4 = M4_a + M4_b + D^4 n_a b (a^2 - a b + b^2) + 6 D^2 (a^2 M2_b + b^2 M2_a) + 4 D (a M3_b - b M3_a)

        Merging with nothing changes nothing.
        """
        if not self.count or not other.count:
            return self if self.count else other
        n = self.count + other.count
        a, b, d = self.count / n, other.count / n, other.mean - self.mean
        square, weight = d * d, self.count * b
        return Moments(
            n,
            self.mean + d * b,
            self.second + other.second + square * weight,
            self.third + other.third + square * d * weight * (a - b) + 3 * d * (a * other.second - b * self.second),
            self.fourth
            + other.fourth
            + square * square * weight * (a * a - a * b + b * b)
            + 6 * square * (a * a * other.second + b * b * self.second)
            + 4 * d * (a * other.third - b * self.third),
        )

    @property
    def variance(self) -> float:
        """Of the population: mean (x - m)^2; 0 of no values."""
        return self.second / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """The root of the variance."""
        return math.sqrt(self.variance)

    @property
    def mean_square(self) -> float:
        """mean x^2. Both terms are positive, so nothing cancels."""
        return self.variance + self.mean * self.mean

    @property
    def kurtosis(self) -> float | None:
        """n M4 / M2^2: 3 for a normal distribution; None where all values are equal."""
        square = self.second * self.second
        return self.count * self.fourth / square if square > 0 else None


#: Of no values.
NO_MOMENTS = Moments()
