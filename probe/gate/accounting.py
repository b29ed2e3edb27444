"""What a run looked at: every stored case was compared, left out on purpose, or not compared, which fails the run.

    370 of 370 stored cases compared
    40 of 370 stored cases compared; 330 left out by -k "mode_2_1"
    330 of 370 stored cases compared; 40 not compared: tests/test_gate.py does not exist

A case is followed from the matrix to its outcome; `Stage` says how far it came before the tests ran.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from probe.gate.cases import Case, Outcome
from probe.gate.configuration import Settings
from probe.words import first_few

Kind = Literal["compared", "left out", "not compared"]
#: How the command line leaves out a case of a test, `file::function`, in words that follow "left out"; empty if it
#: does not. The empty name stands for a test that is not known.
LeftOut = Callable[[str, Case], str]
OBSOLETE = "obsolete: "  # how the line of such a case starts
NO_VERDICT = "its test ran without a verdict of the gate (is there another fixture of the same name?)"
NO_TEST = "pytest made no test of it"


class Stage(IntEnum):
    """How far a case came. Of two tests that have the same case, the one that came further counts."""

    CONFIGURED = 0  # it belongs to the matrix of a test
    GENERATED = 1  # the options of the command line keep it
    COLLECTED = 2  # pytest made a test of it
    DESELECTED = 3  # an option, which `why` names, took the test out again
    REMOVED = 4  # something that is no option took it out: a conftest, another plugin
    SELECTED = 5  # it is going to run


@dataclass
class Progress:
    """A case of the matrix: the tests that have it, and how far it came."""

    tests: tuple[str, ...] = ()
    stage: Stage = Stage.CONFIGURED
    why: str = ""
    is_configured: bool = False  # whether it belongs to the matrix without any option

    def advance(self, stage: Stage, why: str = "") -> None:
        """It came to `stage`, or further before."""
        if stage >= self.stage:
            self.stage, self.why = stage, why

    def merge(self, other: "Progress") -> None:
        """Add what another process or another test knows."""
        self.tests = tuple(dict.fromkeys([*self.tests, *other.tests]))
        self.is_configured = self.is_configured or other.is_configured
        self.advance(other.stage, other.why)

    def as_row(self) -> list[Any]:
        """As plain values, for execnet."""
        return [list(self.tests), int(self.stage), self.why, self.is_configured]

    @classmethod
    def from_row(cls, row: list[Any]) -> "Progress":
        """The inverse of as_row."""
        tests, stage, why, is_configured = row
        return cls(tuple(tests), Stage(stage), why, is_configured)


@dataclass
class ModelCases:
    """The cases of a model in one process, how far each came, and what an update needs."""

    settings: Settings
    cases: dict[Case, Progress] = field(default_factory=dict)  # in the order of the matrix
    facts: dict[str, str] = field(default_factory=dict)
    anchors: list[bytes] = field(default_factory=list)  # tests with other layers have their own
    moved: str = ""  # where the float reference is not the golden one

    @property
    def matrix(self) -> list[Case]:
        """The cases as configured, whatever the options say."""
        return [case for case, progress in self.cases.items() if progress.is_configured]

    @property
    def selected(self) -> set[Case]:
        """The cases that run."""
        return {case for case, progress in self.cases.items() if progress.stage is Stage.SELECTED}

    def configure(self, cases: Iterable[Case], test: str) -> None:
        """These cases belong to the matrix of a test."""
        for case in cases:
            self.cases.setdefault(case, Progress()).merge(Progress((test,), is_configured=True))

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for execnet."""
        cases = [[list(vars(case).values()), progress.as_row()] for case, progress in self.cases.items()]
        rest = {"facts": self.facts, "anchors": self.anchors, "moved": self.moved}
        return {"settings": asdict(self.settings), "cases": cases, **rest}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "ModelCases":
        """The inverse of as_dict."""
        cases = {Case(*names): Progress.from_row(row) for names, row in given["cases"]}
        facts, anchors = dict(given["facts"]), list(given["anchors"])
        return cls(Settings.from_dict(given["settings"]), cases, facts, anchors, given["moved"])


class Fate(NamedTuple):
    """What became of a stored case, and why it was not compared."""

    kind: Kind
    why: str = ""
    is_obsolete: bool = False  # no test that ran has it any more
    is_expected: bool = False  # it failed, as its xfail mark says


