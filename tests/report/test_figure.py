"""Promises of the one figure style: plain text on logarithmic axes, legends that fit, many points as bands."""

from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from probe.report.figure import bins, line, log_axis, log_tick_places, mark_below, plain_number, sheet


def texts(figure: Any) -> list[str]:
    """All that a figure shows."""
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return [one.get_text() for one in figure.findobj(lambda part: hasattr(part, "get_text")) if one.get_text()]


@pytest.mark.parametrize("high", [1.02e-3, 1.7e-3, 1.1e-2, 0.5, 1e9])
def test_a_logarithmic_axis_has_plain_numbers(high: float) -> None:
    with sheet(1) as page:
        axes = page.panels[0]
        axes.plot([1e-3, high])
        log_axis(axes)
        assert not [text for text in texts(page.figure) if "$" in text]
        assert sum(bool(one.get_text()) for one in axes.get_yticklabels()) >= 2


def test_ticks_can_be_told_apart_and_are_never_one_alone() -> None:
    for low in (1e-30, 1.3e-7, 2e-3, 0.7, 1.01, 2.04, 3.1, 4.0, 5.1, 9.9, 5100.0):
        for times in (1.02, 1.3, 2.0, 2.56, 3.9, 4.1, 4.7, 11.0, 19.9, 99.0, 101.0, 1e5, 1e12):
            found = log_tick_places(low, low * times)
            assert 2 <= len(found) <= 9, (low, times, found)
            assert low <= found[0] * (1 + 1e-8)
            assert found[-1] <= low * times * (1 + 1e-8)
            assert len({plain_number(x) for x in found}) == len(found), (low, times)
    assert log_tick_places(1e-3, 10.0) == pytest.approx([1e-3, 1e-2, 0.1, 1, 10])
    assert [plain_number(x) for x in (0, 0.25, 1, 100, 1e-3, 250_000)] == ["0", "0.25", "1", "100", "1e-3", "2.5e5"]


def test_values_below_a_logarithmic_axis_are_marked_on_its_edge() -> None:
    with sheet(1, dpi=50) as page:
        axes = page.panels[0]
        values = [1.0, 1e-9, 0.0, None, 2.0]
        line(axes, values, colour="black", label="min")
        log_axis(axes, [v or 0.0 for v in values], floor=1e-6)
        mark_below(axes, values, colour="black")
        marks = axes.lines[-1]
    assert marks.get_marker() == "v"
    assert list(marks.get_xdata()) == [1, 2]


FORMATS = [f"a format {i}" for i in range(8)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_legend_is_never_cut_off(count: int) -> None:
    """However few panels there are, and however much it has to say."""
    for labels in (FORMATS, [name * 6 for name in FORMATS]):
        with sheet(count, dpi=50, narrowest=8.0) as page:
            for label in labels:
                line(page.panels[0], [1.0, 2.0], colour="black", label=label)
            page.legend()
            page.png()
            (made,) = page.figure.legends
            assert len(made.get_texts()) == len(labels)
            for text in made.get_texts():
                box = text.get_window_extent()
                assert box.x0 >= 0
                assert box.x1 <= page.figure.bbox.width
                assert box.y1 <= page.figure.bbox.height


def test_modules_that_are_no_family_are_not_joined_by_a_line() -> None:
    with sheet(1, dpi=50) as page:
        line(page.panels[0], [1.0, 2.0], colour="black", label="x", joined=False)
        assert page.panels[0].lines[0].get_linestyle() == "None"


def test_points_are_gathered_in_bins() -> None:
    assert [(part.start, part.stop) for part in bins(5, 2)] == [(0, 3), (3, 5)]
    assert len(bins(400)) == 400
    assert 200 <= len(bins(100_001)) <= 400
    assert bins(100_001)[-1].stop == 100_001
