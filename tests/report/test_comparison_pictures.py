"""Promises of the pictures of comparisons: plain text on logarithmic axes, and curves that can all be seen."""

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from probe.comparisons.samples import Pairs
from probe.report import figure as figures
from probe.report.modes import plots as modes_plots
from probe.report.ticks import places, plain_log, plain_number


def texts(figure: Any) -> list[str]:
    """All that a figure shows."""
    FigureCanvasAgg(figure).draw()
    return [one.get_text() for one in figure.findobj(lambda part: hasattr(part, "get_text")) if one.get_text()]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts of every picture that is made."""
    kept: list[list[str]] = []
    png = figures.png

    def keep(figure: Any) -> bytes:
        kept.append(texts(figure))
        return png(figure)

    monkeypatch.setattr(modes_plots, "png", keep)
    return kept


@pytest.mark.parametrize("decades", [0.05, 0.3, 0.9, 1.5, 2.5, 8.0])
def test_a_map_of_differences_has_plain_numbers_that_can_be_told_apart(decades: float, drawn: list[list[str]]) -> None:
    values = np.logspace(-2, -2 + decades, 200).reshape(10, 20)
    modes_plots.error_maps("layer_0", {"2-1": values}, (1, 10, 20))
    assert not [text for text in drawn[0] if "$" in text or "\\" in text]
    ticks = [text for text in drawn[0] if text[0].isdecimal() and text != "2-1" and 9e-3 < float(text) < 1e7]
    assert len(ticks) >= 2


@pytest.mark.parametrize("copies", [1, 3, 40, 5000])
def test_a_density_has_plain_numbers(copies: int, drawn: list[list[str]]) -> None:
    x = np.concatenate([np.linspace(-1, 1, 50), np.zeros(copies)])
    modes_plots.value_scatter("layer_0", {"2-1": Pairs(x, x, 0)}, "fp32")
    assert not [text for text in drawn[0] if "$" in text or "\\" in text]


@pytest.mark.parametrize("high", [1.02e-3, 1.7e-3, 1.1e-2, 0.5, 1e9])
def test_a_logarithmic_axis_has_plain_numbers(high: float) -> None:
    with figures.style():
        figure = Figure()
        axes = figure.add_subplot()
        axes.plot([1e-3, high])
        axes.set_yscale("log")
        plain_log(axes.yaxis)
        assert not [text for text in texts(figure) if "$" in text]
        assert sum(bool(one.get_text()) for one in axes.get_yticklabels()) >= 2


def test_ticks_can_be_told_apart_and_are_never_one_alone() -> None:
    for low in (1e-30, 1.3e-7, 2e-3, 0.7, 1.01, 2.04, 3.1, 4.0, 5.1, 9.9, 5100.0):
        for times in (1.02, 1.3, 2.0, 2.56, 3.9, 4.1, 4.7, 11.0, 19.9, 99.0, 101.0, 1e5, 1e12):
            found = places(low, low * times)
            assert 2 <= len(found) <= 9, (low, times, found)
            assert low <= found[0] * (1 + 1e-8)
            assert found[-1] <= low * times * (1 + 1e-8)
            assert len({plain_number(x) for x in found}) == len(found), (low, times)
    assert places(1e-3, 10.0) == pytest.approx([1e-3, 1e-2, 0.1, 1, 10])
    assert [plain_number(x) for x in (0, 0.25, 1, 100, 1e-3, 250_000)] == ["0", "0.25", "1", "100", "1e-3", "2.5e5"]


def test_curves_that_meet_are_wide_below_thin() -> None:
    thin = modes_plots.THIN
    apart = [[1.0, 2.0], [3.0, 4.0]]
    assert modes_plots.widths(apart) == [thin, thin]
    first, second, third, alone = modes_plots.widths([[1.0, 2.0], [1.0, 2.001], [1.0, 9.0], [30.0, math.nan]])
    assert first - 2 > second > third + 2
    assert (third, alone) == (thin, thin)
    assert modes_plots.widths([[math.nan], [math.nan]]) == [thin, thin]
    assert max(modes_plots.widths([[1.0]] * 30)) < 15
