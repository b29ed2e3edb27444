"""Observers, which read calibration data batch by batch and choose the range of an integer grid.

The result depends only on the values: not on their order, on how they were cut into batches, or on how partial
observers were merged.
"""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from probe.formats import PERCENTILE
from probe.numerics.blocks import resolve_axis
from probe.numerics.histogram import Buckets, linear
from probe.numerics.integers import IntegerParameters, code_range, integer_parameters
from probe.numerics.native import numba_twin
from probe.numerics.rounding import require_float
from probe.words import look_up

#: 2^10 buckets per octave, from 2^-127 (the first one also holds everything below, and the zeros) to 2^128, where
#: float32 ends. A value differs from the middle of its bucket by at most 2^-11 of itself.
BUCKETS = Buckets(float_bits=64, mantissa_bits=10, lowest=-127, octaves=255)

#: How many of the largest magnitudes a PercentileObserver keeps exactly.
KEPT = 2**18


class Observer:
    """The interface of all observers, and the extremes of the data. Its tensors are float64 on the CPU.

    Every option of the constructor is an attribute of the same name.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self.count = 0
        """How many values were seen."""
        self._minimum = torch.tensor(torch.inf, dtype=torch.float64)
        self._maximum = torch.tensor(-torch.inf, dtype=torch.float64)

    @property
    def settings(self) -> dict[str, Any]:
        """The options it was made with; only observers of equal settings merge."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @property
    def amax(self) -> Tensor:
        """The largest magnitude its grid should hold, float64: max(|minimum|, |maximum|) unless a subclass differs."""
        if self.count == 0:
            raise ValueError(f"{self!r} has seen no values, so it has no range. Call update(x) with data first.")
        return torch.maximum(self._minimum.abs(), self._maximum.abs())

    def update(self, x: Tensor) -> None:
        """Observe one more batch. An empty one changes nothing; NaN and Inf are refused."""
        require_float(x, "Observers")
        if not x.numel():
            return
        x = x.detach()
        ends = torch.stack(torch.aminmax(x))  # an Inf is one of them, and with a NaN both are NaN
        if not bool(ends.isfinite().all()):
            wrong = int((~x.isfinite()).sum())
            raise ValueError(
                f"x has {wrong} NaN or Inf among {x.numel()} values, which belong to no range. "
                "Find where they come from before calibrating."
            )
        self._take(x, *ends.double().cpu())
        self.count += x.numel()

    def merge(self, other: "Observer") -> Self:
        """Add everything that `other` has observed, which stays as it is; returns itself."""
        if type(other) is not type(self) or other.settings != self.settings:
            raise ValueError(
                f"cannot merge {other!r} into {self!r}: what they have kept is not comparable. "
                "Merge observers of one kind, made with the same options."
            )
        if other.count:
            self._take_from(other)
            self.count += other.count
        return self

    def parameters(self, *, bits: int = 8, symmetric: bool = True) -> IntegerParameters:
        """The grid for the data seen: its range, cut to -amax .. amax, given to `integer_parameters`."""
        limit = self.amax
        if symmetric:
            return integer_parameters(-limit, limit, bits=bits)
        lo, hi = self._minimum.clamp(-limit, limit), self._maximum.clamp(-limit, limit)
        return integer_parameters(lo, hi, bits=bits, symmetric=False)

    def state_dict(self) -> dict[str, Any]:
        """The whole state as tensors and plain values; `from_state` reads it."""
        state = {"name": self.name, "count": self.count, **self.settings}
        return {**state, "minimum": self._minimum.clone(), "maximum": self._maximum.clone(), **self._kept()}

    def __repr__(self) -> str:
        options = "".join(f"{name}={value!r}, " for name, value in self.settings.items())
        return f"{type(self).__name__}({options}count={self.count})"

    def _take(self, x: Tensor, minimum: Tensor, maximum: Tensor) -> None:
        """Observe values with these extremes."""
        self._widen(minimum, maximum)

    def _take_from(self, other: Self) -> None:
        self._widen(other._minimum, other._maximum)

    def _widen(self, minimum: Tensor, maximum: Tensor) -> None:
        self._minimum = torch.minimum(self._minimum, minimum)
        self._maximum = torch.maximum(self._maximum, maximum)

    def _kept(self) -> dict[str, Tensor]:
        """What a subclass saves beside the count and the extremes."""
        return {}

    def _restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`, but for the settings."""
        self.count = int(state["count"])
        self._minimum, self._maximum = state["minimum"].clone(), state["maximum"].clone()


class MinMaxObserver(Observer):
    """amax = max |x|, over everything or, with `axis`, per index along that axis.

    With an axis, amax has shape [n, 1, ..., 1], a one for each dimension after it, and broadcasts against the data; all
    batches must agree on n and on those dimensions.
    """

    name = "minmax"

    def __init__(self, *, axis: int | None = None) -> None:
        super().__init__()
        self.axis = axis

    def _take(self, x: Tensor, minimum: Tensor, maximum: Tensor) -> None:
        if self.axis is None:
            super()._take(x, minimum, maximum)
            return
        axis = resolve_axis(self.axis, x.ndim)
        rows = x.movedim(axis, 0).reshape(x.shape[axis], -1)
        shape = (x.shape[axis], *[1] * (x.ndim - 1 - axis))
        self._widen(rows.amin(1).double().cpu().reshape(shape), rows.amax(1).double().cpu().reshape(shape))

    def _widen(self, minimum: Tensor, maximum: Tensor) -> None:
        if self.count and minimum.shape != self._minimum.shape:
            raise ValueError(
                f"{self!r} has seen ranges of shape {list(self._minimum.shape)} and now gets "
                f"{list(minimum.shape)}. Use one observer per tensor, or count the axis from the end."
            )
        super()._widen(minimum, maximum)


class _CountingObserver(Observer):
    """An observer that also counts values in tables of BUCKETS."""

    _tables: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        self._counts = torch.zeros(self._tables * BUCKETS.size, dtype=torch.int64)

    def _take(self, x: Tensor, minimum: Tensor, maximum: Tensor) -> None:
        self._counts += _count(x, self._tables)
        super()._take(x, minimum, maximum)

    def _take_from(self, other: Self) -> None:
        super()._take_from(other)
        self._counts = self._counts + other._counts

    def _kept(self) -> dict[str, Tensor]:
        filled = self._counts.nonzero().squeeze(1)
        return {"buckets": filled, "counts": self._counts[filled]}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._counts = torch.zeros_like(self._counts).index_put((state["buckets"],), state["counts"])


class PercentileObserver(_CountingObserver):
    """amax = the quantile `alpha` of |x| over all data seen, as numpy's `linear` method defines it.

        v = sorted |x|,  h = alpha * (count - 1)
        amax = v[floor h] + (h - floor h) * (v[ceil h] - v[floor h])

    The KEPT = 2^18 largest magnitudes are kept, so amax is exact, equal to numpy's in float64, while
    (1 - alpha) * count is below 2^18 - 2: up to 5 * 10^8 values for alpha = 0.9995, and always up to 2^18 values.
    Beyond that it is read from counts in buckets of 2^-10 relative width, with a relative error of at most 2^-11
    (an absolute one of at most 2^-126, below that).

    Asymmetric grids get the observed minimum .. maximum, cut to -amax .. amax.
    """

    name = "percentile"

    def __init__(self, alpha: float = PERCENTILE) -> None:
        super().__init__()
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
            raise ValueError(f"alpha is {alpha!r}. A quantile is above 0 and at most 1: give e.g. 0.9995.")
        self.alpha = float(alpha)
        self._top = torch.empty(0, dtype=torch.float64)

    @property
    def amax(self) -> Tensor:
        """The quantile."""
        largest = float(super().amax)
        counts = self._counts.numpy().copy()
        zeros, counts[0] = int(counts[0]), 0
        counted = BUCKETS.ranked(counts, zeros=zeros)

        def ranked(rank: int) -> float:
            place = rank - (self.count - len(self._top))
            return kept[place] if place >= 0 else min(counted(rank), largest)

        position = self.alpha * (self.count - 1)
        places = [int(position) + more - (self.count - len(self._top)) for more in (0, 1)]
        kept = self._kept_at([place for place in places if 0 <= place < len(self._top)])
        return torch.tensor(linear(position, ranked), dtype=torch.float64)

    def _kept_at(self, places: list[int]) -> dict[int, float]:
        """The kept magnitudes that a sort would put at these places."""
        if not places:
            return {}
        twin = numba_twin("probe.numerics.selection", "percentiles")
        top = self._top
        values = top.sort().values[places].tolist() if twin is None else twin.values_at(top.numpy(), places)
        return dict(zip(places, values, strict=True))

    def _take(self, x: Tensor, minimum: Tensor, maximum: Tensor) -> None:
        super()._take(x, minimum, maximum)
        magnitude = x.abs().flatten()
        if self.count + magnitude.numel() > KEPT:
            magnitude = magnitude[magnitude >= self._least_kept()]
        self._keep(magnitude)

    def _take_from(self, other: Self) -> None:
        super()._take_from(other)
        self._keep(other._top)

    def _least_kept(self) -> float:
        """The start of the bucket of the last value to keep: at least KEPT of those counted are no smaller."""
        from_above = self._counts.flip(0).cumsum(0)
        bucket = BUCKETS.size - 1 - int(torch.searchsorted(from_above, KEPT))
        return float(BUCKETS.edges[bucket]) if bucket > 0 else 0.0

    def _keep(self, magnitude: Tensor) -> None:
        merged = torch.cat([self._top, magnitude.double().cpu()])
        self._top = merged.topk(KEPT, sorted=False).values if merged.numel() > KEPT else merged

    def _kept(self) -> dict[str, Tensor]:
        return {"top": self._top.sort().values, **super()._kept()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._top = state["top"].clone()


class MSEObserver(_CountingObserver):
    """amax = the clipping range whose symmetric grid of `bits` bits has the least squared error on the data.

        candidates   max|x| * 2^(-j / 32),  j = 0 .. 320  (down to max|x| / 1024)
        error(c)     sum over buckets of count * (m - grid_c(m))^2,  m = the middle of the bucket
        grid_c       scale = c / (2^(b-1) - 1), nearest of the codes -2^(b-1) .. 2^(b-1) - 1
        amax         the candidate of least error, the largest of equals

    Positive and negative values are counted separately, because the grid has one more negative code; values below
    2^-127 count as 0. Each m is within 2^-11, relatively, of the values of its bucket, and the distance to a grid
    changes no faster than the value. So the root mean square error of the chosen grid on the data itself is within
    2^-10 * rms(x) of the best candidate's.
    """

    name = "mse"
    _tables = 2  # of the values from 0 up, then of the negative ones
    _octaves: ClassVar[Tensor] = torch.arange(321, dtype=torch.float64) / 32

    def __init__(self, *, bits: int = 8) -> None:
        super().__init__()
        code_range(bits, True)
        self.bits = bits

    @property
    def amax(self) -> Tensor:
        """The best clipping range."""
        candidates = super().amax * torch.exp2(-self._octaves)
        scales = integer_parameters(-candidates, candidates, bits=self.bits).scale.double()
        filled = self._counts.nonzero().squeeze(1)
        counts, bucket = self._counts[filled].double(), filled % BUCKETS.size
        middle = torch.where(bucket == 0, 0.0, torch.from_numpy(BUCKETS.middles(bucket.numpy())))
        values = torch.where(filled >= BUCKETS.size, -middle, middle)
        low, high = code_range(self.bits, True)
        errors = [
            (counts * (values - scale * torch.round(values / scale).clamp(low, high)).square()).sum()
            for scale in scales
        ]
        return candidates[torch.stack(errors).argmin()]

    def parameters(self, *, bits: int | None = None, symmetric: bool = True) -> IntegerParameters:
        """The grid of least error; `bits` may be left out, and must be those of the observer if given."""
        if bits not in (None, self.bits) or not symmetric:
            asked = f"bits={self.bits if bits is None else bits}, symmetric={symmetric}"
            raise ValueError(
                f"{self!r} has chosen for a symmetric grid of {self.bits} bits, not for {asked}. "
                "Make an MSEObserver with those bits, or use 'minmax' or 'percentile' for asymmetric grids."
            )
        return super().parameters(bits=self.bits)


#: name -> class; a new observer is a new row.
OBSERVERS: dict[str, type[Observer]] = {
    observer.name: observer for observer in (MinMaxObserver, PercentileObserver, MSEObserver)
}


def make_observer(name: str, **options: Any) -> Observer:
    """A fresh observer of that name: `make_observer("percentile", alpha=0.9999)`."""
    kind = look_up("observer", name, OBSERVERS)
    known = dict(inspect.signature(kind).parameters)
    for option in options:
        look_up(f"option of observer {name!r}:", option, known)
    return kind(**options)


def from_state(state: Mapping[str, Any]) -> Observer:
    """The observer that `state_dict` described, ready for more data."""
    kind = look_up("observer", state.get("name"), OBSERVERS)
    blank = kind().state_dict()
    wrong = sorted(blank.keys() ^ state.keys())
    if wrong:
        raise ValueError(
            f"the state of observer {kind.name!r} has missing or unknown entries: {', '.join(wrong)}. "
            f"Expected exactly: {', '.join(blank)}. Pass what state_dict() gave."
        )
    observer = kind(**{name: state[name] for name in inspect.signature(kind).parameters})
    observer._restore(state)
    return observer


def _count(x: Tensor, tables: int) -> Tensor:
    """How many magnitudes fall into each of BUCKETS; with two tables, those of negative values into the second one."""
    try:
        return BUCKETS.count_tensor(x, tables=tables)
    except IndexError as beyond:
        raise ValueError(
            f"x has {beyond} values of magnitude 2^128 or more, which float32 cannot hold. "
            "Use the 'minmax' observer, or find where they come from."
        ) from None
