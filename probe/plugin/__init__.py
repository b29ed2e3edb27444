"""The pytest plugin: translates pytest to library calls. Every pytest run loads it, so it imports nothing heavy.

A test that takes the fixture `probe_case` runs for every case of the matrix:

    def test_matches_baseline(probe_case):
        probe_case.check()

A test that takes `probe_scaling` runs for every tensor and format of its marker (docs/scaling.md); a test that takes
`probe_activations`, for every tensor that the configuration of its marker selects (docs/activations.md).
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Generator
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from probe.gate.accounting import Stage
from probe.gate.configuration import AXES, has_settings, read_settings
from probe.plugin.engine import add_options, open_engine, tell_worker
from probe.plugin.selection import FIXTURES, LEFT_OUT, CaseFollower, plain_nodeid, request_of

if TYPE_CHECKING:
    from probe.gate.session import Session
    from probe.plugin.fixtures import ProbeCase

SESSION: pytest.StashKey[Session] = pytest.StashKey()
FOLDER = pytest.StashKey[Path]()
PARTS = pytest.StashKey[dict[str, int]]()  # of the cluster, by the worker of xdist
CASE: pytest.StashKey[ProbeCase] = pytest.StashKey()

MARKERS = (
    "probe(model=..., modes=[...], layers=[...], formats=[...], ...): "
    "the matrix of this test, over that of [tool.probe]; the same keys",
    "probe_scaling(tensors=[...], formats=[...], granularity='tensor', num_levels=None): "
    "the tensors whose recommended scale is compared with a baseline",
    "probe_activations(config='configs/default.yaml', overrides={...}, figures=[...], tolerances={...}): "
    "the layers whose statistics are compared with a baseline",
)
#: The category of further failures of a recipe: they fail the run, but only the first one is explained.
FOLLOWS = "failed in the same recipe"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, which override [tool.probe]."""
    group = parser.getgroup("probe", "numerical regression gate (probe)")
    group.addoption("--probe-model", metavar="MODEL", help="embedded name, folder, hub id or package.module:factory")
    for axis in AXES:
        words = f"{axis} of the matrix, separated by commas or spaces"
        group.addoption(f"--probe-{axis}", metavar="NAMES", action="append", help=words)
    group.addoption("--baselines-dir", metavar="DIR", help="where baselines lie (default: baselines)")
    group.addoption("--update-baselines", action="store_true", help="measure and store; with -k only what it selects")
    group.addoption("--update-baselines-in-ci", action="store_true", help="allow --update-baselines though CI is set")
    group.addoption("--allow-worse", metavar="REASON", help="store figures that got worse, with the reason beside them")
    add_options(group)
    group.addoption("--probe-output", metavar="DIR", help="for summary.json and summary.md (default: beside --html)")


