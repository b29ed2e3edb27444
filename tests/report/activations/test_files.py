"""Promises of the files of an analysis: every picture and every number behind it, of one run only."""

import csv
import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from probe.activations.export import histogram, tables
from probe.activations.run import Analysis
from probe.commands import main
from probe.files.paths import LIST
from probe.report.activations.files import heat_file, planned_files, write_analysis
from tests.report.activations.analysed import FEW, TOY, found, quiet


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
        assert s.buckets.whole()[first : first + len(counts)].tolist() == counts
        assert sum(counts) + s.zeros == s.count


def test_a_histogram_counts_every_element(run: tuple[Analysis, Path]) -> None:
    for s in run[0].statistics.values():
        rows = histogram(s)
        assert sum(row["count"] for row in rows) == s.count
        assert rows[0]["count"] == s.zeros
        assert s.amax < rows[-1]["high"]
        assert all(a["high"] == b["low"] for a, b in pairwise(rows[1:]))
        assert rows[2]["high"] / rows[2]["low"] == pytest.approx(2**0.25, rel=0.06)


def test_files_are_named_safely() -> None:
    assert heat_file(3, "../../etc/passwd $(x)") == "heatmap_3d_03_______etc_passwd___x_"
    assert len(heat_file(0, "x" * 500)) < 80


def run_command(folder: Path, *given: str) -> set[str]:
    few = {**TOY, "layer_selection.patterns": r"layers\.0($|\.up)", "heatmap_3d": "false", "dpi": "20"}
    options = [word for key, value in few.items() for word in (f"--{key}", value)]
    assert main(["analyze", *options, "--save_dir", str(folder), *given]) == 0
    return {path.name for path in folder.iterdir()} - {LIST}


def test_a_second_run_leaves_nothing_of_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_command(tmp_path)
    assert {"analysis.json", "statistics.csv", "magnitude_input.png", "analysis_report.html"} <= first
    (tmp_path / "mine.csv").write_text("mine")
    given = ("--data.seed", "1", "--output.formats", "[html]")
    assert run_command(tmp_path, *given) == {"analysis_report.html", "mine.csv"}
    capsys.readouterr()
    assert main(["analyze", "--compare", str(tmp_path), str(tmp_path)]) == 2, "there is no old run to read"
    assert run_command(tmp_path) == first | {"mine.csv"}
