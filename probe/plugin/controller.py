"""The process that writes: gathers outcomes, and at the end finds obsolete baselines, stores updates and reports.

A serial run has only this process; under xdist it is the controller, which receives the reports of the workers.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from probe.gate.cases import Outcome
    from probe.gate.session import Session


class Controller:
    """Hooks of the process that writes."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        self.config = config
        self.session = session
        self.written: list[str] = []
        self._finished = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the outcome of a case to the session."""
        given = getattr(report, "probe", None)
        if given is None:
            return
        from probe.gate.baselines.format import Entry
        from probe.gate.cases import Outcome

        stored = given["entry"] and Entry.from_dict(given["entry"])
        self.session.add_outcome(Outcome.from_dict(given["outcome"]), stored, given["refusal"])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Find obsolete baselines and write an update; either may fail the run."""
        self._finished = True
        ours = self.session
        if not ours.outcomes:
            return
        if not getattr(session.config, "workerinput", None) and session.items:
            ours.close()
        ours.finish(
            tests_left_out=_tests_left_out(self.config),
            folders_left_out=_folders_left_out(self.config),
            stopped=_stopped(session),
        )
        self._fail_on_problems(session)
        self._write_summaries(int(session.exitstatus))
        self._fail_on_problems(session)

    def _fail_on_problems(self, session: pytest.Session) -> None:
        if self.session.problems and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _write_summaries(self, exit_status: int) -> None:
        folder = self._output()
        if folder is None:
            return
        from probe.files.atomic import write
        from probe.report.gate.summary import markdown, summary

        facts = self._facts()
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

        settings = next(known.settings for known in self.session.models.values())
        try:
            stored = self.session.store(settings).environment(settings.model)
        except ValueError:
            stored = None
        return {"environment": comparable(environment()), "baseline_environment": stored and comparable(stored)}

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_summary(self, prefix: list[str]) -> None:
        """The front of the HTML report."""
        if self._finished and self.session.outcomes:
            from probe.report.gate.page import front

            prefix.append(front(self.session.ordered(), **self._facts()))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Counts, what is obsolete, what an update changed, where the reports are."""
        ours = self.session
        write = terminalreporter.write_line
        if not ours.outcomes:
            if ours.options.update and not self.config.getoption("collectonly"):
                write("probe: no case was measured, so no baseline was written.", red=True)
            return
        terminalreporter.section("probe")
        for line in _counts(self.session.ordered()):
            write(line)
        for line in ours.update_lines:
            write(line)
        most = 20
        for line in ours.problems[:most]:
            write(line, red=True)
        if len(ours.problems) > most:
            write(f"and {len(ours.problems) - most} more", red=True)
        if any(one.startswith("obsolete: ") for one in ours.problems):
            write("Obsolete cases are dropped by: pytest --update-baselines   (all cases: no -k, no files named)")
        for line in self.written:
            write(f"wrote {line}")


def _counts(outcomes: list[Outcome]) -> list[str]:
    """A line for each model and device: recipes, cases, and how many of each verdict."""
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
    return lines


def _stopped(session: pytest.Session) -> str:
    """Why the run ended before its end: -x, --maxfail, an interrupt; empty if it did not."""
    interrupted = "interrupted" if session.exitstatus == pytest.ExitCode.INTERRUPTED else ""
    return str(session.shouldfail or session.shouldstop or interrupted)


def _tests_left_out(config: pytest.Config) -> bool:
    """Whether the command line names files or tests, or leaves some out: then the matrices of others are not known."""
    named = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    folders = all((config.invocation_params.dir / name).is_dir() for name in named)
    return not folders or any(config.getoption(name, None) for name in ("lf", "ignore", "ignore_glob"))


def _folders_left_out(config: pytest.Config) -> bool:
    """Whether the command line names anything at all, or narrows: then other models may have tests elsewhere."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    return named or any(config.getoption(name, None) for name in ("keyword", "markexpr", "deselect", "lf", "ignore"))
