"""Promises of the files: every picture, every number behind it, a page that is safe and works in a browser."""

import csv
import dataclasses
import io
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from probe.activations.configuration import read_configuration
from probe.activations.export import MOST_HEAT, histogram, tables
from probe.activations.run import Analysis, analyze
from probe.activations.settings import EnabledSettings
from probe.activations.statistics import measure
from probe.files.checked_json import finite
from probe.files.leftovers import LIST
from probe.report.activations.files import heat_file, pictures_of, planned_files, write_analysis
from probe.report.activations.layer_plots import families, family_sheet
from probe.report.activations.tensor_plots import octave_ticks, token_label
from probe.report.activations.text import summary_text
from probe.report.figure import layer_axis, sheet
from probe.report.numbers import csv_text
from probe.words import short_names
from tests.report.browser import open_report

TOY = {
    "model.path": "tests.activations.toys:make",
    "data.num_samples": "3",
    "data.seq_len": "12",
    "outlier.threshold": "8",
    "visualization.dpi": "50",
}
#: Few pictures, for what does not depend on which they are.
FEW = {
    **{f"enabled.{name}": "false" for name in ("heatmap_3d", "distribution", "magnitude_input", "magnitude_weight")},
    "layer_selection.patterns": "layers.0",
}


def quiet(_: str) -> None:
    return


def found(**given: Any) -> Analysis:
    return analyze(read_configuration(None, [(k, str(v)) for k, v in {**TOY, **given}.items()]), progress=quiet)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Analysis, Path]:
    folder = tmp_path_factory.mktemp("run")
    analysis = found(**{"visualization.save_dir": folder, "model.name": "<script>alert(1)</script> toy"})
    write_analysis(analysis, progress=quiet)
    return analysis, folder


def test_all_files_that_were_planned_are_written_and_no_others(run: tuple[Analysis, Path]) -> None:
    analysis, folder = run
    planned = {name.partition(" (")[0] for name in planned_files(analysis.settings, analysis.plan)}
    assert {path.name for path in folder.iterdir()} == planned | {LIST}
    assert {"magnitude_input.png", "outlier_token.png", "distribution_boxplot.png", "percentile_range.png"} <= planned
    assert "heatmap_3d_00_layers_0.png" in planned


@pytest.mark.parametrize("chosen", ["csv", "json", "png", "html"])
def test_only_the_formats_that_are_asked_for(chosen: str, tmp_path: Path) -> None:
    analysis = found(**{**FEW, "visualization.save_dir": tmp_path, "output.formats": chosen})
    files = write_analysis(analysis, progress=quiet)
    assert {path.suffix for path in files} == {f".{chosen}"}
    assert {path.name for path in files} == {
        name.partition(" (")[0] for name in planned_files(analysis.settings, analysis.plan)
    }


def test_pictures_have_the_dpi_that_was_asked_for() -> None:
    sizes = []
    for dpi in (50, 100):
        analysis = found(**{**FEW, "visualization.dpi": dpi})
        made = {one.file: one.png for one in pictures_of(analysis, tables(analysis))}
        sizes.append({name: Image.open(io.BytesIO(png)).size for name, png in made.items()})
    for name, (width, height) in sizes[0].items():
        assert sizes[1][name] == pytest.approx((2 * width, 2 * height), abs=2), name


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_and_json_hold_the_numbers_behind_every_plot(run: tuple[Analysis, Path]) -> None:
    analysis, folder = run
    kept = json.loads((folder / "analysis.json").read_text())
    made = tables(analysis)
    assert set(made) == {path.stem for path in folder.glob("*.csv")}
    for name, rows in made.items():
        written = read_csv(folder / f"{name}.csv")
        assert len(written) == len(rows), name
        for row, text in zip(rows[:50], written, strict=False):
            for key, value in row.items():
                if isinstance(value, float):
                    assert float(text[key]) == value if math.isfinite(value) else text[key] == ""
                else:
                    assert text[key] == ("" if value is None else str(value))
        if name not in ("heatmap_3d", "percentile_range"):
            assert kept["tables"][name] == json.loads(json.dumps(rows))
    assert kept["facts"]["tokens"] == 36
    assert kept["settings"]["data"]["seq_len"] == 12
    assert [one["module"] for one in kept["heat"]] == list(analysis.heat)
    assert np.array(kept["heat"][0]["max"]) == pytest.approx(analysis.heat["layers.0"].values, rel=1e-5)
    bands = analysis.bands["layers.1"].percentiles()
    assert np.array(kept["percentile_range"][1]["p99"]) == pytest.approx(bands[5], rel=1e-5)
    for one, s in zip(kept["counts"], analysis.statistics.values(), strict=True):
        first, counts = one["buckets"]
        assert s.buckets[first : first + len(counts)].tolist() == counts
        assert sum(counts) + s.zeros == s.count


def test_a_histogram_counts_every_element(run: tuple[Analysis, Path]) -> None:
    for s in run[0].statistics.values():
        rows = histogram(s)
        assert sum(row["count"] for row in rows) == s.count
        assert rows[0]["count"] == s.zeros
        assert s.amax < rows[-1]["high"]
        assert all(a["high"] == b["low"] for a, b in pairwise(rows[1:]))
        assert rows[2]["high"] / rows[2]["low"] == pytest.approx(2**0.25, rel=0.06)


