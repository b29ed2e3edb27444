"""Promises of the pictures of modes: plain text on logarithmic axes, and curves that can all be seen."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from probe.comparisons.samples import DrawnTensor, Pairs
from probe.report.figure import THIN, Sheet, widths
from probe.report.modes import error_maps, value_scatter
from tests.report.test_figure import texts

Array = npt.NDArray[np.float64]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts of every picture that is made."""
    kept: list[list[str]] = []
    png = Sheet.png

    def keep(page: Sheet) -> bytes:
        kept.append(texts(page.figure))
        return png(page)

    monkeypatch.setattr(Sheet, "png", keep)
    return kept


def tensor(x: Array, errors: Array) -> dict[str, DrawnTensor]:
    ends = float(errors.min()), float(errors.max())
    return {"2-1": DrawnTensor("layer_0", (1, 10, 20), Pairs(x, x, 0), None, errors, ends)}


@pytest.mark.parametrize("decades", [0.05, 0.3, 0.9, 1.5, 2.5, 8.0])
def test_a_map_of_differences_has_plain_numbers_that_can_be_told_apart(decades: float, drawn: list[list[str]]) -> None:
    values = np.logspace(-2, -2 + decades, 200).reshape(10, 20)
    error_maps(tensor(values, values))
    assert not [text for text in drawn[0] if "$" in text or "\\" in text]
    ticks = [text for text in drawn[0] if text[0].isdecimal() and text != "2-1" and 9e-3 < float(text) < 1e7]
    assert len(ticks) >= 2


@pytest.mark.parametrize("copies", [1, 3, 40, 5000])
def test_a_density_has_plain_numbers(copies: int, drawn: list[list[str]]) -> None:
    x = np.concatenate([np.linspace(-1, 1, 50), np.zeros(copies)])
    value_scatter(tensor(x, np.ones((10, 20))), "fp32")
    assert not [text for text in drawn[0] if "$" in text or "\\" in text]


def test_curves_that_meet_are_wide_below_thin() -> None:
    apart = [[1.0, 2.0], [3.0, 4.0]]
    assert widths(apart) == [THIN, THIN]
    first, second, third, alone = widths([[1.0, 2.0], [1.0, 2.001], [1.0, 9.0], [30.0, math.nan]])
    assert first - 2 > second > third + 2
    assert (third, alone) == (THIN, THIN)
    assert widths([[math.nan], [math.nan]]) == [THIN, THIN]
    assert max(widths([[1.0]] * 30)) < 15
