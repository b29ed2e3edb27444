"""How far a tensor is from its reference: figures gathered in one pass, batch after batch, in float64.

An accumulator has seen a stream of elements. `update` appends a batch to it and `merge` the whole stream of
another accumulator, so two halves of the data measured apart give the figures of the whole. How the stream was
cut changes counts, extremes and exact percentiles not at all, and sums only by the order of their additions.

An element that is NaN or Inf on either side is counted, turns `finite` to False and is left out of every other
figure. A figure that has no meaning is None and never NaN; `Metrics` says when that is.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Elements converted to float64 at a time: one MB per temporary, five of which exist at once.
CHUNK = 2**17
#: How many magnitudes |d| a Comparison keeps, as float64, for exact percentiles (32 MB).
KEPT = 2**22
#: The percentiles of |d| that are reported, as fractions.
QUANTILES = (0.50, 0.90, 0.95, 0.99)
#: A percentile read from the histogram differs from the exact one by at most this part of it.
PERCENTILE_ERROR = 2.0**-9

#: Added to the denominators of the relative errors, as the gate defines them.
_FLOOR = 1e-8
#: 2^8 buckets per octave, told apart by the exponent and the first 8 bits of the float64 mantissa.
_SHIFT = 52 - 8
_BUCKETS = 2048 << 8

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The figures of a Comparison; d = output - reference, n = the elements that are finite on both sides.

        mse, rmse, mae   mean d^2, its root, mean |d|
        relative_mse     mse / (mean reference^2 + 1e-8);  relative_mae = mae / (mean |reference| + 1e-8)
        correlation      sum (o - mean o)(r - mean r) / sqrt(sum (o - mean o)^2 * sum (r - mean r)^2)
        cosine           sum o r / sqrt(sum o^2 * sum r^2)
        psnr             20 log10(max |reference| / rmse);  sqnr = 10 log10(sum reference^2 / sum d^2)
        std_*            of the population: sqrt(mean (x - mean x)^2)
        zeroed           share of n where the output is 0 and the reference is not
        saturated        share of n whose magnitude is the largest of the output; 0 if that is 0 or occurs once
        moved            share of `count` whose bits, widened to float64, differ (0.0 and -0.0 do)

    Without loss (d = 0 everywhere) psnr and sqnr are inf, and correlation and cosine are 1 where defined.
    None stands for:

        every figure of values   when n is 0, or when the figure is beyond the range of float64
        correlation              when either side is constant
        cosine                   when either side is all zeros
        psnr, sqnr               when the reference is all zeros and the output is not
        p50 .. p99               when percentiles were not asked for
        first_nonfinite          when no output is NaN or Inf where its reference is finite
    """

    count: int
    """All elements seen."""
    compared: int
    """Those finite on both sides: n."""
    finite: bool
    """No NaN and no Inf on either side."""
    identical: bool
    """Every bit of the output is that of the reference."""
    mse: float | None
    rmse: float | None
    mae: float | None
    max_abs: float | None
    relative_mse: float | None
    relative_mae: float | None
    correlation: float | None
    cosine: float | None
    psnr: float | None
    sqnr: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    percentiles_exact: bool | None
    """Whether p50 .. p99 are numpy's own, or within PERCENTILE_ERROR of them."""
    mean_output: float | None
    std_output: float | None
    min_output: float | None
    max_output: float | None
    mean_reference: float | None
    std_reference: float | None
    min_reference: float | None
    max_reference: float | None
    mean_difference: float | None
    std_difference: float | None
    nan_output: int
    inf_output: int
    nan_reference: int
    inf_reference: int
    first_nonfinite: int | None
    """Index, over the whole stream, of the first output that is NaN or Inf while its reference is finite."""
    zeroed: float | None
    saturated: float | None
    moved: float

    def as_dict(self) -> dict[str, Any]:
        """Name -> figure, in the order above."""
        return asdict(self)