def pytest_configure(config: pytest.Config) -> None:
    """Check settings and options; nothing is loaded yet."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    from probe.gate.session import Options, Session
    from probe.plugin.controller import Controller

    try:
        settings = read_settings(config.rootpath)
        options = Options(
            model=_word(config, "--probe-model"),
            axes={axis: _words(config, axis) for axis in AXES},
            baselines=_word(config, "--baselines-dir"),
            update=config.getoption("--update-baselines"),
            reason=_reason(config),
        )
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        engine = open_engine(config, worker)
    except ValueError as problem:
        raise pytest.UsageError(f"probe: {problem}") from None
    folder = Path(worker["probe_folder"]) if worker and "probe_folder" in worker else None
    config.stash[SESSION] = Session(config.rootpath, settings, options, folder=folder, engine=engine)
    # without names, which `-p no:` could block
    config.pluginmanager.register(CaseFollower(config, config.stash[SESSION]))
    if worker is None:
        if config.getoption("numprocesses", None) and has_settings(config.rootpath):
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # workers on the same cores must not spin
        config.pluginmanager.register(Controller(config, config.stash[SESSION]))


def _word(config: pytest.Config, option: str) -> str | None:
    given: str | None = config.getoption(option)
    if given is not None and not given.strip():
        raise ValueError(f"{option} is empty, perhaps an unset variable. Give it a value or leave it out.")
    return given


def _words(config: pytest.Config, axis: str) -> tuple[str, ...] | None:
    given: list[str] | None = config.getoption(f"--probe-{axis}")
    if given is None:
        return None
    words = tuple(word for text in given for word in text.replace(",", " ").split())
    if not words:
        raise ValueError(f"--probe-{axis} names nothing. Expected {axis} separated by commas.")
    return words


def _reason(config: pytest.Config) -> str:
    update, reason = config.getoption("--update-baselines"), config.getoption("--allow-worse")
    if update and os.environ.get("CI") and not config.getoption("--update-baselines-in-ci"):
        raise ValueError(
            "--update-baselines while CI is set: baselines are made and reviewed by people. "
            "Run it at home and commit the result, or say --update-baselines-in-ci."
        )
    if config.getoption("--update-baselines-in-ci") and not update:
        raise ValueError("--update-baselines-in-ci does nothing without --update-baselines. Give both.")
    if reason is None:
        return ""
    if not update:
        raise ValueError("--allow-worse does nothing without --update-baselines. Give both.")
    if not 8 <= len(reason.strip()) <= 120 or not reason.isprintable():
        raise ValueError(
            f"--allow-worse {reason!r}: expected a reason of 8 to 120 characters that a reviewer can read, on one line."
        )
    return str(reason.strip())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hook of xdist: with plain `-n`, a recipe stays on one worker; other --dist are xdist's, but survive a crash."""
    if not has_settings(config.rootpath):
        return None
    from probe.plugin.scheduling import SCHEDULERS

    scheduler = SCHEDULERS.get(config.getoption("dist"))
    return scheduler(config, log) if scheduler else None


def pytest_report_header(config: pytest.Config) -> str | None:
    """Where cases run, if it is not this process."""
    engine = config.stash[SESSION].engine
    return None if engine is None else f"probe: cases run on {engine.about}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hook of xdist, in the controller: the folder in which workers share references and calibrations."""
    stash = node.config.stash
    if FOLDER not in stash:
        stash[FOLDER] = Path(tempfile.mkdtemp(prefix="probe-"))
    node.workerinput["probe_folder"] = str(stash[FOLDER])
    tell_worker(node, stash[SESSION].engine, stash.setdefault(PARTS, {}))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the engine, and delete the shared folder."""
    engine = config.stash[SESSION].engine if SESSION in config.stash else None
    if engine is not None:
        engine.close()
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes one of the fixtures becomes one test per case."""
    for fixture in FIXTURES:
        if fixture in metafunc.fixturenames:
            _generate(metafunc, fixture)


