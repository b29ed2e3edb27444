"""How a picture of an analysis is made: a sheet of panels, names of layers, many points as bands."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.report.ticks import plain_log

#: Of Okabe and Ito: told apart by colour-blind people too.
BLUE, ORANGE, GREEN, RED, SKY, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#5f6b7a"
GRID = "#dde2e8"
#: From little to much, for heat maps: perceptually even.
COLOURS = "viridis"
#: Points across a panel, above which they are gathered in bins.
MOST_POINTS = 400
#: Points that are marked one by one.
MOST_MARKS = 40
#: Panels of single tensors on a sheet, and of families of modules.
MOST_PANELS, MOST_FAMILIES = 12, 24
#: Inches of the narrowest sheet, and letters to the inch below a panel.
NARROWEST, LETTERS = 8.0, 15
#: Title of a panel of modules that are no family.
MIXED = "all layers"

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
    """A sheet of `count` panels, each of `size` inches; wider where there are fewer than `columns`."""
    from matplotlib.figure import Figure

    with styled():
        across = min(columns, count)
        down = math.ceil(count / across)
        figure = Figure(figsize=(_width(across, columns, size[0]), size[1] * down), dpi=dpi, layout="constrained")
        yield Sheet(figure, [figure.add_subplot(down, across, index + 1) for index in range(count)])


def _width(across: int, columns: int, width: float) -> float:
    """Of a sheet, in inches: that of its panels, or enough for a legend."""
    return min(width * columns, max(width * across, NARROWEST))


@contextmanager
def family_sheet(groups: Mapping[str, Sequence[str]], *, dpi: int) -> Iterator[Sheet]:
    """A panel for each family, high enough for the names of its layers and the plot above them."""
    across = min(3, len(groups))
    room = max(label_height(names, _width(across, 3, 4.0) / across) for names in groups.values())
    with sheet(len(groups), dpi=dpi, size=(4.0, 2.6 + room)) as page:
        yield page


def families(names: Sequence[str]) -> dict[str, list[str]]:
    """Modules that differ in parts that are numbers, `layers.#.mlp.fc1`; too many, or all of one module: MIXED."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(".".join("#" if part.isdecimal() else part for part in name.split(".")), []).append(name)
    if len(found) > MOST_FAMILIES or (len(found) > 3 and max(map(len, found.values())) == 1):
        return {MIXED: list(names)}
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


def layer_axis(axes: Any, names: Sequence[str]) -> None:
    """As many names as have room below a panel, upright where that takes less."""
    texts, width = _labels(names), axes.figure.get_figwidth() / axes.get_subplotspec().get_gridspec().ncols
    longest, upright = max(map(len, texts)), _upright(texts, width)
    step = max(1, math.ceil(len(texts) * (2.4 if upright else longest + 2) / (LETTERS * width)))
    places = range(0, len(texts), step)
    axes.set_xticks(list(places), [texts[i] for i in places], rotation=90 if upright else 0)
    axes.set_xlim(-0.5, len(texts) - 0.5)
    if longest <= 4:
        axes.set_xlabel("layer")


def label_height(names: Sequence[str], width: float) -> float:
    """Inches that upright names take below a panel of this width."""
    texts = _labels(names)
    return 0.07 * max(map(len, texts)) if _upright(texts, width) else 0.0


def _upright(texts: Sequence[str], width: float) -> bool:
    longest = max(map(len, texts))
    return longest > 4 and longest * len(texts) > LETTERS * width


def _labels(names: Sequence[str]) -> list[str]:
    return short(names) if len(names) > 1 else [tail(names[0], 24)]


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
    plain_log(axes.yaxis)


def mark_below(axes: Any, values: Sequence[float | None], *, colour: str, size: float = 5) -> None:
    """A triangle on the lower edge for every value, 0 too, that lies below a logarithmic axis."""
    low = axes.get_ylim()[0]
    places = [i for i, x in enumerate(values) if x is not None and x < low]
    if axes.get_yscale() == "log" and places:
        size = size if len(values) <= MOST_MARKS else size / 2
        axes.plot(places, [low] * len(places), "v", color=colour, markersize=size, clip_on=False, zorder=3)


def count_ticks(axis: Any) -> None:
    """Whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def octave_ticks(axis: Any) -> None:
    """Powers of 2 as plain text, a few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axis.set_major_locator(LogLocator(base=2, numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"2^{math.log2(x):.0f}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def legend(page: Sheet, axes: Any) -> None:
    """The legend of a panel, above all panels, in as many lines as the width of the sheet needs."""
    handles, labels = axes.get_legend_handles_labels()
    for lines in range(1, len(labels) + 1):
        columns = math.ceil(len(labels) / lines)
        made = page.figure.legend(
            handles, labels, loc="outside upper left", ncols=columns, fontsize=8, handlelength=1.6
        )
        if columns == 1 or made.get_window_extent().width <= page.figure.bbox.width:
            return
        made.remove()


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


def line(
    axes: Any, values: Sequence[float | None], *, colour: str, label: str, width: float = 1.3, joined: bool = True
) -> None:
    """A line through the points, or points alone; of many, the medians of bins inside the band of their extremes."""
    points = drawable(values)
    parts = bins(len(points))
    marker = {"marker": "o", "markersize": 2 + width} if len(points) <= MOST_MARKS or not joined else {}
    if len(parts) == len(points):
        axes.plot(points, color=colour, linewidth=width, linestyle="-" if joined else "", label=label, **marker)
        return
    x = [(part.start + part.stop - 1) / 2 for part in parts]
    low, middle, high = (
        [f(points[part]) if np.isfinite(points[part]).any() else math.nan for part in parts]
        for f in (np.nanmin, np.nanmedian, np.nanmax)
    )
    axes.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0)
    axes.plot(x, middle, color=colour, linewidth=width, label=label)
