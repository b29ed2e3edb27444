"""What the pictures of comparisons share: a figure in one style, its panels, and axes of layers."""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from probe.report.ticks import plain_log, plain_number
from probe.words import short_names, single_line, tail

#: Of Okabe and Ito, told apart by colour-blind people too; with markers beside them, since there may be more modes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
MARKERS = "osD^vP*X"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)))
GREY, GRID, BAD = "#5f6b7a", "#dde2e8", "#d0021b"
#: Panels in a row.
ACROSS = 4

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "text.parse_math": False,  # a $ in the name of a layer is a $
}


@contextmanager
def style() -> Iterator[None]:
    """Not what the user has set for plots of their own."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def panels(
    count: int, *, height: float = 3.0, across: int = ACROSS, width: float = 12.5, **options: Any
) -> tuple[Any, list[Any]]:
    """A figure with so many panels, in rows; and those that have room for something left of them."""
    from matplotlib.figure import Figure

    columns = min(count, across)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(4.5, width * columns / across), height * rows), dpi=100, layout="constrained")
    axes = [one for row in figure.subplots(rows, columns, squeeze=False, **options) for one in row]
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]


def png(figure: Any) -> bytes:
    """The picture."""
    kept = io.BytesIO()
    figure.savefig(kept, format="png", metadata={"Software": None})
    return kept.getvalue()


def layer_axis(axes: Any, names: Sequence[str]) -> None:
    """Numbers where layers have them, else what tells their names apart; as many as have room."""
    numbers = [name.removeprefix("layer_") for name in names]
    plain = all(number.isdecimal() for number in numbers)
    texts = numbers if plain else short_names([single_line(name) for name in names], most=16)
    step = math.ceil(len(texts) / (25 if plain else 12))
    axes.set_xlim(-0.5, len(texts) - 0.5)
    axes.set_xticks(range(0, len(texts), step), texts[::step])
    if not plain:
        axes.tick_params(axis="x", rotation=30)
    axes.set_xlabel("layer")


def log_axis(axes: Any, *, counts: bool = False) -> None:
    """A logarithmic y axis with plain labels: 1e-3; of counts, with a place for 0."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if not counts:
        axes.set_yscale("log")
        plain_log(axes.yaxis)
        return
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(plain_number))
    axes.yaxis.set_minor_formatter(NullFormatter())


def say(axes: Any, why: str) -> None:
    """A panel without data says why."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=GREY, wrap=True)


def shown_name(name: str, *, most: int) -> str:
    """A name from a model as a label: printable, and only its end if it is longer than `most` characters."""
    return tail(single_line(name), most=most)
