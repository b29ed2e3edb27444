"""Mean and centred sums up to the fourth power, and how two of them join."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Moments:
    """Of n values: their mean m and the sums of (x - m)^2, (x - m)^3 and (x - m)^4."""

    mean: float = 0.0
    second: float = 0.0
    third: float = 0.0
    fourth: float = 0.0

    def merge(self, count: int, other: "Moments", other_count: int) -> "Moments":
        """Those of both together (Pebay 2008), with a, b the counts, n = a + b and D = m_b - m_a:

        m  = m_a + D b / n
        M2 = M2_a + M2_b + D^2 a b / n
        M3 = M3_a + M3_b + D^3 a b (a - b) / n^2 + 3 D (a M2_b - b M2_a) / n
        M4 = M4_a + M4_b + D^4 a b (a^2 - a b + b^2) / n^3
             + 6 D^2 (a^2 M2_b + b^2 M2_a) / n^2 + 4 D (a M3_b - b M3_a) / n
        """
        if not count or not other_count:
            return self if count else other
        n = count + other_count
        a, b, d = count / n, other_count / n, other.mean - self.mean
        w = a * other_count  # a b / n
        return Moments(
            self.mean + d * b,
            self.second + other.second + d * d * w,
            self.third + other.third + d**3 * w * (a - b) + 3 * d * (a * other.second - b * self.second),
            self.fourth
            + other.fourth
            + d**4 * w * (a * a - a * b + b * b)
            + 6 * d * d * (a * a * other.second + b * b * self.second)
            + 4 * d * (a * other.third - b * self.third),
        )

    def kurtosis(self, count: int) -> float | None:
        """n M4 / M2^2; None where all values are equal."""
        return count * self.fourth / self.second**2 if self.second**2 > 0 else None
