"""How a picture of an analysis is made: a sheet of panels, names of layers, many points as bands."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

#: Of Okabe and Ito: told apart by colour-blind people too.
BLUE, ORANGE, GREEN, RED, SKY, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#5f6b7a"
GRID = "#dde2e8"
#: From little to much, for heat maps: perceptually even.
COLOURS = "viridis"
#: Points across a panel, above which they are gathered in bins.
MOST_POINTS = 400
#: Points that are marked one by one.
MOST_MARKS = 40
#: Panels on a sheet.
MOST_PANELS = 12

Values = npt.NDArray[np.float64]
_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "text.parse_math": False,  # a $ in the name of a layer is a $
}


class Sheet:
    """A figure of panels; `png` draws it."""

    def __init__(self, figure: Any, panels: list[Any]) -> None:
        self.figure, self.panels = figure, panels

    def png(self) -> bytes:
        """The picture."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        kept = io.BytesIO()
        canvas: Any = FigureCanvasAgg(self.figure)
        canvas.print_png(kept)
        return kept.getvalue()


@contextmanager
def styled() -> Iterator[None]:
    """Inside, pictures look as here; what the user has set for plots of their own is left out."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


@contextmanager
def sheet(count: int, *, dpi: int, columns: int = 3, size: tuple[float, float] = (4.0, 2.6)) -> Iterator[Sheet]:
    """A sheet of `count` panels, each of `size` inches."""
    from matplotlib.figure import Figure

    with styled():
        across = min(columns, count)
        down = math.ceil(count / across)
        figure = Figure(figsize=(size[0] * across, size[1] * down), dpi=dpi, layout="constrained")
        yield Sheet(figure, [figure.add_subplot(down, across, index + 1) for index in range(count)])


def families(names: Sequence[str]) -> dict[str, list[str]]:
    """Modules that differ in their numbers only, `layers.#.mlp.down_proj`; too many families: all in one."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    if len(found) > MOST_PANELS or (len(found) > 3 and max(map(len, found.values())) == 1):
        return {"all layers": list(names)}
    return found


def short(names: Sequence[str], *, most: int = 24) -> list[str]:
    """What tells names apart: without the parts that all share, the end of what is longer than `most`."""
    parts = [name.split(".") for name in names]
    first = next((i for i, some in enumerate(zip(*parts, strict=False)) if len(set(some)) > 1), 0)
    tails = [one[first:] for one in parts]
    last = 0
    while min(map(len, tails)) > last + 1 and len({one[len(one) - 1 - last] for one in tails}) == 1:
        last += 1
    texts = [".".join(one[: len(one) - last]) for one in tails]
    return [text if len(text) <= most else "\N{HORIZONTAL ELLIPSIS}" + text[1 - most :] for text in texts]


def layer_axis(axes: Any, names: Sequence[str], *, room: float = 60) -> None:
    """As many names as have room below a panel."""
    texts = short(names) if len(names) > 1 else [names[0][-24:]]
    longest = max(map(len, texts))
    upright = longest > 4 and longest * len(texts) > room
    step = max(1, math.ceil(len(texts) * (2.4 if upright else longest + 2) / room))
    places = range(0, len(texts), step)
    axes.set_xticks(list(places), [texts[i] for i in places], rotation=90 if upright else 0)
    axes.set_xlim(-0.5, len(texts) - 0.5)
    if longest <= 4:
        axes.set_xlabel("layer")


def log_axis(axes: Any, values: Sequence[float | None], *, floor: float = 1e-6) -> None:
    """A logarithmic axis over the values above `floor` times the largest; what is 0 or less is not drawn."""
    known = [x for x in values if x is not None and math.isfinite(x) and x > 0]
    if not known:
        axes.set_ylim(0, 1)
        axes.text(0.5, 0.5, "all values are 0", transform=axes.transAxes, ha="center", color=GREY)
        return
    high = max(known)
    low = max(min(known), high * floor)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.6, high * 1.6)
    log_ticks(axes.yaxis, within_a_decade=high < 20 * low)


def mark_below(axes: Any, values: Sequence[float | None], *, colour: str) -> None:
    """A triangle on the lower edge for every value, 0 too, that lies below a logarithmic axis."""
    low = axes.get_ylim()[0]
    places = [i for i, x in enumerate(values) if x is not None and x < low]
    if len(values) <= MOST_MARKS and axes.get_yscale() == "log" and places:
        axes.plot(places, [low] * len(places), "v", color=colour, markersize=5, clip_on=False, zorder=3)


def count_ticks(axis: Any) -> None:
    """Whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def log_ticks(axis: Any, *, base: int = 10, within_a_decade: bool = False) -> None:
    """Powers as plain text, which matplotlib would write as formulas; their parts too where there is one decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    subs = (1, 2, 5) if within_a_decade else (1,)
    axis.set_major_locator(LogLocator(base=base, subs=subs, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"2^{math.log2(x):.0f}" if base == 2 else f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())
    if base == 2:
        axis.set_minor_locator(NullLocator())


def legend(page: Sheet, axes: Any) -> None:
    """The legend of a panel, above all panels."""
    handles, labels = axes.get_legend_handles_labels()
    page.figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), fontsize=8, handlelength=1.6)


def tail(name: str, most: int = 34) -> str:
    """The end of a long name."""
    return name if len(name) <= most else "\N{HORIZONTAL ELLIPSIS}" + name[1 - most :]


def drawable(values: Sequence[float | None]) -> Values:
    """NaN, which is a gap, for what a logarithmic axis cannot show."""
    return np.array([math.nan if x is None or not math.isfinite(x) or x <= 0 else x for x in values])


def bins(count: int, most: int = MOST_POINTS) -> list[slice]:
    """Stretches of points, each drawn as one: single points while there are few."""
    size = math.ceil(count / most)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def line(axes: Any, values: Sequence[float | None], *, colour: str, label: str, width: float = 1.3) -> None:
    """A line through the points; of many, the medians of bins inside the band of their extremes."""
    points = drawable(values)
    parts = bins(len(points))
    marker = {"marker": "o", "markersize": 2 + width} if len(points) <= MOST_MARKS else {}
    if len(parts) == len(points):
        axes.plot(points, color=colour, linewidth=width, label=label, **marker)
        return
    x = [(part.start + part.stop - 1) / 2 for part in parts]
    low, middle, high = (
        [f(points[part]) if np.isfinite(points[part]).any() else math.nan for part in parts]
        for f in (np.nanmin, np.nanmedian, np.nanmax)
    )
    axes.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0)
    axes.plot(x, middle, color=colour, linewidth=width, label=label)