class Comparison:
    """Gathers the `Metrics` of a tensor against its reference.

    Percentiles are exact, equal to numpy's (`linear`), while at most `keep` elements were compared: that many
    |d| are held as float64. Beyond, they are read from counts in 2^8 buckets per octave and lie within
    PERCENTILE_ERROR = 2^-9 of the exact ones, relatively (within 2^-1031 absolutely, for those below 2^-1022).
    `percentiles=False` saves the memory and the time.
    """

    def __init__(self, *, percentiles: bool = True, keep: int = KEPT) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
            raise ValueError(f"keep is {keep!r}. Give how many values to keep exactly: 0 or more, e.g. 2**22.")
        self.percentiles = percentiles
        self.keep = keep
        self._tally = _Tally()
        self._magnitudes = _Magnitudes(keep)

    def update(self, output: Tensor, reference: Tensor) -> None:
        """Append a batch. The two have one shape, any float dtypes and devices; an empty one changes nothing."""
        _check_pair(output, reference, names=("output", "reference"))
        flat = [x.detach().reshape(-1) for x in (output, reference)]
        for start in range(0, flat[0].numel(), CHUNK):
            tally, magnitude = _measure(*(_own_double(x[start : start + CHUNK]) for x in flat))
            self._tally = self._tally.then(tally)
            if self.percentiles:
                self._magnitudes.take(magnitude.numpy())

    def merge(self, other: "Comparison") -> Self:
        """Append all that `other` has seen after all that this one has; returns itself, leaves `other` alone."""
        _check_kind(self, other)
        if (other.percentiles, other.keep) != (self.percentiles, self.keep):
            raise ValueError(
                f"cannot merge {other!r} into {self!r}: what they have kept is not comparable. "
                "Make both with the same percentiles and keep."
            )
        self._tally = self._tally.then(other._tally)
        self._magnitudes.take_from(other._magnitudes)
        return self

    def metrics(self) -> Metrics:
        """The figures of all that was seen so far."""
        t = self._tally
        _check_seen(self, t.seen)
        known: dict[str, Any] = {field.name: None for field in fields(Metrics)} | {
            "count": t.seen,
            "compared": t.count,
            "finite": not (t.nan_output or t.inf_output or t.nan_reference or t.inf_reference),
            "identical": t.moved == 0,
            "percentiles_exact": self._magnitudes.exact if self.percentiles and t.count else None,
            "nan_output": t.nan_output,
            "inf_output": t.inf_output,
            "nan_reference": t.nan_reference,
            "inf_reference": t.inf_reference,
            "first_nonfinite": t.first_nonfinite,
            "moved": t.moved / t.seen,
        }
        if t.count:
            known |= t.figures()
        if t.count and self.percentiles:
            quantiles = self._magnitudes.quantiles(largest=t.difference.largest)
            known |= {f"p{q * 100:.0f}": _figure(x) for q, x in zip(QUANTILES, quantiles, strict=True)}
        return Metrics(**known)

    def __repr__(self) -> str:
        return f"Comparison(percentiles={self.percentiles}, keep={self.keep}, count={self._tally.seen})"


@dataclass(frozen=True, kw_only=True)
class LogitMetrics:
    """The figures of a LogitComparison, means over the positions whose logits are finite on both sides.

        kl                    sum over the vocabulary of p_ref * (log p_ref - log p_out), in nats
        top1_agreement        share of positions with the same largest logit (the first of equals)
        bits_per_token        -log2 p_out[target];  reference_bits_per_token = -log2 p_ref[target]
        change_in_bits        bits_per_token - reference_bits_per_token

    They are None when no position is finite on both sides, or when the figure is beyond the range of float64.
    A masked vocabulary, -Inf on both sides, counts as not finite: cut it off first.
    """

    positions: int
    """All positions seen."""
    compared: int
    """Those whose logits are finite on both sides."""
    finite: bool
    """No NaN and no Inf in any logit."""
    nonfinite_output: int
    """Positions with a NaN or Inf among the output's logits."""
    nonfinite_reference: int
    first_nonfinite: int | None
    """The first position, over the whole stream, not finite in the output but finite in the reference."""
    kl: float | None
    top1_agreement: float | None
    bits_per_token: float | None
    reference_bits_per_token: float | None
    change_in_bits: float | None

    def as_dict(self) -> dict[str, Any]:
        """Name -> figure, in the order above."""
        return asdict(self)


