"""The one style of all pictures: sheets of panels, colours, axes of layers, logarithmic axes, legends and notes.

matplotlib labels logarithmic axes with TeX. TeX is switched off here, because a name may contain a $, so logarithmic
axes have tick labels of their own, in plain text.
"""

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.words import short_names, single_line, tail

Values = npt.NDArray[np.float64]

#: The palette of Okabe and Ito, which colour-blind people can tell apart.
BLUE, VERMILION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
ORANGE, SKY, BLACK, SILVER = "#e69f00", "#56b4e9", "#000000", "#7f7f7f"
#: The order in which curves take their colours.
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, SILVER)
#: Text and lines beside the data; the grid; what failed or is not finite.
GREY, GRID, BAD = "#5f6b7a", "#dde2e8", "#b00020"
DASHED = (0, (4, 2))
#: The width of a curve that no later curve meets.
THIN = 1.7
DPI = 100
#: Points of a curve above which they are drawn in bins; points of a curve up to which each has a marker.
MOST_POINTS, MOST_MARKS = 400, 40
#: Letters to the inch in tick labels of 8 points.
LETTERS = 15
#: Decades of a logarithmic axis that have a tick, at most.
MOST_TICKS = 7
#: The arithmetic of an axis overflows above this, and below its inverse.
LARGEST = 1e100

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.parse_math": False,
}


class Sheet:
    """A figure and its panels, from left to right and from top to bottom."""

    def __init__(self, figure: Any, panels: list[Any]) -> None:
        self.figure, self.panels = figure, panels

    def legend(self) -> None:
        """Put the legend of the first panel above all of them, in as many lines as the width of the sheet needs."""
        handles, labels = self.panels[0].get_legend_handles_labels()
        for lines in range(1, len(labels) + 1):
            columns = math.ceil(len(labels) / lines)
            made = self.figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.6)
            if columns == 1 or made.get_window_extent().width <= self.figure.bbox.width:
                return
            made.remove()

    def log_colour_bar(self, image: Any, axes: Any, **options: Any) -> None:
        """Put a logarithmic colour bar beside the axes. `options` are those of matplotlib."""
        log_ticks(self.figure.colorbar(image, ax=axes, **options).ax.yaxis)

    def png(self, *, colours: int | None = None) -> bytes:
        """The picture as a PNG. With few `colours` it is about half the size; a map of shades needs them all."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from PIL import Image

        canvas: Any = FigureCanvasAgg(self.figure)
        png = io.BytesIO()
        if colours is None:
            canvas.print_png(png, metadata={"Software": None})
            return png.getvalue()
        canvas.draw()
        pixels = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
        few = pixels.convert("RGB").quantize(colours, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        few.save(png, "png")
        return png.getvalue()


@contextmanager
def sheet(
    count: int,
    *,
    columns: int = 3,
    size: tuple[float, float] = (4.0, 2.6),
    narrowest: float = 4.5,
    dpi: int = DPI,
    layout: Any = "constrained",
    **options: Any,
) -> Iterator[Sheet]:
    """A sheet of `count` panels of `size` inches, in the one style; the matplotlib settings of the user are ignored.

    With fewer panels than `columns` the sheet is narrower, but not below `narrowest`. `options` are those of subplots.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        across = min(columns, count)
        down = math.ceil(count / across)
        width = sheet_width(across, columns, size[0], narrowest)
        figure = Figure(figsize=(width, size[1] * down), dpi=dpi, layout=layout)
        panels = list(figure.subplots(down, across, squeeze=False, **options).flat)
        for spare in panels[count:]:
            spare.remove()
        yield Sheet(figure, panels[:count])


def sheet_width(across: int, columns: int, width: float, narrowest: float) -> float:
    """The inches of a sheet with `across` panels of `width`, of at most `columns` in a row."""
    return min(width * columns, max(width * across, narrowest))


def label(name: str, *, most: int) -> str:
    """A name from a model or file: printable, and only its end if it is longer than `most` characters."""
    return tail(single_line(name), most=most)


