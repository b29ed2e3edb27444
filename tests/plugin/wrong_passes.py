"""The catalogue of wrong passes: ways in which a run that compared too little could end green, and what must be said.

Every row starts from a small project whose eight cases are stored and pass (tests/plugin/project.py). `files` replaces
files of the project, None deletes one; `fault` breaks layer 1. A row that a person decided on (an option, an xfail
mark) ends with exit status 0 and is named in the accounting line; every other row fails.
"""

from dataclasses import dataclass, field

PLAIN = "def test_plain():\n    pass\n"
CHECKED = "def test_matches_baseline(probe_case):\n    probe_case.check()\n"
#: A mark or statement in front of the gate's test.
MARKED = "import pytest\n\n\n@pytest.mark.{}\n" + CHECKED
BODY = "import contextlib\nimport pytest\n\n\ndef test_matches_baseline(probe_case):\n    {}\n"

DROPS = """
def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if {}]
"""
DESELECTS = """
def pytest_collection_modifyitems(config, items):
    gone = [item for item in items if "layer_1" in item.nodeid]
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=gone)
"""
DROPS_LATE = """
import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    result = yield
    items[:] = [item for item in items if "layer_1" not in item.nodeid]
    return result
"""
DROPS_AT_THE_END = """
import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    session.items[:] = [item for item in session.items if "layer_1" not in item.nodeid]
"""
NEVER_RUNS = """
def pytest_runtest_protocol(item):
    return True if "layer_1" in item.nodeid else None
"""
SKIPS_ALL = """
import pytest


@pytest.fixture(autouse=True)
def busy():
    pytest.skip("the machine is busy")
"""
IGNORES = """
def pytest_ignore_collect(collection_path):
    return True if collection_path.name == "test_gate.py" else None
"""
LIES = """
import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome, report.longrepr = "passed", None
    return report
"""
OWN_FIXTURE = """
import pytest


class Case:
    def check(self):
        pass


@pytest.fixture
def probe_case(request):
    return Case()
"""
SWALLOWS_EARLY = """
import pytest


@pytest.fixture
def compared(probe_case):
    try:
        probe_case.check()
    except AssertionError:
        pass
"""
EXITS = """
import pytest


def pytest_runtest_setup(item):
    if "layer_1" in item.nodeid:
        pytest.exit("that is enough", returncode=0)
"""
RAISES = """
def pytest_runtest_logstart(nodeid):
    assert "layer_1" not in nodeid
"""
TWICE = """
import pytest


@pytest.mark.probe(modes=["linear_w"], formats=["int8"])
def test_linear(probe_case):
    probe_case.check()
"""
EXITS_AT_THE_END = """
import pytest


def pytest_sessionfinish(session):
    pytest.exit("done", returncode=0)
"""
SETS_THE_STATUS = """
def pytest_sessionfinish(session):
    session.exitstatus = 0
"""
SETS_THE_STATUS_LAST = """
import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    result = yield
    session.exitstatus = 0
    return result
"""
COLLECTS_NOTHING = """
def pytest_collection(session):
    return True
"""
COLLECTS_LESS = """
import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector):
    report = yield
    report.result = [node for node in report.result if "layer_1" not in node.name]
    return report
"""
CALLS_NOTHING = """
def pytest_pyfunc_call(pyfuncitem):
    return True
"""
GIVES_ANOTHER = """
class Case:
    def check(self):
        pass


def pytest_fixture_setup(fixturedef, request):
    if fixturedef.argname == "probe_case":
        fixturedef.cached_result = (Case(), fixturedef.cache_key(request), None)
        return Case()
"""
ASYNCHRONOUS = "async def test_matches_baseline(probe_case):\n    probe_case.check()\n"
UNITTEST = """
import unittest

import pytest


class TestGate(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def take(self, probe_case):
        self.case = probe_case

    def test_matches_baseline(self):
        self.case.check()
"""
IN_A_CLASS = """
class {}:
    def test_matches_baseline(self, probe_case):
        probe_case.check()
"""
PARAMETRIZED = """
import pytest


@pytest.mark.parametrize("again", [False, True])
def test_matches_baseline(probe_case, again):
    if again is {}:
        {}
    probe_case.check()
"""
IN_A_THREAD = "import threading\n\n\n" + CHECKED.replace(
    "probe_case.check()", "one = threading.Thread(target=probe_case.check)\n    one.start()\n    one.join()"
)
IN_A_SUBTEST = """
def test_matches_baseline(probe_case, subtests):
    with subtests.test("of the gate"):
        probe_case.check()
"""
GONE = "not compared: 8 cases of network:make, coarse-layer_0-cpu-fp8_e4m3 first: "
NONE_OF_8 = "0 of 8 stored cases compared; 8 not compared: "


