"""Gathering the figures of a tensor against its reference, batch after batch."""

import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, Self

from torch import Tensor

from probe.metrics import reference as readable
from probe.metrics.checks import check_kind, check_pair, check_seen
from probe.metrics.figures import Metrics
from probe.metrics.magnitudes import KEPT, QUANTILES, Magnitudes
from probe.metrics.tally import Tally, figure

#: From so many elements a batch is worth the loading of the fast twin, some 0.5 s once in a process.
LARGE = 2**20

_Measure = Callable[[Tensor, Tensor, Magnitudes | None], Tally]


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
        self._tally = Tally()
        self._magnitudes = Magnitudes(keep)

    def update(self, output: Tensor, reference: Tensor) -> None:
        """Append a batch. The two have one shape, any float dtypes and devices; an empty one changes nothing."""
        check_pair(output, reference, names=("output", "reference"))
        measure = _fast() if output.numel() >= LARGE else readable.measure
        flat, plain = (x.detach().reshape(-1) for x in (output, reference))
        self._tally = self._tally.then(measure(flat, plain, self._magnitudes if self.percentiles else None))

    def merge(self, other: "Comparison") -> Self:
        """Append all that `other` has seen after all that this one has; returns itself, leaves `other` alone."""
        check_kind(self, other)
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
        check_seen(self, t.seen)
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
            known |= {f"p{q * 100:.0f}": figure(x) for q, x in zip(QUANTILES, quantiles, strict=True)}
        return Metrics(**known)

    def __repr__(self) -> str:
        return f"Comparison(percentiles={self.percentiles}, keep={self.keep}, count={self._tally.seen})"


@cache
def _fast() -> _Measure:
    """The fast twin; where numba cannot be loaded the readable one, after one warning."""
    try:
        from probe.metrics import fast
    except ImportError as problem:
        slower = f"numba cannot be loaded ({problem}). Going on without it: the same figures, but slower."
        warnings.warn(slower, RuntimeWarning, stacklevel=3)
        return readable.measure
    return fast.measure