def _generate(metafunc: pytest.Metafunc, fixture: str) -> None:
    session, name, test = metafunc.config.stash[SESSION], metafunc.definition.name, metafunc.definition.nodeid
    marker = metafunc.definition.get_closest_marker(FIXTURES[fixture])
    if marker is not None and marker.args:
        raise pytest.Collector.CollectError(f"probe: the marker of {name} takes keywords only, such as model=...")
    _share_cores()
    find: Any = session.request
    if fixture != "probe_case":
        from probe.plugin.golden_figures import REQUESTS

        find = partial(REQUESTS[fixture], session)
    try:
        requests = find(marker.kwargs if marker else {}, where=f"the {FIXTURES[fixture]} marker of {name}", test=test)
    except (ValueError, OSError) as problem:
        raise pytest.Collector.CollectError(f"probe: {problem}") from None
    for request in requests:
        session.advance(request, Stage.GENERATED, test=test)
    ids = [str(one.case) for one in requests]
    metafunc.parametrize(fixture, requests or [LEFT_OUT], indirect=True, ids=ids or ["left out by the options"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, as -k would, a marked test for which the options leave no case."""
    empty = [item for item in items if request_of(item) is LEFT_OUT]
    if empty:
        config.hook.pytest_deselected(items=empty)
        items[:] = [item for item in items if item not in empty]


def pytest_collection_finish(session: pytest.Session) -> None:
    """With an engine, the cases that will run are observed ahead of their tests; xdist decides late which those are.

    Where there are cases, what is loaded by now stays: collections of garbage that walk over it, and one at the end of
    the process, take a tenth of the gate. Ctrl-C in a callback of C code would be a warning in some test.
    """
    ours = session.config.stash[SESSION]
    if ours.models:
        from probe.interrupts import keep_interrupts

        keep_interrupts()  # until pytest puts back the hook of before
        gc.freeze()
        atexit.register(gc.freeze)
    if ours.engine is not None and not os.environ.get("PYTEST_XDIST_WORKER"):
        requests = [one for item in session.items if (one := request_of(item)) not in (None, LEFT_OUT)]
        try:
            ours.expect(one for one in requests if one.has_recipe)
        except ValueError as problem:
            raise pytest.UsageError(f"probe: {problem}") from None


def _share_cores() -> None:
    """Divide the cores among the workers: more threads than cores would wait for one another."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        import torch

        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // workers)))


@pytest.fixture
def probe_case(request: pytest.FixtureRequest) -> ProbeCase:
    """One case of the matrix; `check()` measures it and compares it with its baseline."""
    return _case_of(request)


@pytest.fixture
def probe_scaling(request: pytest.FixtureRequest) -> ProbeCase:
    """One tensor in one format; `check()` sweeps its scale and compares the recommendation with the baseline."""
    return _case_of(request)


@pytest.fixture
def probe_activations(request: pytest.FixtureRequest) -> ProbeCase:
    """One tensor of one layer; `check()` compares its statistics with the baseline."""
    return _case_of(request)


def _case_of(request: pytest.FixtureRequest) -> ProbeCase:
    from probe.plugin.fixtures import ProbeCase
    from probe.running.environment import is_present

    nodeid, session = plain_nodeid(request.node.nodeid), request.config.stash[SESSION]
    given = ProbeCase(str(request.fixturename), request.param, session, nodeid)
    request.node.stash[CASE] = given
    if not is_present(given.case.device):
        pytest.skip(f"device {given.case.device} is not present on this machine: {given.case} was not measured")
    return given


@pytest.hookimpl(optionalhook=True)
def pytest_html_results_table_row(report: Any, cells: list[str]) -> None:
    """Hook of pytest-html, which does not escape test ids: layer names come from models."""
    if escape(report.nodeid) == report.nodeid:
        return
    from probe.report.gate.page import name_cell

    cells[:] = [name_cell(report.nodeid) if 'class="col-testId"' in cell else cell for cell in cells]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach outcome, explanation, tables and pictures to the report; xdist may send it to another process."""
    report = yield
    request = request_of(item)
    if request not in (None, LEFT_OUT):
        from probe.plugin.fixtures import describe

        given = item.stash.get(CASE, None)
        describe(report, request, given, call.excinfo.value if call.excinfo else None, item.config)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, Any] | None:
    """Count further failures of a recipe as failures without printing their text: the first one explains them."""
    if getattr(report, "probe_follows", False) and report.failed:  # not "rerun"
        return FOLLOWS, "F", ("FAILED", {"red": True})
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Hook of xdist, in the controller: merge the cases that a worker knew when it ended; another may have its part."""
    node.config.stash.get(PARTS, {}).pop(node.gateway.id, None)
    given = getattr(node, "workeroutput", {}).get("probe")
    if given:
        node.config.stash[SESSION].merge(given)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker: send its cases to the controller. `Controller` does the rest."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["probe"] = session.config.stash[SESSION].close()
