"""What is known of a stretch of the stream, and how two stretches in a row join."""

import math
from dataclasses import dataclass

#: Added to the denominators of the relative errors, as the gate defines them.
_FLOOR = 1e-8


@dataclass(frozen=True)
class Spread:
    """Mean, sum of squares around it, and extremes of n values."""

    mean: float = 0.0
    squares: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return 0.0 + max(-self.minimum, self.maximum)  # -0.0 becomes 0.0

    def std(self, count: int) -> float:
        """Of the population."""
        return math.sqrt(self.squares / count)

    def mean_square(self, count: int) -> float:
        """Both terms are positive, so nothing cancels."""
        return self.squares / count + self.mean * self.mean


@dataclass(frozen=True)
class Tally:
    """What is known of a stretch of the stream; `then` is that of two stretches in a row.

    Means and centred sums join as Chan, Golub and LeVeque do: with D = mean_b - mean_a and w = n_a n_b / n,

        mean = mean_a + D n_b / n,   squares = squares_a + squares_b + D^2 w,   product likewise with D_o D_r w
    """

    seen: int = 0
    count: int = 0
    output: Spread = Spread()
    reference: Spread = Spread()
    difference: Spread = Spread()
    product: float = 0.0
    sum_difference: float = 0.0
    sum_reference: float = 0.0
    zeroed: int = 0
    at_largest: int = 0
    moved: int = 0
    nan_output: int = 0
    inf_output: int = 0
    nan_reference: int = 0
    inf_reference: int = 0
    first_nonfinite: int | None = None

    def then(self, other: "Tally") -> "Tally":
        """The tally of this stretch and the next one."""
        count = self.count + other.count
        share = other.count / count if count else 0.0
        weight = self.count * share

        def step_between(a: Spread, b: Spread) -> float:
            return b.mean - a.mean if weight else 0.0  # an empty stretch has no mean

        def join(a: Spread, b: Spread) -> Spread:
            step = step_between(a, b)
            return Spread(
                mean=a.mean + step * share if self.count else b.mean,
                squares=a.squares + b.squares + step * step * weight,
                minimum=min(a.minimum, b.minimum),
                maximum=max(a.maximum, b.maximum),
            )

        steps = step_between(self.output, other.output) * step_between(self.reference, other.reference)
        largest = max(self.output.largest, other.output.largest)
        return Tally(
            seen=self.seen + other.seen,
            count=count,
            output=join(self.output, other.output),
            reference=join(self.reference, other.reference),
            difference=join(self.difference, other.difference),
            product=self.product + other.product + steps * weight,
            sum_difference=self.sum_difference + other.sum_difference,
            sum_reference=self.sum_reference + other.sum_reference,
            zeroed=self.zeroed + other.zeroed,
            at_largest=sum(part.at_largest for part in (self, other) if part.output.largest == largest),
            moved=self.moved + other.moved,
            nan_output=self.nan_output + other.nan_output,
            inf_output=self.inf_output + other.inf_output,
            nan_reference=self.nan_reference + other.nan_reference,
            inf_reference=self.inf_reference + other.inf_reference,
            first_nonfinite=first(self.first_nonfinite, self.seen, other.first_nonfinite),
        )

    def figures(self) -> dict[str, float | None]:
        """The figures of values, by their names in `Metrics`, but for the percentiles."""
        n, o, r, d = self.count, self.output, self.reference, self.difference
        mse, mae, power = d.mean_square(n), self.sum_difference / n, r.mean_square(n)
        lossless = d.largest == 0
        saturated = self.at_largest if self.at_largest > 1 and o.largest > 0 else 0
        product = self.product / n + o.mean * r.mean
        figures = {
            "mse": mse,
            "rmse": math.sqrt(mse),
            "mae": mae,
            "max_abs": d.largest,
            "relative_mse": mse / (power + _FLOOR),
            "relative_mae": mae / (self.sum_reference / n + _FLOOR),
            "correlation": _cosine(self.product, o.squares, r.squares, same=lossless),
            "cosine": _cosine(product, o.mean_square(n), power, same=lossless),
            "psnr": _decibels(r.largest, math.sqrt(mse)),
            "sqnr": _decibels(math.sqrt(power), math.sqrt(mse)),
            "mean_output": o.mean,
            "std_output": o.std(n),
            "min_output": o.minimum,
            "max_output": o.maximum,
            "mean_reference": r.mean,
            "std_reference": r.std(n),
            "min_reference": r.minimum,
            "max_reference": r.maximum,
            "mean_difference": d.mean,
            "std_difference": d.std(n),
            "zeroed": self.zeroed / n,
            "saturated": saturated / n,
        }
        checked = {name: figure(value) for name, value in figures.items()}
        return {**checked, "psnr": math.inf, "sqnr": math.inf} if lossless else checked


def _cosine(product: float, squares_a: float, squares_b: float, *, same: bool) -> float | None:
    norm = math.sqrt(squares_a) * math.sqrt(squares_b)
    if not 0 < norm < math.inf or not math.isfinite(product):
        return None
    return 1.0 if same else max(-1.0, min(1.0, product / norm))


def _decibels(signal: float, noise: float) -> float | None:
    """20 log10(signal / noise), of logarithms so that the quotient cannot overflow."""
    if not (0 < signal < math.inf and 0 < noise < math.inf):
        return None
    return 20 * (math.log10(signal) - math.log10(noise))


def figure(x: float | None) -> float | None:
    """None for what is beyond float64, or has no meaning."""
    return x if x is not None and math.isfinite(x) else None


def first(before: int | None, seen: int, after: int | None) -> int | None:
    """The first index of two stretches in a row, the first of which has `seen` elements."""
    return before if before is not None or after is None else seen + after
