"""The heat maps: modes down, layers across, the error as a colour."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from probe.gate.cases import Outcome
from probe.report.gate.recipes import Run, layer_names, natural, runs, short_names
from probe.report.gate.tables import text_html
from probe.report.numbers import number, ranked, short, value
from probe.words import LOGITS

#: From little error to much: ColorBrewer's YlGnBu, safe for colour-blind people.
COLOURS = ("#ffffd9", "#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")
#: How many shades are told apart in between.
SHADES = 33


@dataclass(frozen=True)
class HeatMap:
    """One model and format. A cell is None where the matrix has no case."""

    title: str
    layers: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Outcome | None, ...]], ...]

    @property
    def labels(self) -> list[str]:
        """The heads of the columns: what tells the layers apart."""
        short = short_names([name for name in self.layers if name != LOGITS])
        return short + [name for name in self.layers if name == LOGITS]

    def cells(self) -> Iterator[Outcome]:
        """The cases there are."""
        return (cell for _, row in self.rows for cell in row if cell)


def heat_maps(outcomes: Iterable[Outcome]) -> list[HeatMap]:
    """A map per model and format, those of the float modes last."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs(outcomes):
        found.setdefault((run.model, run.format), []).append(run)
    order = sorted(found, key=lambda key: (natural(key[0]), not key[1], natural(key[1])))
    several = len({model for model, _ in order}) > 1
    return [_heat_map(found[key], f"{key[0]}, " * several + (key[1] or "float modes")) for key in order]


def _heat_map(given: Sequence[Run], title: str) -> HeatMap:
    layers = layer_names(given)
    several = len({run.device for run in given}) > 1
    rows = []
    for run in given:
        cells = {outcome.case.layer: outcome for outcome in (*run.outcomes, *run.failing)}  # of two, the failing one
        rows.append((f"{run.mode} {run.device}" if several else run.mode, tuple(map(cells.get, layers))))
    return HeatMap(title, tuple(layers), tuple(rows))


def error_of(outcome: Outcome) -> float | None:
    """What a cell shows: the propagated mse, of the whole model the KL divergence of the logits."""
    if outcome.case.layer == LOGITS:
        return value(outcome.figures, "logits.kl")
    return value(outcome.figures, "propagated.mse", "injected.mse", "scaling.mse")


def cell_text(outcome: Outcome) -> str:
    """One digit of the error, or why there is none."""
    error = error_of(outcome)
    if error is not None:
        return short(error)
    return "skip" if outcome.status == "skipped" else "nan" if outcome.verdict == "not finite" else "?"


def heat_html(maps: Sequence[HeatMap]) -> str:
    """All maps on one scale of colours, with its legend: that of the quantized modes, beside which float is nothing."""
    cells = [cell for heat in maps for cell in heat.cells() if cell.case.layer != LOGITS]
    cells = [cell for cell in cells if cell.case.format] or cells
    decades = [math.log10(error) for error in map(error_of, cells) if error]
    low, high = (math.floor(min(decades)), math.ceil(max(decades))) if decades else (-6, 0)
    high = max(high, low + 1)
    return f"{_legend(low, high)}<div class=probe-maps>{''.join(_table(heat, low, high) for heat in maps)}</div>"


def shade_style() -> str:
    """The CSS of the shades: background and a text colour that is read on it."""
    rules = []
    for shade in range(SHADES):
        red, green, blue = _mixed(shade / (SHADES - 1))
        light = 0.2126 * _linear(red) + 0.7152 * _linear(green) + 0.0722 * _linear(blue)
        text = "#111" if light > 0.18 else "#fff"  # where the contrasts with black and white are equal
        rules.append(f".probe .s{shade}{{background:#{red:02x}{green:02x}{blue:02x};color:{text}}}")
    return "".join(rules)


def _mixed(part: float) -> tuple[int, int, int]:
    place = part * (len(COLOURS) - 1)
    first = min(int(place), len(COLOURS) - 2)
    ends = [[int(colour[n : n + 2], 16) for n in (1, 3, 5)] for colour in COLOURS[first : first + 2]]
    red, green, blue = (round(a + (b - a) * (place - first)) for a, b in zip(*ends, strict=True))
    return red, green, blue


def _linear(channel: int) -> float:
    """Of sRGB, as WCAG defines relative luminance."""
    x = channel / 255
    return x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4


def _shade(error: float, low: int, high: int) -> int:
    if error <= 0:
        return 0
    return round(min(max((math.log10(error) - low) / (high - low), 0.0), 1.0) * (SHADES - 1))


def _legend(low: int, high: int) -> str:
    marks = range(low, high + 1, math.ceil((high - low) / 10))
    swatches = "".join(f"<span class=s{_shade(10.0**mark, low, high)}>1e{mark}</span>" for mark in marks)
    return (
        f"<p class=probe-legend>propagated mse {swatches}<span class=bad>✗ failed</span>"
        "<span class=off>skip</span> skipped <span class=off>·</span> not in the matrix. "
        "Click a cell to open its test.</p>"
    )


def _table(heat: HeatMap, low: int, high: int) -> str:
    bad = sum(cell.status == "failed" for cell in heat.cells())
    count = sum(1 for _ in heat.cells())
    state = f"<span class=probe-bad>{bad} of {count} failed</span>" if bad else f"{count} cases"
    head = "".join(
        f'<th title="{"KL divergence of the logits" if name == LOGITS else text_html(name)}">{text_html(label)}'
        for name, label in zip(heat.layers, heat.labels, strict=True)
    )
    rows = "".join(
        f"<tr><th>{text_html(label)}" + "".join(_cell(cell, low, high) for cell in cells) for label, cells in heat.rows
    )
    return (
        f"<div class=probe-map><h4>{text_html(heat.title)} <small>{state}</small></h4>"
        f"<div class=probe-scroll><table class=probe-heat><tr><th>layer{head}{rows}</table></div></div>"
    )


def _cell(cell: Outcome | None, low: int, high: int) -> str:
    if cell is None:
        return '<td class=off title="not in the matrix">·'
    error = error_of(cell)
    whole = cell.case.layer == LOGITS
    shade = "off" if error is None else "whole" if whole else f"s{_shade(error, low, high)}"
    failed = cell.status == "failed"
    text = ("✗ " if failed else "") + cell_text(cell)
    link = f'<a href="#results-table" data-status={cell.status} data-test="{escape(cell.nodeid)}">{text}</a>'
    return f'<td class="{shade}{" bad" if failed else ""}" title="{_title(cell)}">{link if cell.nodeid else text}'


def _title(cell: Outcome) -> str:
    """The figures that matter, or those that moved; a line each."""
    shown = ranked(cell.figures, moved=True)[:4] or ranked(cell.figures)[:4]
    lines = [str(cell.case), cell.verdict or cell.status, cell.message]
    for name, figure in shown:
        before = f"{number(figure.old)} → " if figure.old is not None else ""
        lines.append(f"{name} {before}{number(figure.new)}")
    return "&#10;".join(text_html(line) for line in lines if line)