@dataclass(frozen=True)
class WrongPass:
    """One way: how the project is broken, how pytest is called, and what must be said (patterns of lines)."""

    said: tuple[str, ...]
    files: dict[str, str | None] = field(default_factory=dict)
    hooks: str = ""
    fault: str = ""
    arguments: tuple[str, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)
    stored: tuple[str, ...] = ()  # other stored baselines: of a model, of a device
    deleted: tuple[str, ...] = ()  # files and folders that a person deleted
    folder: str = "."  # where pytest is called
    exit_status: int = 1
    serial_only: bool = False  # a hook that xdist's controller does not call
    ends_early: bool = False  # xdist then ends with 2, "interrupted"


def named(said: str, *arguments: str, **more: object) -> WrongPass:
    """A row that ends green, because a person left something out, and that says so."""
    return WrongPass((said,), arguments=arguments, exit_status=0, **more)  # type: ignore[arg-type]


def broken(said: str, **more: object) -> WrongPass:
    """A row that must fail."""
    return WrongPass((said,), **more)  # type: ignore[arg-type]


def with_test(text: str, said: str, **more: object) -> WrongPass:
    """The gate's test is another one."""
    return WrongPass((said,), files={"test_gate.py": text}, **more)  # type: ignore[arg-type]


def with_hooks(hooks: str, said: str, **more: object) -> WrongPass:
    """The conftest does more."""
    return WrongPass((said,), hooks=hooks, **more)  # type: ignore[arg-type]


ELSEWHERE: dict[str, str | None] = {"test_gate.py": None, "test_plain.py": PLAIN}
DROPPED = "6 of 8 stored cases compared; 2 not compared: a conftest or a plugin took its test out of the run"
NOT_RUN = "6 of 8 stored cases compared; 2 not compared: its test ran without a verdict of the gate*"
SWALLOWED = "*check() failed, and the test went on as if it had not*"

