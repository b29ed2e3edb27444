"""Ticks of logarithmic axes: a few, as plain text. matplotlib writes TeX, which is not parsed: names may hold a $."""

import math
from typing import Any

#: Decades with a tick.
MOST = 7


def plain_log(axis: Any) -> None:
    """Ticks of a logarithmic axis, which follow its ends."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_locator(_locator())
    axis.set_major_formatter(FuncFormatter(plain_number))
    axis.set_minor_formatter(NullFormatter())


def plain_log_bar(bar: Any) -> None:
    """Ticks of a logarithmic bar of colours."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    bar.locator, bar.formatter, bar.minorformatter = _locator(), FuncFormatter(plain_number), NullFormatter()


def places(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`: some decades; of up to two, parts of each; of less than one, even steps."""
    from matplotlib.ticker import MaxNLocator

    if high < 4 * low:
        found = [float(x) for x in MaxNLocator(nbins=5, steps=[1, 2, 5, 10], min_n_ticks=2).tick_values(low, high)]
    else:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        parts: tuple[int, ...] = (1, 2, 3, 5) if high < 20 * low else (1, 2, 5) if high < 100 * low else (1,)
        step = math.ceil((last - first) / MOST) if len(parts) == 1 else 1
        found = [part * 10.0**e for e in range(first, last + 1) if e % step == 0 for part in parts]
    return [x for x in found if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)]


def plain_number(value: float, _: object = None) -> str:
    """0, 1, 100, 0.25, 1e-3, 2.5e5."""
    if 0.01 <= value < 1000 or value == 0:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _locator() -> Any:
    from matplotlib.ticker import Locator

    class Places(Locator):
        def __call__(self) -> Any:
            axis: Any = self.axis
            return self.tick_values(*axis.get_view_interval())

        def tick_values(self, vmin: float, vmax: float) -> Any:
            return places(*sorted((vmin, vmax)))

    return Places()
