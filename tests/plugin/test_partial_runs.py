"""Runs that end early, run again, run in other processes or run a part: the same verdicts, and a line that is right."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.conftest import Run
from tests.plugin.test_xdist import assert_no_traceback
from tests.plugin.wrong_passes import PLAIN, TWICE

FAULT = "8 of 8 stored cases compared"
COUNTS = "network:make on cpu: 8 cases: 4 drift, 4 passed; 2 of 2 recipes fail"
DISTRIBUTIONS = ("load", "loadfile", "loadscope", "loadgroup", "worksteal", "each")
CRASHES = """
import os
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if item.name.endswith("[coarse-layer_1-cpu-int8]"):
        os._exit(7)
"""
#: The first attempt of a case fails before it comes to the gate.
FAILS_ONCE = """
import pytest

seen = set()


@pytest.fixture(autouse=True)
def flaky(request):
    if request.node.name not in seen:
        seen.add(request.node.name)
        raise OSError("the network is down")
"""
#: Under pytest 9.2 pytest-forked 1.7.5 fails every test: it cannot send the id that reports have now.
REPAIRS_FORKED = """
import pytest_forked

serialize = pytest_forked.serialize_report


def without_id(report):
    found = {**serialize(report), "nodeid": report.nodeid}
    found.pop("_id", None)
    return found


pytest_forked.serialize_report = without_id
"""
PLUGINS = ("-p", "rerunfailures", "-p", "pytest_forked")


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test leaves the baselines, for all others."""
    return tmp_path_factory.mktemp("baselines") / "baselines"


@pytest.fixture
def stored(project: Run, pytester: pytest.Pytester, baselines: Path) -> Run:
    """The project, with its baselines."""
    if not baselines.exists():
        assert project("--update-baselines").ret == 0
        shutil.copytree(pytester.path / "baselines", baselines)
    else:
        shutil.copytree(baselines, pytester.path / "baselines")
    return project


def summary(pytester: pytest.Pytester) -> dict[str, Any]:
    """What summary.json says, but for the order of the cases."""
    found: dict[str, Any] = json.loads((pytester.path / "out" / "summary.json").read_text())
    verdicts = {row["id"]: (row["status"], row["verdict"], row["message"]) for row in found["cases"]}
    return {"verdicts": verdicts, "account": found["accounting"], "totals": found["totals"]}


# ------------------------------------------------------------------------------------------------------ --lf and --sw


def test_lf_names_what_it_left_out(stored: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_plain.py").write_text(PLAIN)
    assert stored(fault="scale", cached=True).ret == 1
    result = stored("--lf", fault="scale", cached=True)
    assert result.ret == 1, "they still fail"
    result.stdout.fnmatch_lines(["4 of 8 stored cases compared; 4 left out by --lf"])
    result = stored("--lf", cached=True)
    assert result.ret == 0, "they pass now"
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["4 of 8 stored cases compared; 4 left out by --lf"])
    result = stored("--lf", cached=True)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["8 of 8 stored cases compared"])  # nothing failed before, so --lf leaves nothing out


@pytest.mark.parametrize("workers", [0, 2], ids=["alone", "two workers"])
def test_lf_of_a_failure_elsewhere_leaves_out_the_gate_and_says_so(
    stored: Run, pytester: pytest.Pytester, workers: int
) -> None:
    plain = pytester.path / "test_plain.py"
    plain.write_text("def test_plain():\n    assert False\n")
    assert stored(cached=True).ret == 1
    plain.write_text(PLAIN)
    result = stored("--lf", cached=True, workers=workers)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["0 of 8 stored cases compared; 8 left out by --lf"])


@pytest.mark.parametrize("workers", [0, 2], ids=["alone", "two workers"])
@pytest.mark.parametrize(
    ("file", "why"),
    [
        (None, "its test was in test_gate.py, which does not exist"),
        (PLAIN, "test_gate.py gave no test test_matches_baseline *"),
    ],
    ids=["deleted", "renamed"],
)
def test_lf_does_not_excuse_a_failing_test_that_is_gone(
    stored: Run, pytester: pytest.Pytester, file: str | None, why: str, workers: int
) -> None:
    """Without its failing test, pytest runs all others."""
    (pytester.path / "test_plain.py").write_text("def test_plain():\n    assert False\n")
    assert stored(fault="scale", cached=True).ret == 1

    def leave() -> None:
        (pytester.path / "test_plain.py").write_text(PLAIN)
        gate = pytester.path / "test_gate.py"
        gate.unlink() if file is None else gate.write_text(file)

    result = stored("--lf", cached=True, after=leave, workers=workers)
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"0 of 8 stored cases compared; 8 not compared: {why}"])