CATALOGUE: dict[str, WrongPass] = {
    # the file of the test
    "file deleted": broken(GONE + "its test was in test_gate.py, which does not exist.", files=ELSEWHERE),
    "file deleted, no test left": broken(NONE_OF_8 + "*does not exist", files={"test_gate.py": None}),
    "file deleted, its folder named": broken(NONE_OF_8 + "*does not exist", files=ELSEWHERE, arguments=(".",)),
    "file renamed": broken(NONE_OF_8 + "*does not exist", files={**ELSEWHERE, "gate.py": CHECKED}),
    "test renamed": broken(
        NONE_OF_8 + "test_gate.py gave no test test_matches_baseline that takes cases",
        files={"test_gate.py": CHECKED.replace("def test_", "def no_test_"), "test_plain.py": PLAIN},
    ),
    "importorskip": broken(
        NONE_OF_8 + "test_gate.py was not collected (could not import 'no_such_module'*",
        files={
            "test_gate.py": f"import pytest\n\npytest.importorskip('no_such_module')\n\n\n{CHECKED}",
            "test_plain.py": PLAIN,
        },
    ),
    "module skips itself": with_test(
        f"import pytest\n\npytest.skip('not today', allow_module_level=True)\n\n\n{CHECKED}",
        NONE_OF_8 + "test_gate.py was not collected (not today)",
    ),
    "collect_ignore": with_hooks(
        'collect_ignore = ["test_gate.py"]\n', NONE_OF_8 + "test_gate.py gave no test*", files={"test_plain.py": PLAIN}
    ),
    "collect_ignore_glob": with_hooks(
        'collect_ignore_glob = ["*_gate.py"]\n', NONE_OF_8 + "*", files={"test_plain.py": PLAIN}
    ),
    "pytest_ignore_collect": with_hooks(IGNORES, NONE_OF_8 + "*", files={"test_plain.py": PLAIN}),
    "python_files": broken(NONE_OF_8 + "*", files={"plain.py": PLAIN}, arguments=("-o", "python_files=plain.py")),
    "python_functions": broken(NONE_OF_8 + "*", arguments=("-o", "python_functions=check_*")),
    "testpaths": broken(NONE_OF_8 + "*", files={"other/test_plain.py": PLAIN}, arguments=("-o", "testpaths=other")),
    "fixture no longer taken": with_test("def test_matches_baseline():\n    pass\n", NONE_OF_8 + "test_gate.py gave*"),
    # tests that a conftest takes out
    "conftest drops all": with_hooks(DROPS.format("'gate' not in item.nodeid"), NONE_OF_8 + "a conftest or a plugin*"),
    "conftest drops one layer": with_hooks(DROPS.format("'layer_1' not in item.nodeid"), DROPPED),
    "conftest deselects": with_hooks(DESELECTS, DROPPED),
    "conftest drops behind -k": with_hooks(
        DROPS.format("'layer_1' not in item.nodeid"),
        '3 of 8 stored cases compared; 3 left out by -k "int8"; 2 not compared: a conftest or a plugin*',
        arguments=("-k", "int8"),
    ),
    "conftest drops after all others": with_hooks(DROPS_LATE, DROPPED),
    "conftest empties session.items": with_hooks(DROPS_AT_THE_END, NOT_RUN, serial_only=True),
    "conftest never runs a test": with_hooks(NEVER_RUNS, NOT_RUN, serial_only=True),
    "conftest skips": with_hooks(SKIPS_ALL, NONE_OF_8 + "its test was skipped (the machine is busy)"),
    "conftest turns reports green": with_hooks(LIES, "* cases failed though their tests did not: *", fault="scale"),
    "conftest exits with 0": with_hooks(
        EXITS, "* not compared: the run ended early (that is enough)*", serial_only=True
    ),
    "conftest raises": with_hooks(
        RAISES, "* not compared: the run ended early (pytest had an internal error)", exit_status=3, serial_only=True
    ),
    "conftest exits at the end": with_hooks(EXITS_AT_THE_END, NONE_OF_8 + "*does not exist", files=ELSEWHERE),
    "conftest sets the exit status": with_hooks(
        SETS_THE_STATUS, "probe: something set the exit status to 0 though 4 cases fail; it is 1.", fault="scale"
    ),
    "conftest sets the exit status last": with_hooks(
        SETS_THE_STATUS_LAST, "probe: something set the exit status to 0 though 4 cases fail; it is 1.", fault="scale"
    ),
    # with workers xdist waits for their collections, forever
    "conftest collects nothing": with_hooks(COLLECTS_NOTHING, NONE_OF_8 + "test_gate.py gave*", serial_only=True),
    "conftest collects less": with_hooks(COLLECTS_LESS, "6 of 8 * 2 not compared: pytest made no test of it"),
    "conftest calls nothing": with_hooks(CALLS_NOTHING, "*never called probe_case.check(), so nothing was compared*"),
    "conftest gives another fixture": with_hooks(GIVES_ANOTHER, NONE_OF_8 + "its test ran without a verdict*"),
    "-p no:": broken(
        NONE_OF_8 + "*does not exist",
        files=ELSEWHERE,
        arguments=("-p", "no:probe-controller", "-p", "no:probe-follower", "-p", "no:skipping"),
    ),
    # the body of the test
    "skip mark": with_test(MARKED.format("skip(reason='later')"), NONE_OF_8 + "its test was skipped (later)"),
    "skipif mark": with_test(MARKED.format("skipif(True, reason='later')"), NONE_OF_8 + "its test was skipped (later)"),
    "skip in the body": with_test(
        BODY.format("pytest.skip('slow')\n    probe_case.check()"), NONE_OF_8 + "its test was skipped (slow)"
    ),
    "skip after a failing check": with_test(
        BODY.format("try:\n        probe_case.check()\n    except AssertionError:\n        pytest.skip('known')"),
        SWALLOWED,
        fault="scale",
    ),
    "check never called": with_test(BODY.format("pass"), "*never called probe_case.check(), so nothing was compared*"),
    "check replaced": with_test(
        BODY.format("probe_case.check = lambda: None\n    probe_case.check()"), "*never called probe_case.check()*"
    ),
    "check in a branch": with_test(
        BODY.format("if 'layer_1' not in str(probe_case):\n        probe_case.check()"), "*never called*"
    ),
    "AssertionError swallowed": with_test(
        BODY.format("try:\n        probe_case.check()\n    except AssertionError:\n        pass"),
        SWALLOWED,
        fault="scale",
    ),
    "everything suppressed": with_test(
        BODY.format("with contextlib.suppress(BaseException):\n        probe_case.check()"), SWALLOWED, fault="nan"
    ),
    "failure expected by the test": with_test(
        BODY.format("with pytest.raises(AssertionError):\n        probe_case.check()"), SWALLOWED, fault="everywhere"
    ),
    "swallowed in a fixture": with_test(
        "def test_matches_baseline(compared):\n    pass\n", SWALLOWED, hooks=SWALLOWS_EARLY, fault="scale"
    ),
    "xfail, check never called": with_test(MARKED.format("xfail").replace(".check()", ""), "*never called*"),
    "xfail, fails before check": with_test(
        MARKED.format("xfail").replace("probe_case.check()", "raise OSError('no disk')\n    probe_case.check()"),
        NONE_OF_8 + "its test failed before the gate gave a verdict",
    ),
    "xfail in the body": with_test(
        BODY.format("pytest.xfail('later')\n    probe_case.check()"), NONE_OF_8 + "its test was skipped (later)"
    ),
    "own fixture in the conftest": with_hooks(OWN_FIXTURE, NONE_OF_8 + "its test ran without a verdict of the gate*"),
    "own fixture in the module": with_test(OWN_FIXTURE + "\n\n" + CHECKED, NONE_OF_8 + "its test ran without*"),
    "asynchronous test": with_test(ASYNCHRONOUS, NONE_OF_8 + "its test failed before the gate gave a verdict"),
    "unittest": with_test(UNITTEST, NONE_OF_8 + "test_gate.py gave no test test_matches_baseline that takes cases"),
    "class that is not collected": with_test(IN_A_CLASS.format("Gate"), NONE_OF_8 + "test_gate.py gave no test*"),
    "failure in a thread": with_test(IN_A_THREAD, "8 of 8 stored cases compared", fault="scale"),
    "failure in a subtest": with_test(IN_A_SUBTEST, "8 of 8 stored cases compared", fault="scale"),
    "one of two parameters swallows": with_test(
        PARAMETRIZED.format(
            True, "try:\n            probe_case.check()\n        except AssertionError:\n            return"
        ),
        SWALLOWED,
        fault="scale",
    ),
    # what is stored
    "baselines deleted": broken("0 of 0 stored cases compared; 8 cases have no baseline", deleted=("baselines",)),
    "baselines of a mode deleted": broken(
        "0 of 0 stored cases compared; 8 cases have no baseline", deleted=("baselines/network_make/cpu/coarse.json",)
    ),
    "other baselines": broken("* 8 cases have no baseline*", arguments=("--baselines-dir", "elsewhere")),
    "device no longer in the matrix": broken(
        "8 of 16 stored cases compared; 8 not compared: it is stored, but the matrix no longer has it",
        stored=("cuda",),
    ),
    "case no longer in the matrix": broken(
        "4 of 8 stored cases compared; 4 not compared: it is stored, but the matrix no longer has it",
        settings={"formats": '["int8"]'},
    ),
    "model that no test measures": broken(
        "8 of 16 stored cases compared; 8 not compared: no test measures forgotten*", stored=("forgotten",)
    ),
    "fault": broken("*coarse-layer_1-cpu-*", fault="scale"),
    "run ends at the first failure": broken(
        "* not compared: the run ended early (stopping after 1 failures)*",
        fault="everywhere",
        arguments=("-x",),
        ends_early=True,
    ),
    "run ends at the second failure": broken(
        "* not compared: the run ended early (*", fault="everywhere", arguments=("--maxfail=2",), ends_early=True
    ),
    "strict xfail that passes, -x": with_test(
        MARKED.format("xfail(strict=True)"),
        "* not compared: the run ended early (*",
        arguments=("-x",),
        ends_early=True,
    ),
    "--setup-only": broken(NONE_OF_8 + "the run ended early (--setup-only)", arguments=("--setup-only",)),
    "--setup-plan": broken(NONE_OF_8 + "the run ended early (--setup-plan)", arguments=("--setup-plan",)),
    "--pyargs": broken(
        NONE_OF_8 + "test_gate.py gave no test*",
        files={"test_gate.py": PLAIN},
        arguments=("--pyargs", "test_gate"),
    ),
    "old file named, test moved": broken(
        NONE_OF_8 + "test_gate.py gave no test*",
        files={"test_gate.py": PLAIN, "sub/test_gate.py": CHECKED},
        arguments=("--import-mode=importlib", "-o", "pythonpath=.", "test_gate.py"),
    ),
    "parent folder named, file deleted": broken(
        NONE_OF_8 + "*does not exist",
        files={**ELSEWHERE, "sub/test_other.py": PLAIN},
        folder="sub",
        arguments=("..",),
    ),
    "folder behind a link named, file deleted": broken(
        NONE_OF_8 + "*does not exist", files=ELSEWHERE, arguments=("{link}",)
    ),
    "doctests, file deleted": broken(NONE_OF_8 + "*does not exist", files=ELSEWHERE, arguments=("--doctest-modules",)),
    "--ignore of a folder that is named": broken(
        NONE_OF_8 + "test_gate.py gave no test*",
        files={"test_gate.py": PLAIN},
        arguments=("test_gate.py", "--ignore", "test_gate.py"),
    ),
    "update of nothing": broken(
        "*no case was measured, so no baseline was written*", files=ELSEWHERE, arguments=("--update-baselines",)
    ),
    # a person's decisions: green, and named
    "-k": named('4 of 8 stored cases compared; 4 left out by -k "int8"', "-k", "int8"),
    "-k that selects nothing of it": named(
        '0 of 8 stored cases compared; 8 left out by -k "plain"', "-k", "plain", files={"test_plain.py": PLAIN}
    ),
    "-m": named(
        '0 of 8 stored cases compared; 8 left out by -m "slow"',
        "-m",
        "slow",
        files={"test_plain.py": "import pytest\n\n\n@pytest.mark.slow\n" + PLAIN},
        hooks='def pytest_configure(config):\n    config.addinivalue_line("markers", "slow: slow")\n',
    ),
    "--deselect": named(
        "7 of 8 stored cases compared; 1 left out by --deselect test_gate.py::*",
        "--deselect",
        "test_gate.py::test_matches_baseline[coarse-layer_1-cpu-int8]",
    ),
    "--ignore": named(
        "0 of 8 stored cases compared; 8 left out by --ignore test_gate.py",
        "--ignore",
        "test_gate.py",
        files={"test_plain.py": PLAIN},
    ),
    "--ignore-glob": named(
        "0 of 8 stored cases compared; 8 left out by --ignore-glob *_gate.py",
        "--ignore-glob",
        "*_gate.py",
        files={"test_plain.py": PLAIN},
    ),
    "another file": named(
        "0 of 8 stored cases compared; 8 left out by test_plain.py", "test_plain.py", files={"test_plain.py": PLAIN}
    ),
    "another folder": named(
        "0 of 8 stored cases compared; 8 left out by other", "other", files={"other/test_plain.py": PLAIN}
    ),
    "one test by its id": named(
        "1 of 8 stored cases compared; 7 left out by 'test_gate.py::test_matches_baseline*",
        "test_gate.py::test_matches_baseline[coarse-layer_1-cpu-int8]",
    ),
    "--probe-formats": named(
        "4 of 8 stored cases compared; 4 left out by --probe-formats int8", "--probe-formats", "int8"
    ),
    "--probe-layers": named("4 of 8 stored cases compared; 4 left out by --probe-layers 1", "--probe-layers", "1"),
    "device that is not present": named(
        "8 of 16 stored cases compared; 8 left out because device cuda is not present",
        settings={"devices": '["cpu", "cuda"]'},
        stored=("cuda",),
    ),
    "xfail of a failing case": WrongPass(
        ("8 of 8 stored cases compared, 4 of them expected to fail (xfail)",),
        files={"test_gate.py": MARKED.format("xfail(reason='known')")},
        fault="scale",
        exit_status=0,
    ),
    "xfail(run=False)": WrongPass(
        ("0 of 8 stored cases compared; 8 left out by xfail(run=False)",),
        files={"test_gate.py": MARKED.format("xfail(run=False)")},
        exit_status=0,
    ),
    "xfail without baselines": WrongPass(
        ("0 of 0 stored cases compared; 8 cases have no baseline",),
        files={"test_gate.py": MARKED.format("xfail")},
        deleted=("baselines",),
        exit_status=0,
    ),
    "-k in addopts": named(
        '4 of 8 stored cases compared; 4 left out by -k "int8"', files={"pytest.ini": "[pytest]\naddopts = -k int8\n"}
    ),
    "--pyargs of another module": named(
        "0 of 8 stored cases compared; 8 left out by test_plain",
        *("--pyargs", "test_plain"),
        files={"test_plain.py": PLAIN},
    ),
    "run in another folder": named(
        "0 of 8 stored cases compared; 8 left out by running in sub", files={"sub/test_plain.py": PLAIN}, folder="sub"
    ),
    "file deleted, other baselines": named(
        "0 of 8 stored cases compared; 8 left out by --baselines-dir elsewhere",
        *("--baselines-dir", "elsewhere"),
        files=ELSEWHERE,
    ),
    # all compared, in unusual ways
    "one of two parameters skips": named(
        "8 of 8 stored cases compared",
        files={"test_gate.py": PARAMETRIZED.format(True, "pytest.skip('once is enough')")},
    ),
    "the other of two parameters skips": named(
        "8 of 8 stored cases compared",
        files={"test_gate.py": PARAMETRIZED.format(False, "pytest.skip('once is enough')")},
    ),
    "test in a class": named("8 of 8 stored cases compared", files={"test_gate.py": IN_A_CLASS.format("TestGate")}),
    "test in a subtest": named("8 of 8 stored cases compared", files={"test_gate.py": IN_A_SUBTEST}),
    "test moved": named(
        "8 of 8 stored cases compared",
        *("--import-mode=importlib", "-o", "pythonpath=."),
        files={"test_gate.py": PLAIN, "sub/test_gate.py": CHECKED},
    ),
    "parent folder named": named(
        "8 of 8 stored cases compared", "..", files={"sub/test_other.py": PLAIN}, folder="sub"
    ),
    "folder behind a link named": named("8 of 8 stored cases compared", "{link}"),
    "doctests": named("8 of 8 stored cases compared", "--doctest-modules"),
    "warnings as errors": named(
        "8 of 8 stored cases compared", *("-W", "error", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    ),
    "all compared": named("8 of 8 stored cases compared"),
}