def note(axes: Any, text: str) -> None:
    """Say in a panel without data why there are none."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY, wrap=True)


def corner_note(axes: Any, text: str, *, colour: str = GREY) -> None:
    """A remark in the upper right corner of a panel."""
    backing = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1}  # readable over a line of the panel
    place = {"transform": axes.transAxes, "ha": "right", "va": "top"}
    axes.text(0.98, 0.97, text, fontsize=8, color=colour, bbox=backing, **place)


def positive(value: float | None) -> float:
    """The value within the range of a logarithmic axis; NaN, which is drawn as a gap, if it is not above 0."""
    if value is None or not math.isfinite(value) or value <= 0:
        return math.nan
    return min(max(value, 1 / LARGEST), LARGEST)


def positives(values: Sequence[float | None]) -> Values:
    """`positive` of each."""
    return np.array([positive(value) for value in values])


def layer_axis(axes: Any, names: Sequence[str]) -> None:
    """An x axis with the short names of layers, as many as there is room for; upright where they are long."""
    spec = axes.get_subplotspec()
    ratios = spec.get_gridspec().get_width_ratios()
    width = float(axes.figure.get_figwidth() * ratios[spec.colspan.start] / sum(ratios))
    texts = _layer_labels(names)
    longest, upright = max(map(len, texts)), _is_upright(texts, width)
    step = max(1, math.ceil(len(texts) * (2.4 if upright else longest + 2) / (LETTERS * width)))
    axes.set_xticks(range(0, len(texts), step), texts[::step], rotation=90 if upright else 0)
    axes.set_xlim(-0.5, len(texts) - 0.5)
    if longest <= 4:
        axes.set_xlabel("layer")


def layer_axis_height(names: Sequence[str], width: float) -> float:
    """The inches that upright names take below a panel of this width."""
    texts = _layer_labels(names)
    return 0.07 * max(map(len, texts)) if _is_upright(texts, width) else 0.0


def _layer_labels(names: Sequence[str]) -> list[str]:
    return short_names([single_line(name) for name in names], most=24)


def _is_upright(texts: Sequence[str], width: float) -> bool:
    longest = max(map(len, texts))
    return longest > 4 and longest * len(texts) > LETTERS * width


def shade_layers(axes: Any, places: Sequence[int], *, colour: str, **style: Any) -> None:
    """Shade the layers at these places of a layer axis."""
    for place in places:
        axes.axvspan(place - 0.5, place + 0.5, color=colour, linewidth=0, **style)


def mark_places(axes: Any, places: Sequence[int], marker: str, *, height: float, label: str | None = None) -> None:
    """Red marks at these places of the x axis, at a height that is a part of the panel's."""
    across = axes.get_xaxis_transform()
    axes.plot(places, [height] * len(places), marker, color=BAD, transform=across, label=label)


def log_axis(axes: Any, values: Sequence[float | None] | None = None, *, floor: float = 1e-6) -> None:
    """A logarithmic y axis; with `values`, over those above `floor` times the largest."""
    if values is not None:
        known = [x for x in map(positive, values) if x > 0]
        if not known:
            axes.set_ylim(0, 1)
            axes.text(0.5, 0.5, "all values are 0", transform=axes.transAxes, ha="center", color=GREY)
            return
        axes.set_ylim(max(min(known), max(known) * floor) / 1.6, max(known) * 1.6)
    axes.set_yscale("log")
    log_ticks(axes.yaxis)


def _plain_ticks(axis: Any) -> None:
    """Plain numbers at the major ticks, and nothing at the minor ones."""
    from matplotlib.ticker import NullFormatter

    axis.set_major_formatter(plain_number)
    axis.set_minor_formatter(NullFormatter())


def log_ticks(axis: Any) -> None:
    """A few ticks in plain text on a logarithmic axis; they follow its limits."""
    from matplotlib.ticker import Locator

    class LogTicks(Locator):
        def __call__(self) -> Any:
            return self.tick_values(*axis.get_view_interval())

        def tick_values(self, vmin: float, vmax: float) -> Any:
            return log_tick_places(*sorted((vmin, vmax)))

    axis.set_major_locator(LogTicks())
    _plain_ticks(axis)


