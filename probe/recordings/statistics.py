"""Figures of one recorded tensor, sample by sample in float64: what the layouts of the scripts keep beside it."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Figures:
    """mean, std, min and max over the finite and other values alike: a NaN makes them NaN."""

    shape: tuple[int, ...]
    dtype: str  # as the model gave it
    first_10: tuple[float, ...]
    mean: float
    std: float
    min: float
    max: float
    has_nan: bool
    has_inf: bool

    def as_json(self, *names: str) -> dict[str, Any]:
        """These figures; what is not finite is null, since JSON has no word for it."""
        return {name: _plain(value) for name, value in asdict(self).items() if name in names}


def figures_of(tensor: Tensor, dtype: str, *, unbiased: bool = False) -> Figures:
    """One pass for sums and extremes, one for the spread around the mean: std = sqrt(sum (x - mean)^2 / n).

    With `unbiased` the divisor is n - 1, as in torch's std; numpy's is n.
    """
    count = tensor.numel()
    total = 0.0
    low, high = math.inf, -math.inf
    has_nan = has_inf = False
    for sample in tensor:
        values = sample.double()
        total += float(values.sum())
        has_nan |= bool(values.isnan().any())
        has_inf |= bool(values.isinf().any())
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    mean = total / count
    spread = sum(float((sample.double() - mean).square().sum()) for sample in tensor)
    divisor = count - 1 if unbiased else count
    std = math.sqrt(spread / divisor) if divisor and not math.isnan(spread) else math.nan
    first = tuple(tensor.flatten()[:10].double().tolist())
    if has_nan:
        low = high = math.nan
    return Figures(tuple(tensor.shape), dtype, first, mean, std, low, high, has_nan, has_inf)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
