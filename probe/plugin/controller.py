"""The process that writes: gathers outcomes, and at the end stores updates, accounts for all stored cases and reports.

A serial run has only this process; under xdist it is the controller, which receives the reports of the workers.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from probe.gate.accounting import OBSOLETE
from probe.plugin.selection import CommandLine, plain_nodeid
from probe.words import shared_lines

if TYPE_CHECKING:
    from probe.gate.cases import Outcome
    from probe.gate.session import Session

#: Exit statuses that a run with problems must not have.
GREEN = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
#: Exit statuses of a run that did not reach its end, and why.
ENDED_EARLY: dict[int, str] = {
    pytest.ExitCode.INTERRUPTED: "interrupted",
    pytest.ExitCode.INTERNAL_ERROR: "pytest had an internal error",
}
#: Options with which pytest shows something and is not asked to run tests.
SHOWS_ONLY = ("collectonly", "showfixtures", "show_fixtures_per_test", "cacheshow")
#: What pytest-html shows of a test that printed nothing.
NO_LOG = "No log output captured."
#: Options with which no test is called.
SETUP_ONLY = {"setupplan": "--setup-plan", "setuponly": "--setup-only"}


class Controller:
    """Hooks of the process that writes."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        self.config = config
        self.session = session
        self.written: list[str] = []
        self._command_line = CommandLine(config, session)
        self._finished = False
        self._shown = False
        self._interrupt = ""
        self._html: Any = None
        self._file_title = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the outcome of a case to the session."""
        given = getattr(report, "probe", None)
        if given is None:
            if report.failed:
                self.session.crashes[plain_nodeid(report.nodeid)] = _how_it_ended(report)
            return
        from probe.gate.baselines.format import Entry
        from probe.gate.cases import Outcome

        stored = given["entry"] and Entry.from_dict(given["entry"])
        self.session.add_outcome(Outcome.from_dict(given["outcome"]), stored, given["refusal"])

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Remember why the run ended: Ctrl-C, or pytest.exit() somewhere."""
        self._interrupt = str(excinfo.value) or "interrupted"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write an update, account for every stored case, and write the summaries; each may fail the run."""
        self._conclude(session)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """The last word: the gate's verdict is the exit status, whatever the hooks of a conftest did about it."""
        session = config.pluginmanager.get_plugin("session")
        if session is None:
            return
        self._conclude(session)
        if self._finished and self._is_failed and session.exitstatus in GREEN:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            self._show(f"probe: something set the exit status to 0 though {self._is_failed}; it is 1.")
        if not self._shown:
            self._show(*filter(None, [self.session.account.line, *self.session.problems]))

    def _conclude(self, session: pytest.Session) -> None:
        runs_nothing = any(self.config.getoption(name, None) for name in SHOWS_ONLY)
        if self._finished or runs_nothing or session.exitstatus == pytest.ExitCode.USAGE_ERROR:
            return
        self._finished = True
        ours = self.session
        if session.items:
            ours.close()
        ours.finish(left_out=self._command_line.left_out, stopped=self._interrupt or _stopped(session))
        if session.exitstatus == pytest.ExitCode.OK:
            ours.problems += _ignored_failures(ours.ordered())
        self._fail_on_problems(session)
        if ours.outcomes or ours.account.fates:
            self._write_summaries(int(session.exitstatus))
        self._fail_on_problems(session)

    @property
    def _is_failed(self) -> str:
        """Why the run fails, as far as the gate is concerned; empty if it does not."""
        problems, failed = self.session.problems, _failures(self.session.ordered())
        return f"{len(failed)} cases fail" if failed else problems[0] if problems else ""

    def _show(self, *lines: str) -> None:
        """Print after pytest's own summary, or without one."""
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        for line in lines:
            reporter.write_line(line) if reporter else print(line, file=sys.stderr)

    def _fail_on_problems(self, session: pytest.Session) -> None:
        if self.session.problems and session.exitstatus in GREEN:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _write_summaries(self, exit_status: int) -> None:
        folder = self._output()
        if folder is None:
            return
        from probe.files.atomic import write
        from probe.report.gate.summary import markdown, summary

        facts = {**self._facts(), "account": self.session.account}
        try:
            text = json.dumps(summary(self.session.ordered(), **facts, exit_status=exit_status), indent=1)
            self.written.append(str(write(folder / "summary.json", text + "\n")))
            page = markdown(self.session.ordered(), **facts, exit_status=exit_status)
            self.written.append(str(write(folder / "summary.md", page)))
        except OSError as problem:
            self.session.problems.append(f"the summary could not be written: {problem}")

    def _output(self) -> Path | None:
        given, report = self.config.getoption("--probe-output"), self.config.getoption("htmlpath", None)
        if given:
            return Path(given)
        return Path(report).parent if report else None

    def _facts(self) -> dict[str, Any]:
        from probe.running.environment import comparable, environment

        models = self.session.models.values()
        settings = next((known.settings for known in models), self.session.settings)
        try:
            stored = self.session.store(settings).environment(settings.model)
        except ValueError:
            stored = None
        return {"environment": comparable(environment()), "baseline_environment": stored and comparable(stored)}

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_html_report_title(self, report: Any) -> None:
        """Remember the report: its title, so far the name of its file, is known when all cases are judged."""
        self._html, self._file_title = report, report.title

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_summary(self, prefix: list[str]) -> None:
        """The front of the HTML report, and its title unless a conftest gave one."""
        if self._finished and (self.session.outcomes or self.session.account.fates):
            from probe.report.gate.page import front, title

            outcomes = self.session.ordered()
            prefix.append(front(outcomes, **self._facts(), account=self.session.account))
            if self._html is not None and self._html.title == self._file_title:
                self._html.title = title(outcomes, problems=len(self.session.problems))

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_html(self, report: Any, data: list[str]) -> None:
        """Remove pytest-html's remark that a test printed nothing."""
        if hasattr(report, "probe") and data == [NO_LOG]:
            data.clear()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What was looked at, counts, what is wrong, what an update changed, where the reports are."""
        ours = self.session
        write = terminalreporter.write_line
        self._shown = self._finished
        if not ours.outcomes and ours.options.update and not self.config.getoption("collectonly"):
            write("probe: no case was measured, so no baseline was written.", red=True)
        if not (ours.outcomes or ours.account.fates or ours.problems):
            return
        terminalreporter.section("probe")
        if ours.account.line:
            write(ours.account.line)
        for line in _counts(self.session.ordered()):
            write(line)
        for line in ours.update_lines:
            write(line)
        most = 20
        for line in ours.problems[:most]:
            write(line, red=True)
        if len(ours.problems) > most:
            write(f"and {len(ours.problems) - most} more", red=True)
        if any(one.startswith(OBSOLETE) for one in ours.problems):
            write("Obsolete cases are dropped by: pytest --update-baselines   (all cases: no -k, no files named)")
        for line in self.written:
            write(f"wrote {line}")


def _counts(outcomes: list[Outcome]) -> list[str]:
    """For each model and device: recipes, cases, how many of each verdict, and how much is on a grid."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.model, one.case.device), []).append(one)
    lines = []
    for (model, device), members in sorted(groups.items()):
        kinds = Counter(one.verdict or "failed" if one.status == "failed" else one.status for one in members)
        recipes = {one.case.recipe for one in members}
        failing = {one.case.recipe for one in members if one.status == "failed"}
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=str))
        lines.append(
            f"{model} on {device}: {len(members)} cases: {counts}; {len(failing)} of {len(recipes)} recipes fail"
        )
        lines += shared_lines((one.case.recipe, one.weights) for one in members if one.weights)
        lines += sorted({one.not_run for one in members if one.not_run})
    return lines


def _stopped(session: pytest.Session) -> str:
    """Why the run ended before its end: -x, --maxfail, an interrupt, a fault; empty if it did not."""
    status = ENDED_EARLY.get(int(session.exitstatus), "")
    only_setup = next((option for name, option in SETUP_ONLY.items() if session.config.getoption(name, False)), "")
    return str(session.shouldfail or session.shouldstop or status or only_setup)


def _how_it_ended(report: pytest.TestReport) -> str:
    """Of a failed test without an outcome: its process crashed, or it failed in a fixture."""
    if report.when in ("setup", "call", "teardown"):
        return "its test failed before the gate gave a verdict"
    return f"its test crashed ({str(report.longrepr).strip().partition(' while running ')[0]})"


def _failures(outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes that must fail the run."""
    return [one for one in outcomes if one.status == "failed" and one.verdict != "obsolete" and not one.is_expected]


def _ignored_failures(outcomes: list[Outcome]) -> list[str]:
    """Failing verdicts in a run whose tests all passed: something changed the reports of these tests."""
    failed = _failures(outcomes)
    first = f"{failed[0].case}: {failed[0].message}" if failed else ""
    return [f"{len(failed)} cases failed though their tests did not: {first}"] if failed else []