@dataclass(frozen=True)
class Account:
    """The stored cases of a run, counted; and those that ran without a baseline."""

    fates: Mapping[tuple[str, Case], Fate] = field(default_factory=dict)
    missing: int = 0
    is_update: bool = False  # the baselines were made anew, so that nothing was compared with them

    def count(self, kind: Kind) -> int:
        """How many cases have this fate."""
        return sum(fate.kind == kind for fate in self.fates.values())

    def reasons(self, kind: Kind) -> dict[str, int]:
        """The reasons of this fate, the most frequent first."""
        return dict(Counter(fate.why for fate in self.fates.values() if fate.kind == kind).most_common())

    @property
    def line(self) -> str:
        """The one line that says what was looked at; empty where nothing is stored and no case ran."""
        if not self.fates and not self.missing:
            return ""
        done = "measured for the update" if self.is_update else "compared"
        text = f"{self.count('compared')} of {len(self.fates)} stored cases {done}"
        if expected := sum(fate.is_expected for fate in self.fates.values()):
            text += f", {expected} of them expected to fail (xfail)"
        text += "".join(f"; {count} left out {why}" for why, count in self.reasons("left out").items())
        parts = [f"; {count} not compared: {why}" for why, count in self.reasons("not compared").items()]
        text += (
            f"; {self.missing} {'cases have' if self.missing > 1 else 'case has'} no baseline" if self.missing else ""
        )
        return text + first_few(parts, "", most=3)

    @property
    def problems(self) -> list[str]:
        """A line for each obsolete case, and for each reason why others were not compared."""
        lines: list[str] = []
        groups: dict[tuple[str, str], list[Case]] = {}
        for (model, case), fate in self.fates.items():
            if fate.is_obsolete:
                lines.append(f"{OBSOLETE}{case} of {model}: {fate.why}.")  # one by one: an update drops them
            elif fate.kind == "not compared":
                groups.setdefault((model, fate.why), []).append(case)
        for (model, why), cases in groups.items():
            count = f"{cases[0]} of {model}" if len(cases) == 1 else f"{len(cases)} cases of {model}, {cases[0]} first"
            lines.append(f"not compared: {count}: {why}.")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For summary.json."""
        kinds: tuple[Kind, ...] = ("left out", "not compared")
        return {
            "line": self.line,
            "stored": len(self.fates),
            "compared": self.count("compared"),
            "missing": self.missing,
            "expected_to_fail": sum(fate.is_expected for fate in self.fates.values()),
            **{kind.replace(" ", "_"): self.reasons(kind) for kind in kinds},
        }


NOTHING_STORED = Account()


@dataclass(frozen=True)
class Run:
    """What is known at the end of a run."""

    root: Path
    models: Mapping[str, ModelCases]
    outcomes: Mapping[tuple[str, Case], Outcome]
    options: str  # those that narrow the matrix, as they were typed
    uncollected: Mapping[str, str]  # by file: why pytest collected nothing from it
    left_out: LeftOut
    stopped: str = ""  # why the run ended early
    crashes: Mapping[str, str] = field(default_factory=dict)  # by nodeid: how a test ended that has no outcome

    def account(
        self, stored: Mapping[tuple[str, Case], tuple[str, ...]], aside: Mapping[tuple[str, Case], str]
    ) -> Account:
        """What became of every stored case; `stored` has the tests of each, `aside` why others are left out."""
        fates = {key: Fate("left out", why) for key, why in aside.items() if key not in self.outcomes}
        fates |= {(model, case): self._fate(model, case, tests) for (model, case), tests in stored.items()}
        missing = sum(one.status == "failed" and one.verdict == "missing" for one in self.outcomes.values())
        return Account(fates, missing, is_update=any(one.status == "updated" for one in self.outcomes.values()))

    def _fate(self, model: str, case: Case, tests: tuple[str, ...]) -> Fate:
        outcome, known = self.outcomes.get((model, case)), self.models.get(model)
        if outcome is not None:
            return _fate_of_outcome(outcome)
        progress = known.cases.get(case) if known else None
        if progress is None:
            return self._fate_of_unknown(model, case, tests)
        if progress.stage is Stage.CONFIGURED:
            return Fate("left out", f"by {self.options}") if self.options else Fate("not compared", NO_TEST)
        if progress.stage is Stage.GENERATED:
            why = self._left_out_by_all(progress.tests, case)
            return Fate("left out", why) if why else Fate("not compared", NO_TEST)
        if progress.stage is Stage.DESELECTED:
            return Fate("left out", progress.why)
        if progress.stage is Stage.SELECTED:
            return Fate("not compared", self._crash(progress.tests, case) or self._early() or NO_VERDICT)
        return Fate("not compared", progress.why or "a conftest or a plugin took its test out of the run")

    def _early(self) -> str:
        return f"the run ended early ({self.stopped})" if self.stopped else ""

    def _crash(self, tests: Iterable[str], case: Case) -> str:
        starts = tuple(f"{test}[" for test in tests)
        found = (why for nodeid, why in self.crashes.items() if nodeid.startswith(starts) and str(case) in nodeid)
        return next(found, "")

    def _left_out_by_all(self, tests: Iterable[str], case: Case) -> str:
        """How the command line leaves out a case; empty if it leaves one of its tests in."""
        reasons = [self.left_out(test, case) for test in tests]
        return reasons[0] if reasons and all(reasons) else ""

    def _fate_of_unknown(self, model: str, case: Case, tests: tuple[str, ...]) -> Fate:
        """A stored case that is in no matrix; baselines of earlier versions do not say which test had it."""
        why = self._left_out_by_all(tests or ("",), case)
        if why:
            return Fate("left out", why)
        if model not in self.models and "--probe-model " in self.options:
            return Fate("left out", f"by {self.options}")
        gone = [test for test in tests if test not in self._tests]
        if self.stopped:
            return Fate("not compared", self._early())
        if gone:
            return Fate("not compared", self._why_gone(gone[0]))
        if model in self.models:
            return Fate("not compared", "it is stored, but the matrix no longer has it", is_obsolete=True)
        return Fate("not compared", f"no test measures {model}; delete its baselines, or add a test for it")

    @cached_property
    def _tests(self) -> set[str]:
        return {test for known in self.models.values() for progress in known.cases.values() for test in progress.tests}

    def _why_gone(self, test: str) -> str:
        file, _, name = test.partition("::")
        if not (self.root / file).exists():
            return f"its test was in {file}, which does not exist"
        if file in self.uncollected:
            return f"{file} was not collected ({self.uncollected[file]})"
        return f"{file} gave no test {name} that takes cases"


def _fate_of_outcome(outcome: Outcome) -> Fate:
    from probe.running.environment import is_present

    if outcome.is_compared:
        return Fate("compared", is_expected=outcome.is_expected)
    if outcome.status != "skipped":
        return Fate("not compared", "its test failed before the gate gave a verdict")
    if outcome.is_expected:
        return Fate("left out", "by xfail(run=False)")
    if not is_present(outcome.case.device):
        return Fate("left out", f"because device {outcome.case.device} is not present")
    return Fate("not compared", f"its test was skipped ({outcome.message})")
