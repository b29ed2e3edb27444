"""Which cases run: follows each from pytest's collection to its selection, and knows how the command line left it out.

Paths, --ignore and --lf leave files out before they are collected; -k, -m and others deselect tests. The words for it
follow "left out": `by -k "mode_2_1"`.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from probe.gate.accounting import Stage
from probe.gate.cases import Case
from probe.gate.session import Session
from probe.words import first_few

#: The fixtures that give a case, and the marker of each.
FIXTURES = {"probe_case": "probe", "probe_scaling": "probe_scaling", "probe_activations": "probe_activations"}
#: The parameter of a test for which the options leave no case.
LEFT_OUT = "left out"
#: Who calls pytest_deselected: the module and the function of pytest, and the option that they implement.
DESELECTING = {
    ("_pytest.mark", "deselect_by_keyword"): "-k",
    ("_pytest.mark", "deselect_by_mark"): "-m",
    ("_pytest.main", "pytest_collection_modifyitems"): "--deselect",
    ("_pytest.cacheprovider", "pytest_collection_modifyitems"): "--lf",
    ("_pytest.stepwise", "pytest_collection_modifyitems"): "--sw",
}
#: The option that has the value to show.
VALUES = {"-k": "keyword", "-m": "markexpr", "--deselect": "deselect"}
#: What pytest registers as soon as --lf leaves out files and tests that did not fail.
LF_IS_ACTIVE = "lfplugin-collskip"


def request_of(item: pytest.Item) -> Any:
    """The CaseRequest of a test, LEFT_OUT, or None for any other test."""
    callspec = getattr(item, "callspec", None)
    return next((callspec.params[name] for name in FIXTURES if name in callspec.params), None) if callspec else None


def plain_nodeid(nodeid: str) -> str:
    """The nodeid without the group that xdist's loadgroup appends."""
    head, bracket, _ = nodeid.rpartition("]@")
    return f"{head}]" if bracket else nodeid


class CaseFollower:
    """Hooks that follow every case until its test runs."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        self.config = config
        self.session = session

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Pytest made a test of the case."""
        self._advance(item, Stage.COLLECTED)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """An option of pytest took the test out again, or something that is no option."""
        option = deselecting_option(self.config)
        for item in items:
            self._advance(item, Stage.DESELECTED if option else Stage.REMOVED, f"by {option}" if option else "")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The test is left after -k, -m, --deselect and paths."""
        for item in session.items:
            self._advance(item, Stage.SELECTED)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember why a file was not collected, such as an importorskip, and that --lf filtered it."""
        if report.skipped:
            self.session.uncollected[report.nodeid] = skip_reason(report)
        elif self.config.pluginmanager.hasplugin(LF_IS_ACTIVE):
            self.session.filtered.add(report.nodeid)

    def _advance(self, item: pytest.Item, stage: Stage, why: str = "") -> None:
        request = request_of(item)
        if request not in (None, LEFT_OUT):
            self.session.advance(request, stage, why=why)


def skip_reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why a file or a test was skipped."""
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")


def deselecting_option(config: pytest.Config) -> str:
    """The option for which pytest deselects tests right now; empty if anything else does, such as a conftest.

    The hook does not say who calls it, so the callers are looked at.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame).partition(".")[0] in ("probe", "pluggy"):
        frame = frame.f_back
    option = DESELECTING.get((_module(frame), frame.f_code.co_name)) if frame else None
    if option is None:
        return ""
    if option == "--sw" and config.getoption("stepwise_skip"):
        return "--sw-skip"
    return _typed(option, config.getoption(VALUES[option]) if option in VALUES else None)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _typed(option: str, value: str | list[str] | None) -> str:
    if isinstance(value, list):
        return f"{option} {first_few(value, ' ', most=2)}"
    return f'{option} "{value}"' if value else option


