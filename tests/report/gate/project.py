"""A pytest project of made-up outcomes, which gives a report as the plugin does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

CONFTEST = """
import base64
from dataclasses import replace

import pytest
from pytest_html import extras

from probe.report.gate.page import front
from probe.report.gate.plots import recipe_picture
from probe.report.gate.recipes import runs
from probe.report.gate.text import story
from probe.report.gate.page import figure_table, name_cell
from tests.report.gate import examples

OUTCOMES = {outcomes}
RUNS = runs(OUTCOMES)
RUN_OF = {{outcome.nodeid: run for run in RUNS for outcome in run.outcomes}}
PICTURED = {{run.outcomes[0].nodeid for run in RUNS if run.outcomes[0].status == "passed" and not run.failing}}


def pytest_generate_tests(metafunc):
    nasty = metafunc.function.__name__ == "test_nasty"
    chosen = [outcome for outcome in OUTCOMES if (outcome.nodeid == examples.nasty().nodeid) == nasty]
    metafunc.parametrize(
        "outcome",
        [
            pytest.param(
                outcome,
                id=examples.NASTY if nasty else str(outcome.case),
                marks=pytest.mark.xdist_group("nasty" if nasty else outcome.case.recipe),
            )
            for outcome in chosen
        ],
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    outcome = item.funcargs.get("outcome")
    if report.when != "call" or outcome is None:
        return
    if outcome.status == "failed" or outcome.nodeid in PICTURED:
        picture = recipe_picture(RUN_OF[outcome.nodeid].outcomes, outcome)
        report.extras = [extras.html(figure_table(outcome)), extras.png(base64.b64encode(picture).decode())]


def grouped(nodeid, where):
    # up to pytest 9.1, the ids of xdist's loadgroup end in @group
    return f"{{nodeid}}@group" if where == {grouped!r} and "fp8" in nodeid and "@" not in nodeid else nodeid


def pytest_html_results_table_row(report, cells):
    cells[1] = name_cell(grouped(report.nodeid, "rows"))


def pytest_html_results_summary(prefix, summary, postfix):
    found = [replace(outcome, nodeid=grouped(outcome.nodeid, "cells")) for outcome in OUTCOMES]
    prefix.append(front(found, environment=examples.ENVIRONMENT, baseline_environment=examples.OLDER))


@pytest.fixture
def judge():
    def check(outcome):
        if outcome.status == "skipped":
            pytest.skip(outcome.message)
        if outcome.status == "failed":
            pytest.fail("\\n".join(story(RUN_OF[outcome.nodeid].outcomes, report="report.html")), pytrace=False)

    return check
"""

TESTS = """
def test_matches_baseline(outcome, judge):
    judge(outcome)


def test_nasty(outcome, judge):
    judge(outcome)
"""


def make_report(folder: Path, outcomes: str, *arguments: str, grouped: str = "") -> Path:
    """The self-contained report of a run over `outcomes`, an expression in terms of tests.report.gate.examples.

    `grouped` says where ids end in @group: in the rows of pytest-html, or in the cells of the heat maps.
    """
    (folder / "conftest.py").write_text(CONFTEST.format(outcomes=outcomes, grouped=grouped), encoding="utf-8")
    (folder / "test_gate.py").write_text(TESTS, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"]
    command += ["--html=report.html", "--self-contained-html", *arguments]
    done = subprocess.run(
        command, cwd=folder, env={**clean, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return folder / "report.html"