def log_tick_places(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`: powers of ten, multiples of them below two decades, or even steps."""
    from matplotlib.ticker import MaxNLocator

    if high < 4 * low:
        places = [float(x) for x in MaxNLocator(nbins=5, steps=[1, 2, 5, 10], min_n_ticks=2).tick_values(low, high)]
    else:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        parts: tuple[int, ...] = (1, 2, 3, 5) if high < 20 * low else (1, 2, 5) if high < 100 * low else (1,)
        step = math.ceil((last - first) / MOST_TICKS) if len(parts) == 1 else 1
        places = [part * 10.0**e for e in range(first, last + 1) if e % step == 0 for part in parts]
    return [x for x in places if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)]


def plain_number(value: float, _: object = None) -> str:
    """0, 1, 100, 0.25, 1e-3, 2.5e5."""
    if 0.01 <= value < 1000 or value == 0:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def count_ticks(axis: Any) -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def shade_map(
    axes: Any, values: npt.NDArray[Any], *, colours: str = "viridis", empty: str = BAD, **options: Any
) -> Any:
    """The image of a matrix, for a colour bar; NaN has the colour `empty`. `options` are those of imshow."""
    import matplotlib

    axes.grid(False)
    shades = matplotlib.colormaps[colours].with_extremes(bad=empty)
    return axes.imshow(values, aspect="auto", interpolation="nearest", cmap=shades, **options)


def log_shade_map(axes: Any, values: Values, scale: tuple[float, float], shape: tuple[int, ...]) -> Any:
    """The image of the errors of a [samples, tokens, features] tensor on a logarithmic scale; 0 is the lowest shade."""
    from matplotlib.colors import LogNorm

    low, high = scale
    positions = math.prod(shape[1:-1]) if len(shape) > 2 else shape[0]
    drawn = np.where(values == 0, low / 2, values)  # a logarithmic scale has no 0
    return shade_map(axes, drawn, norm=LogNorm(low, max(high, low * 1.001)), extent=(0, shape[-1], positions, 0))


def histogram(axes: Any, counts: npt.NDArray[Any], edges: Values, *, mean: float | None = None) -> None:
    """Counts on a logarithmic axis, with a place for 0, and a dashed line at the mean."""
    axes.stairs(counts, edges, fill=True, color=BLUE)
    if mean is not None:
        axes.axvline(mean, color=BAD, linewidth=1.2, linestyle=DASHED)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    _plain_ticks(axes.yaxis)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
    axes.locator_params(axis="x", nbins=5)


def bins(count: int, most: int = MOST_POINTS) -> list[slice]:
    """Slices of at most `most` bins over `count` points; each is one point while there are few."""
    size = math.ceil(count / most)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def middles(parts: Sequence[slice]) -> list[float]:
    """The middle of each bin on the axis of points."""
    return [(part.start + part.stop - 1) / 2 for part in parts]


def line(
    axes: Any, values: Sequence[float | None], *, colour: str, label: str, width: float = 1.3, joined: bool = True
) -> None:
    """A line through the points, or markers alone; of many, the medians of bins and the band of their extremes."""
    points = positives(values)
    parts = bins(len(points))
    marker = {"marker": "o", "markersize": 2 + width} if len(points) <= MOST_MARKS or not joined else {}
    if len(parts) == len(points):
        axes.plot(points, color=colour, linewidth=width, linestyle="-" if joined else "", label=label, **marker)
        return
    low, middle, high = (
        [f(points[part]) if np.isfinite(points[part]).any() else math.nan for part in parts]
        for f in (np.nanmin, np.nanmedian, np.nanmax)
    )
    axes.fill_between(middles(parts), low, high, color=colour, alpha=0.25, linewidth=0)
    axes.plot(middles(parts), middle, color=colour, linewidth=width, label=label)


def widths(curves: Sequence[Iterable[float]], *, step: float = 2.6) -> list[float]:
    """A line width for each curve: `step` wider for each later curve that meets it, so that all of them can be seen.

    Two curves meet if they are within 5 % of each other at some point.
    """

    def meet(a: Iterable[float], b: Iterable[float]) -> bool:
        return any(abs(x - y) < 0.05 * max(x, y) for x, y in zip(a, b, strict=True))  # NaN meets nothing

    later = [sum(meet(curve, other) for other in curves[place + 1 :]) for place, curve in enumerate(curves)]
    return [THIN + step * min(count, 4) for count in later]


def mark_below(axes: Any, values: Sequence[float | None], *, colour: str, size: float = 5) -> None:
    """A triangle on the lower edge for every value, also 0, below the limits of a logarithmic axis."""
    low = axes.get_ylim()[0]
    places = [i for i, x in enumerate(values) if x is not None and x < low]
    if axes.get_yscale() == "log" and places:
        size = size if len(values) <= MOST_MARKS else size / 2
        axes.plot(places, [low] * len(places), "v", color=colour, markersize=size, clip_on=False, zorder=3)
