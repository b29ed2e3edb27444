"""Promises of the page and the text of an analysis: safe, complete, and nothing is said that is not so."""

import dataclasses
import re
from pathlib import Path

import torch

from probe.activations.run import Analysis
from probe.activations.settings import EnabledSettings
from probe.activations.statistics import measure
from probe.report.activations.files import write_analysis
from probe.report.activations.text import summary_text
from tests.report.activations.analysed import FEW, found, quiet
from tests.report.browser import open_report


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


def test_the_summary_says_what_was_not_said_before(run: tuple[Analysis, Path]) -> None:
    analysis = dataclasses.replace(run[0], notes=("one", "two"))
    text = summary_text(analysis, [Path("a/analysis.json")], printed=["note: one", "drawing"])
    assert "note: one" not in text
    assert "\nnote: two\n" in text
    assert text.endswith("\nwrote 1 file; open a/analysis.json")
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
