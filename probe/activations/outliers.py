"""Outlier tokens: where, which ones, how far out."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

#: The worst tokens of a layer that are listed one by one.
WORST = 20


@dataclass(frozen=True, order=True)
class OutlierToken:
    """One token of one sample, and how many times the median it is."""

    ratio: float
    value: float
    sample: int
    position: int
    token: int


@dataclass(frozen=True)
class LayerOutliers:
    """The tokens of a layer whose max |x| > threshold x the median of max |x| over the tokens of their sample."""

    module: str
    threshold: float
    tokens: int = 0
    count: int = 0
    samples: int = 0
    """How many samples have one."""
    largest_ratio: float = 0.0
    """The largest max |x| / median, outlier or not; inf where a median is 0."""
    positions: Counter[int] = field(default_factory=Counter)
    token_ids: Counter[int] = field(default_factory=Counter)
    worst: tuple[OutlierToken, ...] = ()

    def merge(self, other: "LayerOutliers") -> "LayerOutliers":
        """Both together."""
        return LayerOutliers(
            self.module,
            self.threshold,
            self.tokens + other.tokens,
            self.count + other.count,
            self.samples + other.samples,
            max(self.largest_ratio, other.largest_ratio),
            self.positions + other.positions,
            self.token_ids + other.token_ids,
            tuple(sorted(self.worst + other.worst, key=lambda one: (-one.ratio, one.sample, one.position))[:WORST]),
        )


def find_outliers(
    module: str, amax: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64], *, threshold: float, sample: int
) -> LayerOutliers:
    """The outliers of one sample: max |x| of each of its tokens, padding left out, and what tokens these are."""
    if not amax.size:
        return LayerOutliers(module, threshold)
    wide = amax.astype(np.float64)
    median = float(np.median(wide))
    ratios = wide / median if median else np.where(wide > 0, np.inf, 0.0)
    places = np.flatnonzero(wide > threshold * median)
    worst = [
        OutlierToken(float(ratios[place]), float(wide[place]), sample, int(place), int(tokens[place]))
        for place in places[np.argsort(-ratios[places], kind="stable")][:WORST]
    ]
    return LayerOutliers(
        module,
        threshold,
        tokens=int(amax.size),
        count=len(places),
        samples=int(len(places) > 0),
        largest_ratio=float(ratios.max()),
        positions=Counter(int(place) for place in places),
        token_ids=Counter(int(tokens[place]) for place in places),
        worst=tuple(worst),
    )