@pytest.mark.parametrize("option", ["--sw", "--sw-skip"])
@pytest.mark.parametrize("workers", [0, 2], ids=["alone", "two workers"])
def test_sw_names_what_it_left_out(stored: Run, option: str, workers: int) -> None:
    """In the order of the matrix: layer_0 passes, layer_1, layer_2 and logits of int8 fail."""
    result = stored(option, fault="scale", cached=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    done = 2 if option == "--sw" else 3  # --sw-skip goes on after the first failure
    ended = f"{8 - done} not compared: the run ended early (Test failed, continuing from this test next run.)"
    result.stdout.fnmatch_lines([f"{done} of 8 stored cases compared; {ended}"])
    result = stored(option, cached=True, workers=workers)
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"{9 - done} of 8 stored cases compared; {done - 1} left out by {option}"])
    assert stored(option, cached=True).ret == 0


# ---------------------------------------------------------------------------------------------- runs that end early


@pytest.mark.parametrize("workers", [0, 2], ids=["alone", "two workers"])
@pytest.mark.parametrize("option", ["-x", "--maxfail=2"])
def test_a_run_that_ends_early_says_what_it_did_not_compare(stored: Run, option: str, workers: int) -> None:
    result = stored(option, fault="scale", workers=workers)
    assert result.ret == (pytest.ExitCode.INTERRUPTED if workers else 1)
    line = next(line for line in result.outlines if "stored cases compared" in line)
    compared = int(line.partition(" ")[0])
    assert line == (
        f"{compared} of 8 stored cases compared; {8 - compared} not compared: the run ended early "
        f"(stopping after {1 if option == '-x' else 2} failures)"
    )
    if not workers:
        assert compared == (2 if option == "-x" else 3)
    assert stored(option, workers=workers).ret == 0, "no failure, no early end"


# --------------------------------------------------------------------------------------------- the plugins of others


@pytest.mark.parametrize("workers", [0, 2], ids=["alone", "two workers"])
def test_a_fault_stays_red_in_every_rerun_and_counts_once(stored: Run, pytester: pytest.Pytester, workers: int) -> None:
    assert stored("--probe-output=out", fault="scale").ret == 1
    expected = summary(pytester)
    result = stored("--probe-output=out", "--reruns", "2", *PLUGINS, fault="scale", workers=workers)
    assert result.ret == 1
    counted = result.parseoutcomes()
    assert {name: counted[name] for name in ("passed", "failed", "rerun")} == {"passed": 4, "failed": 2, "rerun": 8}
    result.stdout.fnmatch_lines([FAULT, COUNTS])
    assert summary(pytester) == expected
    told = [line for line in result.outlines if "drifted from its baseline" in line]
    assert len(told) == 2, "each recipe is explained once"


@pytest.mark.parametrize("workers", [0, 2], ids=["alone", "two workers"])
def test_a_rerun_that_reaches_the_gate_counts(stored: Run, workers: int) -> None:
    result = stored("--reruns", "1", *PLUGINS, hooks=FAILS_ONCE, workers=workers)
    assert result.ret == 0
    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines(["8 of 8 stored cases compared"])
    result = stored(*PLUGINS, hooks=FAILS_ONCE, workers=workers)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["0 of 8 * 8 not compared: its test failed before the gate gave a verdict"])


@pytest.mark.parametrize("fault", ["", "scale"])
def test_forked_gives_the_same_verdicts(stored: Run, pytester: pytest.Pytester, fault: str) -> None:
    """In a process of its own: a fork inherits the locks of the threads that this one has."""
    status = stored("--probe-output=out", fault=fault).ret
    expected = summary(pytester)
    result = stored("--probe-output=out", "--forked", *PLUGINS, fault=fault, hooks=REPAIRS_FORKED, subprocess=True)
    assert result.ret == status
    result.stdout.fnmatch_lines(["8 of 8 stored cases compared"])
    assert summary(pytester) == expected