class CommandLine:
    """What the command line says about tests that pytest does not collect."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        self.config = config
        self.session = session
        self.root = config.rootpath
        self.folder = config.invocation_params.dir
        self.named = (
            [] if config.args_source is pytest.Config.ArgsSource.TESTPATHS else [str(one) for one in config.args]
        )
        self.failed_before: set[str] = set(config.cache.get("cache/lastfailed", {}) if self._option("lf") else ())

    def left_out(self, test: str, case: Case) -> str:
        """How it leaves out a case of `file::function`; empty if it does not. Of an unknown test: how it leaves any."""
        if not test:
            return self._narrowed()
        file = self.root / test.partition("::")[0]
        covering = [_path_of(name, self.folder) for name in self.named if self._covers(name, file, test)]
        if self.named and not covering:
            return self._named()
        return self._ignored(file, covering) or self._passed_before(test, case)

    def _option(self, name: str) -> Any:
        return self.config.getoption(name, None)

    def _narrowed(self) -> str:
        """How the command line leaves out any test."""
        others = [name for name in self.named if _lexical(name, self.folder) != self.root]
        ignored = [f"--{name.replace('_', '-')}" for name in ("ignore", "ignore_glob") if self._option(name)]
        reasons = [self._named() if others else "", *(f"by {name}" for name in ignored)]
        return next(filter(None, [*reasons, "by --lf" if self.session.filtered else ""]), "")

    def _named(self) -> str:
        if self.config.args_source is pytest.Config.ArgsSource.INVOCATION_DIR:
            return f"by running in {os.path.relpath(self.folder, self.root)}"
        return f"by {first_few([shlex.quote(_relative(name, self.folder)) for name in self.named], ' ', most=3)}"

    def _covers(self, name: str, file: Path, test: str) -> bool:
        """Whether an argument names a test, its file or a folder that it is in, as it is written or behind links."""
        function = name.partition("::")[2]
        path = self._module(name) or _path_of(name, self.folder)
        if not (file.is_relative_to(path) or file.resolve().is_relative_to(path.resolve())):
            return False
        wanted, there = function.partition("[")[0].split("::"), test.split("::")[1:]
        return not function or ("[" not in function and there[: len(wanted)] == wanted)

    def _module(self, name: str) -> Path | None:
        """The file or folder of a module that --pyargs names; the root if it cannot be found from here."""
        dotted = name.partition("::")[0]
        if not self._option("pyargs") or _path_of(name, self.folder).exists():
            return None
        try:
            found = importlib.util.find_spec(dotted)
        except (ImportError, ValueError, AttributeError):
            found = None
        places = [*(found.submodule_search_locations or ()), found.origin] if found else []
        return next((Path(place) for place in places if place), self.root)

    def _ignored(self, file: Path, covering: Sequence[Path]) -> str:
        """Which --ignore leaves out a file; an argument that lies in what is ignored is collected nevertheless."""
        paths = (file, *file.parents)
        starts = covering or [self.root]
        inner = [path for path in paths if any(path != start and path.is_relative_to(start) for start in starts)]
        for ignored in self._option("ignore") or ():
            if _lexical(ignored, self.folder) in inner:
                return f"by --ignore {ignored}"
        for pattern in self._option("ignore_glob") or ():
            if any(fnmatch(str(path), str(self.folder / pattern)) for path in inner):
                return f"by --ignore-glob {pattern}"
        return ""

    def _passed_before(self, test: str, case: Case) -> str:
        """Whether --lf leaves out the case: it is at work in this file, and neither the case nor the file failed."""
        parts = test.split("::")
        above = {"::".join(parts[:end]) for end in range(1, len(parts) + 1)}
        has_failed = above & self.failed_before or any(
            nodeid.startswith(f"{test}[") and str(case) in nodeid for nodeid in self.failed_before
        )
        return "by --lf" if parts[0] in self.session.filtered and not has_failed else ""


def _lexical(path: str, folder: Path) -> Path:
    """As pytest does: relative to the folder that it was called in, links not followed."""
    return Path(os.path.abspath(folder / path))


def _path_of(name: str, folder: Path) -> Path:
    return _lexical(name.partition("::")[0], folder)


def _relative(name: str, folder: Path) -> str:
    return str(Path(name).relative_to(folder)) if name.startswith(f"{folder}/") else name
