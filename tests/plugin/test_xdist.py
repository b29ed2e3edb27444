"""Several processes, any order, and runs that end badly: the same verdicts, and never half a baseline."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from probe.gate import bench
from probe.plugin.scheduling import recipe_of
from probe.running.noise import Anchors
from tests.plugin.conftest import UNUSED, Run
from tests.plugin.project import files
from tests.plugin.test_lifecycle import snapshot

#: A second test of the same model, of one layer only: its reference and its anchors are not those of the first.
OTHER = """
import pytest


@pytest.mark.probe(modes=["linear_w"], layers=["last"], formats=["int8"])
def test_other(probe_case):
    probe_case.check()
"""

#: Writes down, in workers, which process ran what.
WATCH = """
import os
from pathlib import Path


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        from probe.gate import bench

        for name in ("run_reference", "calibrate_on"):
            setattr(bench, name, watched(name, getattr(bench, name)))


def watched(name, real):
    def run(*given, **named):
        note(name)
        return real(*given, **named)

    return run


def pytest_runtest_call(item):
    note(item.name)


def note(what):
    with open(Path(__file__).parent / "notes", "a") as notes:
        notes.write(f"{os.environ.get('PYTEST_XDIST_WORKER')} {what}\\n")
"""

KILL_WORKER = """
import os
import signal


def pytest_runtest_call(item):
    if hasattr(item.config, "workerinput") and item.name.endswith("[coarse-layer_1-cpu-int8]"):
        os.kill(os.getpid(), signal.SIGKILL)
"""

#: The process that writes dies before its third rename: anchors and the first mode are new, the second is not yet.
KILL_CONTROLLER = """
import os
import signal

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        real, done = os.replace, []

        def replace(source, target):
            if len(done) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(target)
            return real(source, target)

        os.replace = replace
"""
#: Two files to write.
TWO_MODES: dict[str, object] = {"modes": '["coarse", "linear_w"]', "formats": '["int8"]'}

SHUFFLE = """
import os
import random


def pytest_collection_modifyitems(items):
    random.Random(int(os.environ["SEED"])).shuffle(items)