def test_forked_names_the_case_that_crashed(stored: Run) -> None:
    result = stored("--forked", *PLUGINS, hooks=REPAIRS_FORKED + CRASHES, subprocess=True)
    assert result.ret == 1
    crashed = "1 not compared: its test crashed (*EXITED with status 7)"
    result.stdout.fnmatch_lines([f"7 of 8 stored cases compared; {crashed}"])


def test_forked_tests_that_send_no_report_are_named(stored: Run) -> None:
    result = stored(
        "--forked", *PLUGINS, hooks=REPAIRS_FORKED.replace('"nodeid"', '"none": object(), "nodeid"'), subprocess=True
    )
    assert result.ret == 1
    result.stdout.fnmatch_lines(["0 of 8 stored cases compared; 8 not compared: its test crashed (*with status 3)"])


def test_forked_updates_are_refused(stored: Run, pytester: pytest.Pytester) -> None:
    before = (pytester.path / "baselines" / "network_make" / "cpu" / "coarse.json").read_bytes()
    result = stored("--forked", "--update-baselines", *PLUGINS, fault="better", hooks=REPAIRS_FORKED, subprocess=True)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["no baseline of network:make was written: 8 of 8 *Run the update without --forked.*"])
    assert (pytester.path / "baselines" / "network_make" / "cpu" / "coarse.json").read_bytes() == before


def test_the_plugins_of_others_take_no_part_in_the_runs_of_this_project(pytestconfig: pytest.Config) -> None:
    for name in ("rerunfailures", "pytest_forked"):
        assert pytestconfig.pluginmanager.is_blocked(name), "see addopts in pyproject.toml"


# ------------------------------------------------------------------------------------------------- xdist, every --dist


@pytest.mark.parametrize("dist", DISTRIBUTIONS)
def test_every_dist_gives_the_same_verdicts(stored: Run, pytester: pytest.Pytester, dist: str) -> None:
    assert stored("--probe-output=out", fault="scale").ret == 1
    expected = summary(pytester)
    result = stored("--probe-output=out", "--dist", dist, fault="scale", workers=2)
    assert result.ret == 1
    result.stdout.fnmatch_lines([FAULT, COUNTS])
    assert summary(pytester) == expected
    result = stored("--dist", dist, "-k", "int8", workers=2)
    assert result.ret == 0
    result.assert_outcomes(passed=8 if dist == "each" else 4)
    result.stdout.fnmatch_lines(['4 of 8 stored cases compared; 4 left out by -k "int8"'])


@pytest.mark.parametrize("dist", [dist for dist in DISTRIBUTIONS if dist != "each"])
def test_a_crashed_worker_costs_one_case_in_every_dist(stored: Run, dist: str) -> None:
    result = stored("--dist", dist, hooks=CRASHES, workers=2)
    assert result.ret == 1
    crashed = "1 not compared: its test crashed (worker 'gw?' crashed)"
    result.stdout.fnmatch_lines([f"7 of 8 stored cases compared; {crashed}", "not compared: coarse-layer_1-cpu-int8 *"])
    assert_no_traceback(result.stdout.str())


def test_a_crash_of_every_worker_is_red_and_named(stored: Run) -> None:
    """xdist's `each` runs the crashing case on every worker, and then ends with an internal error of its own."""
    result = stored("--dist", "each", hooks=CRASHES, workers=2)
    assert result.ret not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    result.stdout.fnmatch_lines(["? of 8 stored cases compared; ? not compared: *"])


# ------------------------------------------------------------------------------------------------- what is no check


@pytest.mark.parametrize("option", ["--fixtures", "--fixtures-per-test", "--collect-only"])
def test_options_that_only_show_something_do_not_fail(stored: Run, option: str) -> None:
    result = stored(option)
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*stored cases compared*")


def test_an_update_keeps_the_cases_of_a_file_that_was_skipped(project: Run, pytester: pytest.Pytester) -> None:
    other = pytester.path / "test_other.py"
    other.write_text(TWICE)
    assert project("--update-baselines").ret == 0
    kept = (pytester.path / "baselines" / "network_make" / "cpu" / "linear_w.json").read_bytes()
    other.write_text(f"import pytest\n\npytest.importorskip('no_such_module')\n{TWICE}")
    result = project("--update-baselines", fault="better")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["8 of 12 *; 4 not compared: test_other.py was not collected (could not import*"])
    assert (pytester.path / "baselines" / "network_make" / "cpu" / "linear_w.json").read_bytes() == kept
    other.write_text(TWICE)
    assert project(fault="better").ret == 0
