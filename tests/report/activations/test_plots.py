"""Promises of the pictures of an analysis: their size, their labels, and that nothing grows without bound."""

import io
import math
from itertools import pairwise
from typing import Any

import pytest
from PIL import Image

from probe.activations.export import MOST_HEAT, tables
from probe.files.checked_json import finite
from probe.report.activations.files import pictures_of
from probe.report.activations.layer_plots import families, family_sheet
from probe.report.activations.tensor_plots import octave_ticks, token_label
from probe.report.figure import layer_axis, sheet
from probe.report.numbers import csv_text
from probe.words import short_names
from tests.report.activations.analysed import FEW, found


def test_pictures_have_the_dpi_that_was_asked_for() -> None:
    sizes = []
    for dpi in (50, 100):
        analysis = found(**{**FEW, "visualization.dpi": dpi})
        made = {one.file: one.png for one in pictures_of(analysis, tables(analysis))}
        sizes.append({name: Image.open(io.BytesIO(png)).size for name, png in made.items()})
    for name, (width, height) in sizes[0].items():
        assert sizes[1][name] == pytest.approx((2 * width, 2 * height), abs=2), name


def test_long_names_leave_a_panel_its_height() -> None:
    groups = {"all layers": [f"branch_with_a_long_name_{i}" for i in "abcdefghij"]}
    heights = []
    for some in (groups, {"layers.#": ["layers.0", "layers.1"]}):
        with family_sheet(some, dpi=50) as page:
            axes = page.panels[0]
            axes.plot(range(len(next(iter(some.values())))))
            layer_axis(axes, next(iter(some.values())))
            page.png()
            heights.append(axes.get_window_extent().height)
    assert heights[0] > 0.9 * heights[1]


def test_ticks_of_octaves_are_far_enough_apart() -> None:
    with sheet(3, dpi=50) as page:
        axes = page.panels[0]
        axes.set_xscale("log", base=2)
        for low in range(-149, -4, 3):
            axes.set_xlim(2.0**low, 2.0**5)
            octave_ticks(axes.xaxis)
            page.png()
            boxes = [one.get_window_extent() for one in axes.get_xticklabels() if low <= _octave(one) <= 5]
            assert all(b.x0 - a.x1 > 4 for a, b in pairwise(boxes)), low  # 4 of 50 dots per inch


def _octave(label: Any) -> float:
    return float(label.get_text().removeprefix("2^"))


class TestManyLayersAndChannels:
    """Nothing grows without bound: points, panels, pictures, rows."""

    def test_families_are_modules_that_differ_in_numbers_of_their_path_only(self) -> None:
        names = [f"layers.{i}.{kind}" for i in range(3) for kind in ("up", "down")]
        assert families(names) == {"layers.#.up": names[::2], "layers.#.down": names[1::2]}
        layers = [f"layers.{i}.{kind}" for i in range(2) for kind in ("fc1", "fc2")]
        assert families(layers) == {"layers.#.fc1": layers[::2], "layers.#.fc2": layers[1::2]}
        odd = [f"part_{chr(97 + i)}" for i in range(14)]
        assert families(odd) == {"all layers": odd}

    def test_many_layers_and_channels_stay_one_picture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.activations.toys.Toy.__init__.__defaults__", (90,))
        analysis = found(**{"data.num_samples": 1})
        assert len(analysis.outliers) == 90
        assert (len(analysis.bands), analysis.plan.bands_of) == (12, 90)
        assert [*analysis.bands][:: len(analysis.bands) - 1] == ["layers.0", "layers.89"]
        blank = io.BytesIO()
        Image.new("L", (9, 9)).save(blank, "png")
        monkeypatch.setattr("probe.report.activations.tensor_plots.heat_picture", lambda *_, **__: blank.getvalue())
        made = list(pictures_of(analysis, tables(analysis)))
        maps = [one for one in made if one.file.startswith("heatmap")]
        assert len(maps) == MOST_HEAT
        assert "12 of 90 layers are drawn" in maps[0].caption
        for one in made:
            width, height = Image.open(io.BytesIO(one.png)).size
            assert max(width, height) <= 1000, one.file  # 20 inches


def test_names_are_shortened_to_what_tells_them_apart() -> None:
    assert short_names(["model.layers.0.mlp.up", "model.layers.1.mlp.up"], most=24) == ["0", "1"]
    assert short_names(["a.b", "a.c.d"], most=24) == ["b", "c.d"]
    assert len(short_names(["x" * 99, "y" * 99], most=24)[0]) == 24


def test_tokens_are_shown_so_that_they_can_be_told_apart() -> None:
    assert token_label({"text": " ", "token": 32}) == "' ' (32)"
    assert token_label({"text": "\u4e2d", "token": 9}) == "'\\u4e2d' (9)", "the font has no such letter"
    assert token_label({"text": None, "token": 9}) == "id 9"
    assert csv_text(finite([{"a": math.inf, "b": None, "c": "x,\n"}])) == 'a,b,c\n,,"x,\n"\n'