"""


def stored(pytester: pytest.Pytester) -> dict[str, bytes]:
    return snapshot(pytester.path / "baselines")


def summary(pytester: pytest.Pytester) -> dict[str, Any]:
    """summary.json, in an order of its own."""
    found: dict[str, Any] = json.loads((pytester.path / "out" / "summary.json").read_text())
    for name, key in (("cases", "id"), ("recipes", "recipe")):
        found[name].sort(key=lambda row: row[key])
    return found


def assert_no_traceback(text: str) -> None:
    for word in ("Traceback", "INTERNALERROR"):
        assert word not in text, text


# --------------------------------------------------------------------------------------------------- many processes


def test_update_under_xdist_is_byte_identical_and_nothing_is_computed_twice(
    project: Run, pytester: pytest.Pytester
) -> None:
    (pytester.path / "test_other.py").write_text(OTHER)
    formats = '["int8", "fp8_e4m3", "fp4_e2m1"]'
    assert project("--update-baselines", formats=formats).ret == 0
    serial = stored(pytester)
    for file in serial:
        (pytester.path / "baselines" / file).unlink()
    assert project("--update-baselines", workers=4, formats=formats, hooks=WATCH).ret == 0
    assert stored(pytester) == serial
    (anchors,) = pytester.path.glob("baselines/*/anchors-*")
    assert set(Anchors.from_bytes(anchors.read_bytes()).places) == {"layer_0", "layer_1", "layer_2"}

    notes = [line.split(" ", 1) for line in (pytester.path / "notes").read_text().splitlines()]
    made = Counter(what for _, what in notes if what in ("run_reference", "calibrate_on"))
    # four for the first test, under each of the harmless changes, and four for the layers of the second
    assert made == {"run_reference": 8, "calibrate_on": 8}
    workers = defaultdict(set)
    for worker, what in notes:
        if what.startswith("test_"):
            workers[recipe_of(what)].add(worker)
    assert len(workers) == 4
    assert all(len(of_recipe) == 1 for of_recipe in workers.values()), "a recipe is run by one worker"
    assert len(set.union(*workers.values())) > 1, "more than one worker took part"


def test_a_run_under_xdist_says_what_a_serial_one_says(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines", formats='["int8", "fp8_e4m3", "fp4_e2m1"]')
    results = []
    for workers in (0, 2):
        result = project("--probe-output=out", fault="scale", workers=workers)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        told = [line for line in result.outlines if "drifted from its baseline" in line]
        assert len(told) == 2, "the story of each of the two recipes is told once"
        obsolete = sorted(line for line in result.outlines if line.startswith("obsolete: "))
        assert len(obsolete) == 4
        counts = [line for line in result.outlines if line.startswith("network:make on cpu: 12 cases: ")]
        results.append((summary(pytester), obsolete, counts, sorted(told)))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("nodeid", "recipe"),
    [
        ("t.py::test[mode_2_1-layer_0-cpu-int8]", "t.py::test[mode_2_1-*-cpu-int8]"),
        ("t.py::test[fp16-logits-cpu]", "t.py::test[fp16-*-cpu]"),
        ("t.py::test[my-own-mode-layer_0-cuda:1-int8]", "t.py::test[my-own-mode-*-cuda:1-int8]"),
        ("t.py::test[coarse-layer_0-recorded:a-b/c-int8]", "t.py::test[coarse-*-recorded:a-b/c-int8]"),
        ("t.py::test[some-thing-else]", "t.py::test[some-thing-else]"),
        ("t.py::test", "t.py::test"),
    ],
)
def test_the_cases_of_a_recipe_are_known_by_their_ids(nodeid: str, recipe: str) -> None:
    assert recipe_of(nodeid) == recipe


def test_processes_that_cannot_share_have_their_own(tmp_path: Path) -> None:
    """A full disk costs time, not the run."""

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    made = object()
    for folder in (tmp_path, tmp_path / "gone", None):
        assert bench.shared(folder, "key", lambda: made, full, lambda file: file) is made


# ------------------------------------------------------------------------------------------------------- any order


def test_the_order_of_tests_changes_no_verdict_and_no_baseline(
    project: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project("--update-baselines")
    baselines = stored(pytester)
    project("--probe-output=out", fault="scale")
    verdicts = summary(pytester)
    for seed in (1, 2, 3):
        monkeypatch.setenv("SEED", str(seed))
        assert project("--probe-output=out", fault="scale", hooks=SHUFFLE).ret == pytest.ExitCode.TESTS_FAILED
        assert summary(pytester) == verdicts
    for file in baselines:
        (pytester.path / "baselines" / file).unlink()
    assert project("--update-baselines", hooks=SHUFFLE).ret == 0
    assert stored(pytester) == baselines


# ----------------------------------------------------------------------------------------------- runs that end badly


def test_a_killed_worker_leaves_the_old_baselines_and_says_so(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines")
    before = stored(pytester)
    result = project("--update-baselines", workers=2, fault="better", hooks=KILL_WORKER)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*worker 'gw?' crashed while running *coarse-layer_1-cpu-int8*",
            "no baseline of network:make was written: 1 of 8 cases*coarse-layer_1-cpu-int8 was not measured*",
        ]
    )
    assert_no_traceback(result.stdout.str())
    assert stored(pytester) == before


def test_no_worker_left_leaves_the_old_baselines_and_says_so(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines")
    before = stored(pytester)
    result = project("--update-baselines", "--max-worker-restart=0", workers=1, fault="better", hooks=KILL_WORKER)
    assert result.ret != 0
    result.stdout.fnmatch_lines(["no baseline*was written: *"])
    assert stored(pytester) == before


def test_an_update_that_is_stopped_early_writes_nothing(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines")
    before = stored(pytester)
    (pytester.path / "test_a_failure.py").write_text("def test_fails():\n    assert False\n")
    result = project("-x", "--update-baselines", fault="better")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*no case was measured, so no baseline was written*"])
    assert stored(pytester) == before
    (pytester.path / "test_a_failure.py").rename(pytester.path / "test_z_failure.py")
    for workers in (0, 2):
        result = project("--maxfail=1", "--update-baselines", fault="better", workers=workers)
        assert result.ret in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
        result.stdout.fnmatch_lines(["no baseline was written: the run ended early (stopping after 1 failures)*"])
        result.stdout.no_fnmatch_line("* updated*")
        assert stored(pytester) == before


def test_a_killed_controller_leaves_modes_that_are_whole_and_the_next_update_completes_it(
    project: Run, pytester: pytest.Pytester
) -> None:
    project("--update-baselines", **TWO_MODES)
    before = stored(pytester)
    changed = {**TWO_MODES, "seqlen": 32}
    update = ("--update-baselines", "--allow-worse", "longer samples now")
    result = project(*update, "-n", "2", *UNUSED, subprocess=True, hooks=KILL_CONTROLLER, **changed)
    assert result.ret == -signal.SIGKILL
    after = stored(pytester)
    assert {name for name in before if after[name] != before[name]} == {"network_make/cpu/coarse.json"}
    assert len([name for name in after if "anchors-" in name]) == 2, "each mode has the anchors that it names"
    result = project(**changed)
    result.stdout.fnmatch_lines(
        ["linear_w-*were made with another input: input.tokens*", "*1 failed, 4 passed, 3 failed in the same recipe*"]
    )
    assert project("-k", "linear_w", *update, **changed).ret == pytest.ExitCode.TESTS_FAILED, "not only some"
    assert project(*update, **changed).ret == 0
    assert project(**changed).ret == 0
    assert len(stored(pytester)) == 3, "two modes and their anchors; the old anchors and what was unfinished is gone"


def test_a_full_disk_leaves_the_old_baselines_and_says_so_in_one_line(
    project: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project("--update-baselines")
    before = stored(pytester)
    for name, text in files(fault="better", seqlen=32).items():
        (pytester.path / name).write_text(text)
    largest = max(len(data) for name, data in before.items() if name.endswith(".json")) - 500
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *UNUSED, "--update-baselines"]
    command += ["--allow-worse", "other samples now"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest)),
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    told = [line for line in done.stdout.splitlines() if "cannot write" in line]
    assert len(told) == 1, done.stdout
    assert told[0].endswith("coarse.json: File too large. The old baselines are untouched.")
    assert_no_traceback(done.stdout)
    assert stored(pytester) == before
