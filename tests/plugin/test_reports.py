"""The files that a run leaves: the HTML report of the real gate in a real browser, summary.json and summary.md."""

import json
from typing import Any

import pytest

from tests.plugin.conftest import Run
from tests.report.browser import open_report
from tests.report.gate.test_browser import click_cell, row_of

HTML = ("--html=out/report.html", "--self-contained-html")
FAILING = "coarse-layer_1-cpu-fp8_e4m3"


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["serial", "xdist"])
def test_a_failing_case_is_found_expanded_and_pictured(
    project: Run, pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    project("--update-baselines")
    result = project(*HTML, *workers, fault="scale", subprocess=bool(workers))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    with open_report(pytester.path / "out" / "report.html") as page:
        pictures: list[Any] = page.execute_script("""
        const pictures = [...document.querySelectorAll('#results-table img')].filter(each => each.getAttribute('src'))
        return Promise.all(pictures.map(each => each.decode().then(() => each.naturalWidth)))
        """)
        assert len(pictures) == 4, "every failing case: layer_1, layer_2 and logits of int8, layer_1 of fp8_e4m3"
        assert all(width > 0 for width in pictures)
        click_cell(page, FAILING)
        row = row_of(page, FAILING)
        assert row["expanded"]
        assert row["table"]
        assert row["picture"]
        assert page.get_log("browser") == []


def test_the_page_has_its_own_title_and_no_empty_rows(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines")
    assert project(*HTML).ret == 0
    with open_report(pytester.path / "out" / "report.html") as page:
        assert page.title == "probe: 8 cases passed (network:make)"
        assert page.execute_script("return document.getElementById('title').innerText") == page.title
        page.execute_script("document.getElementById('show_all_details').click()")
        found = page.execute_script("""
        const seen = selector => [...document.querySelectorAll(selector)].filter(each => each.checkVisibility()).length
        return [seen('.probe-figures'), seen('.logwrapper'), document.body.innerText.includes('No log output')]
        """)
        assert found == [8, 0, False]
    project(*HTML, fault="scale")
    text = (pytester.path / "out" / "report.html").read_text()
    assert '<title id="head-title">probe: 4 of 8 cases failed (network:make)</title>' in text


def test_a_title_of_the_users_and_what_tests_print_are_kept(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines")

    def after() -> None:
        with (pytester.path / "conftest.py").open("a") as file:
            file.write("\ndef pytest_html_report_title(report):\n    report.title = 'nightly'\n")
        other = "def test_prints():\n    print('hello there')\n\ndef test_quiet():\n    pass\n"
        (pytester.path / "test_other.py").write_text(other)

    assert project(*HTML, after=after).ret == 0
    text = (pytester.path / "out" / "report.html").read_text()
    assert '<title id="head-title">nightly</title>' in text
    assert "hello there" in text
    assert text.count("No log output captured") == 1, "of the test that is not the gate's"


def test_a_project_without_cases_has_the_report_of_pytest_html(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_one(): pass")
    pytester.runpytest_subprocess("-p", "probe.plugin", *HTML)
    text = (pytester.path / "out" / "report.html").read_text()
    assert '<title id="head-title">report.html</title>' in text
    assert "No log output captured" in text


def test_a_green_run_draws_each_recipe_once(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines")
    assert project(*HTML).ret == 0
    text = (pytester.path / "out" / "report.html").read_text()
    assert text.count("data:image/png;base64,") + text.count("iVBORw0KGgo") >= 2
    assert text.count("iVBORw0KGgo") == 2, "one picture of each of the two recipes"


def test_without_a_report_nothing_is_drawn_and_nothing_is_written(
    project: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project("--update-baselines")
    before = {path for path in pytester.path.rglob("*") if "__pycache__" not in path.parts}
    monkeypatch.setattr("probe.plugin.fixtures.recipe_picture", lambda *_: pytest.fail("a picture was drawn"))
    assert project(fault="scale").ret == pytest.ExitCode.TESTS_FAILED
    after = {path for path in pytester.path.rglob("*") if "__pycache__" not in path.parts}
    assert after == before


def test_the_summaries_say_what_happened(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines")
    project("--probe-output", "there", fault="scale")
    summary = json.loads((pytester.path / "there" / "summary.json").read_text())
    assert summary["exit_status"] == 1
    failing = [case["id"] for case in summary["cases"] if case["status"] == "failed"]
    assert FAILING in failing
    assert len(summary["cases"]) == 8
    text = (pytester.path / "there" / "summary.md").read_text()
    assert "failed" in text
    assert "not that of the baselines" not in text, "this is the environment that made them"
    project("--probe-output", "there")
    assert json.loads((pytester.path / "there" / "summary.json").read_text())["exit_status"] == 0