def test_the_page_is_safe_self_contained_and_complete(run: tuple[Analysis, Path]) -> None:
    folder = run[1]
    html = (folder / "analysis_report.html").read_text()
    assert "<script>alert" not in html
    assert "http" not in html.replace("http-equiv", ""), "nothing from elsewhere"
    with open_report(folder / "analysis_report.html") as browser:
        script = "return [...document.querySelectorAll('img')].map(one => [one.alt, one.naturalWidth])"
        pictures = browser.execute_script(script)
        assert len(pictures) == len(list(folder.glob("*.png")))
        assert all(width > 100 for _, width in pictures)
        headings = browser.execute_script("return [...document.querySelectorAll('h2')].map(one => one.textContent)")
        expected = [
            "What stands out",
            "What quantization would cost",
            "Magnitudes",
            "Outlier tokens",
            "Distributions",
            "Tokens and channels of one sample",
        ]
        assert headings[: len(expected)] == expected
        links = browser.execute_script("return [...document.querySelectorAll('nav a')].map(one => one.textContent)")
        assert links == headings
        text = browser.find_element("tag name", "body").text
        assert "<script>alert(1)</script> toy" in text
        assert "brings no tokenizer: text is read as bytes" in text
        wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert browser.execute_script(wide), "nothing beyond the right edge"
        assert not [one for one in browser.get_log("browser") if one["level"] == "SEVERE"]


def test_without_an_outlier_the_page_says_so(tmp_path: Path) -> None:
    given = {"visualization.save_dir": tmp_path, "outlier.threshold": "1e9", "output.formats": "html"}
    analysis = found(**{**FEW, **given})
    write_analysis(analysis, progress=quiet)
    html = (tmp_path / "analysis_report.html").read_text()
    assert "No token is an outlier: none exceeds 1e+09 times the median" in html


def test_the_page_never_says_that_there_is_no_outlier_where_there_are_some(tmp_path: Path) -> None:
    others = {f"enabled.{name}": "false" for name in vars(EnabledSettings()) if name != "outlier_position"}
    given = {**others, "outlier.threshold": "8", "visualization.save_dir": str(tmp_path)}
    analysis = found(**given)
    assert any(one.count for one in analysis.outliers.values())
    write_analysis(analysis, progress=quiet)
    assert "No token is an outlier" not in (tmp_path / "analysis_report.html").read_text()


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


def test_the_summary_says_what_was_not_said_before(run: tuple[Analysis, Path]) -> None:
    analysis = dataclasses.replace(run[0], notes=("one", "two"))
    text = summary_text(analysis, [Path("a/analysis.json")], told=["note: one", "drawing"])
    assert "note: one" not in text
    assert "\nnote: two\n" in text
    assert text.endswith("\n1 file, the last: a/analysis.json")
    assert "36 tokens" in text
    assert " - x" not in text


def test_a_tensor_that_is_mostly_zeros_is_the_hardest_and_said_so() -> None:
    x = torch.zeros(100, 8)
    x[3, 2] = 5.0
    usual = measure(torch.randn(100, 8), module="b", kind="output")[0]
    sparse = measure(x, module="a", kind="output")[0]
    none = measure(torch.zeros(4, 8), module="c", kind="output")[0]
    analysis = dataclasses.replace(
        found(**FEW), statistics={("b", "output"): usual, ("c", "output"): none, ("a", "output"): sparse}
    )
    assert [s.module for s in analysis.hardest()] == ["a", "b", "c"]
    assert "a output: max |x| 5, the median is 0, the 99th percentile is 0\n" in summary_text(analysis, [])


def test_every_table_of_the_page_says_what_it_is_and_its_file(run: tuple[Analysis, Path]) -> None:
    html = (run[1] / "analysis_report.html").read_text()
    captions = re.findall(r'<p class="caption">(.*?)</p>', html)
    assert len(captions) == html.count("<table>") == 12
    named = [match[1] for one in captions if (match := re.search(r"\b(\w+)\.csv", one))]
    assert len(named) == len(set(named)) == 11  # all but the one that is a choice of rows
    assert all((run[1] / f"{name}.csv").exists() for name in named)
    assert all(len(one.split()) > 4 for one in captions), captions


def test_a_file_that_is_not_written_is_not_named(tmp_path: Path) -> None:
    write_analysis(found(**{**FEW, "visualization.save_dir": tmp_path, "output.formats": "html"}), progress=quiet)
    assert ".csv" not in (tmp_path / "analysis_report.html").read_text()


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


def test_files_are_named_safely() -> None:
    assert heat_file(3, "../../etc/passwd $(x)") == "heatmap_3d_03_______etc_passwd___x_"
    assert len(heat_file(0, "x" * 500)) < 80


def test_tokens_are_shown_so_that_they_can_be_told_apart() -> None:
    assert token_label({"text": " ", "token": 32}) == "' ' (32)"
    assert token_label({"text": "\u4e2d", "token": 9}) == "'\\u4e2d' (9)", "the font has no such letter"
    assert token_label({"text": None, "token": 9}) == "id 9"
    assert csv_text(finite([{"a": math.inf, "b": None, "c": "x,\n"}])) == 'a,b,c\n,,"x,\n"\n'