class LogitComparison:
    """Gathers the `LogitMetrics` of a model's logits against those of the reference model."""

    def __init__(self) -> None:
        self._positions = 0
        self._compared = 0
        self._nonfinite_output = 0
        self._nonfinite_reference = 0
        self._first_nonfinite: int | None = None
        self._agreed = 0
        self._kl = 0.0
        self._nats = 0.0
        self._reference_nats = 0.0
        self._change = 0.0

    def update(self, logits: Tensor, reference_logits: Tensor, targets: Tensor) -> None:
        """Append a batch: logits [..., vocabulary], and the tokens that did follow as integers [...]."""
        _check_pair(logits, reference_logits, names=("logits", "reference_logits"))
        if targets.shape != logits.shape[:-1] or logits.ndim == 0:
            raise ValueError(
                f"targets have shape {list(targets.shape)} and logits {list(logits.shape)}. "
                "Give one target per position: the shape of the logits without its last axis."
            )
        if targets.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
            raise ValueError(f"targets are {targets.dtype}. Give token numbers as integers, e.g. torch.int64.")
        vocabulary = logits.shape[-1]
        aims = targets.detach().reshape(-1).cpu().long()
        if not aims.numel():
            return
        if aims.min() < 0 or aims.max() >= vocabulary:
            raise ValueError(
                f"targets run from {int(aims.min())} to {int(aims.max())}, but the logits have a vocabulary of "
                f"{vocabulary}. Drop padded positions, and check that the tokenizer is that of the model."
            )
        sides = [x.detach().reshape(-1, vocabulary) for x in (logits, reference_logits)]
        rows = max(1, CHUNK // vocabulary)
        for start in range(0, len(aims), rows):
            stretch = slice(start, start + rows)
            output, reference = (_own_double(x[stretch]) for x in sides)
            self._take(output, reference, aims[stretch])

    def merge(self, other: "LogitComparison") -> Self:
        """Append all that `other` has seen after all that this one has; returns itself, leaves `other` alone."""
        _check_kind(self, other)
        self._first_nonfinite = _first(self._first_nonfinite, self._positions, other._first_nonfinite)
        for name in vars(self).keys() - {"_first_nonfinite"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def metrics(self) -> LogitMetrics:
        """The figures of all that was seen so far."""
        _check_seen(self, self._positions)

        def mean(total: float) -> float | None:
            return _figure(total / self._compared) if self._compared else None

        return LogitMetrics(
            positions=self._positions,
            compared=self._compared,
            finite=not (self._nonfinite_output or self._nonfinite_reference),
            nonfinite_output=self._nonfinite_output,
            nonfinite_reference=self._nonfinite_reference,
            first_nonfinite=self._first_nonfinite,
            kl=mean(0.0 if self._kl < 0 else self._kl),  # rounding may leave it a hair below; NaN stays
            top1_agreement=mean(self._agreed),
            bits_per_token=mean(self._nats / math.log(2)),
            reference_bits_per_token=mean(self._reference_nats / math.log(2)),
            change_in_bits=mean(self._change / math.log(2)),
        )

    def __repr__(self) -> str:
        return f"LogitComparison(positions={self._positions})"

    def _take(self, output: Tensor, reference: Tensor, targets: Tensor) -> None:
        good_output, good_reference = output.isfinite().all(1), reference.isfinite().all(1)
        good = good_output & good_reference
        first = _first_true(~good_output & good_reference)
        self._first_nonfinite = _first(self._first_nonfinite, self._positions, first)
        self._positions += len(good)
        self._compared += int(good.sum())
        self._nonfinite_output += int((~good_output).sum())
        self._nonfinite_reference += int((~good_reference).sum())
        if not good.all():
            output, reference, targets = output[good], reference[good], targets[good]
        self._agreed += int((output.argmax(1) == reference.argmax(1)).sum())
        output, reference = output.log_softmax(1), reference.log_softmax(1)
        self._kl += float((reference.exp() * (reference - output)).sum())
        nats, reference_nats = (-x.gather(1, targets[:, None]) for x in (output, reference))
        self._nats += float(nats.sum())
        self._reference_nats += float(reference_nats.sum())
        self._change += float((nats - reference_nats).sum())


#: What a report calls a figure: the first row whose limit the figure is inside of.
MSE_LABELS = ((1e-4, "excellent"), (1e-3, "good"), (1e-2, "fair"))
CORRELATION_LABELS = ((0.9999, "excellent"), (0.999, "good"), (0.99, "fair"))


def label_mse(mse: float | None) -> str:
    """Below 1e-4 excellent, below 1e-3 good, below 1e-2 fair, else poor (NaN too); None is undefined."""
    if mse is None:
        return "undefined"
    return next((label for limit, label in MSE_LABELS if mse < limit), "poor")


def label_correlation(correlation: float | None) -> str:
    """Above 0.9999 excellent, above 0.999 good, above 0.99 fair, else poor (NaN too); None is undefined."""
    if correlation is None:
        return "undefined"
    return next((label for limit, label in CORRELATION_LABELS if correlation > limit), "poor")


@dataclass(frozen=True)
class _Spread:
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
        return math.sqrt(self.squares / count)

    def mean_square(self, count: int) -> float:
        """Both terms are positive, so nothing cancels."""
        return self.squares / count + self.mean * self.mean


@dataclass(frozen=True)
class _Tally:
    """What is known of a stretch of the stream; `then` is that of two stretches in a row.

    Means and centred sums join as Chan, Golub and LeVeque do: with D = mean_b - mean_a and w = n_a n_b / n,

        mean = mean_a + D n_b / n,   squares = squares_a + squares_b + D^2 w,   product likewise with D_o D_r w
    """

    seen: int = 0
    count: int = 0
    output: _Spread = _Spread()
    reference: _Spread = _Spread()
    difference: _Spread = _Spread()
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

    def then(self, other: "_Tally") -> "_Tally":
        count = self.count + other.count
        share = other.count / count if count else 0.0
        weight = self.count * share

        def step_between(a: _Spread, b: _Spread) -> float:
            return b.mean - a.mean if weight else 0.0  # an empty stretch has no mean

        def join(a: _Spread, b: _Spread) -> _Spread:
            step = step_between(a, b)
            return _Spread(
                mean=a.mean + step * share if self.count else b.mean,
                squares=a.squares + b.squares + step * step * weight,
                minimum=min(a.minimum, b.minimum),
                maximum=max(a.maximum, b.maximum),
            )

        steps = step_between(self.output, other.output) * step_between(self.reference, other.reference)
        largest = max(self.output.largest, other.output.largest)
        return _Tally(
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
            first_nonfinite=_first(self.first_nonfinite, self.seen, other.first_nonfinite),
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
        checked = {name: _figure(value) for name, value in figures.items()}
        return {**checked, "psnr": math.inf, "sqnr": math.inf} if lossless else checked


class _Magnitudes:
    """The values |d| themselves, or once there are more than `keep`, how many fell into each bucket."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._count = 0
        self._kept: list[_Array] = []
        self._buckets: npt.NDArray[np.int64] | None = None

    @property
    def exact(self) -> bool:
        return self._buckets is None

    def take(self, values: _Array) -> None:
        self._count += values.size
        self._kept.append(values)
        if self._count > self._keep:
            self._fold()

    def take_from(self, other: "_Magnitudes") -> None:
        if other._buckets is not None:
            self._buckets = other._buckets + (0 if self._buckets is None else self._buckets)
        self._count += other._count
        self._kept = self._kept + other._kept
        if self._count > self._keep:
            self._fold()

    def quantiles(self, *, largest: float) -> list[float]:
        """QUANTILES of the values, of which there is one at least, as numpy's `linear` defines them."""
        if self._buckets is None:
            with np.errstate(invalid="ignore"):  # |d| beyond float64
                return [float(x) for x in np.quantile(np.concatenate(self._kept), QUANTILES)]
        ends = np.cumsum(self._buckets)
        zeros = self._count - int(ends[-1])  # they are in no bucket, and have the lowest ranks

        def ranked(rank: int) -> float:
            """The middle of the bucket of the value with `rank` others before it."""
            if rank < zeros:
                return 0.0
            bucket = np.searchsorted(ends, rank - zeros, side="right")
            return float(np.int64((int(bucket) << _SHIFT) + (1 << (_SHIFT - 1))).view(np.float64))

        def quantile(position: float) -> float:
            below = int(position)
            low, high = ranked(below), ranked(min(below + 1, self._count - 1))
            value = low + (high - low) * (position - below)
            return largest if value > largest else value

        return [quantile(q * (self._count - 1)) for q in QUANTILES]

    def _fold(self) -> None:
        counts = np.zeros(_BUCKETS, dtype=np.int64) if self._buckets is None else self._buckets
        for values in self._kept:
            buckets = values[values > 0].view(np.int64) >> _SHIFT
            if buckets.size:
                first = int(buckets.min())
                found = np.bincount(buckets - first)
                counts[first : first + found.size] += found
        self._buckets, self._kept = counts, []


def _own_double(x: Tensor) -> Tensor:
    return x.to("cpu", torch.float64, copy=True)


def _measure(output: Tensor, reference: Tensor) -> tuple[_Tally, Tensor]:
    """The tally of one chunk of float64 and the magnitudes of its differences; the chunk is used up."""
    seen = output.numel()
    moved = int(np.count_nonzero(output.numpy().view(np.int64) != reference.numpy().view(np.int64)))
    ends = _ends(output), _ends(reference)
    odd: dict[str, Any] = {}
    if not all(map(math.isfinite, ends[0] + ends[1])):
        good_output, good_reference = output.isfinite(), reference.isfinite()
        odd = {
            "nan_output": int(output.isnan().sum()),
            "inf_output": int(output.isinf().sum()),
            "nan_reference": int(reference.isnan().sum()),
            "inf_reference": int(reference.isinf().sum()),
            "first_nonfinite": _first_true(~good_output & good_reference),
        }
        good = good_output & good_reference
        output, reference = output[good], reference[good]
        if not output.numel():
            return _Tally(seen=seen, moved=moved, **odd), output
        ends = _ends(output), _ends(reference)
    difference = output - reference
    magnitude = difference.abs()
    values, largest = output.numpy(), max(map(abs, ends[0]))
    counts = {
        "zeroed": int(np.count_nonzero((values == 0) & (reference.numpy() != 0))),
        "at_largest": sum(int(np.count_nonzero(values == end)) for end in set(ends[0]) if abs(end) == largest),
    }
    tally = _Tally(
        seen=seen,
        count=output.numel(),
        sum_difference=float(magnitude.sum()),
        sum_reference=float(reference.abs().sum()),
        output=_centre(output, ends[0]),
        reference=_centre(reference, ends[1]),
        difference=_centre(difference, _ends(difference)),
        product=float(torch.dot(output, reference)),  # of the centred values
        moved=moved,
        **counts,
        **odd,
    )
    return tally, magnitude


def _ends(x: Tensor) -> tuple[float, float]:
    """Minimum and maximum; an Inf is one of them, and with a NaN both are NaN."""
    minimum, maximum = torch.aminmax(x)
    return float(minimum), float(maximum)


def _centre(x: Tensor, ends: tuple[float, float]) -> _Spread:
    """The spread of `x`, which is left with its mean subtracted."""
    minimum, maximum = ends
    mean = float(x.sum()) / x.numel()
    if math.isfinite(mean):  # the rounding of the sum may push the mean of equal values off them, so that they vary
        mean = min(max(mean, minimum), maximum)
    x -= mean
    return _Spread(mean, float(torch.dot(x, x)), minimum, maximum)


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


def _figure(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None


def _first(before: int | None, seen: int, after: int | None) -> int | None:
    """The first index of two stretches in a row, the first of which has `seen` elements."""
    return before if before is not None or after is None else seen + after


def _first_true(mask: Tensor) -> int | None:
    return int(mask.numpy().argmax()) if mask.any() else None


def _check_pair(output: Tensor, reference: Tensor, *, names: tuple[str, str]) -> None:
    for name, x in zip(names, (output, reference), strict=True):
        if not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}. Only floats are compared. Convert first, e.g. {name}.float().")
    if output.shape != reference.shape:
        raise ValueError(
            f"{names[0]} has shape {list(output.shape)} and {names[1]} {list(reference.shape)}. "
            "They are compared element by element and never broadcast or cropped: give tensors of one shape."
        )


def _check_kind(into: object, other: object) -> None:
    if type(other) is not type(into):
        raise ValueError(f"cannot merge {other!r} into {into!r}. Merge accumulators of one kind.")


def _check_seen(accumulator: object, seen: int) -> None:
    if not seen:
        raise ValueError(f"{accumulator!r} has seen nothing, so it has no metrics. Call update(...) with data first.")
