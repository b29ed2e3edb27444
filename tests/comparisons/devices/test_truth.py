"""The verdict of `diff` beside the truth: sound devices, planted faults and mismatched captures, all generated.

Thresholds were chosen while looking at the seeds in TUNED; the test is on others, which means other prompts, other
layers and other variants of every fault.
"""

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.comparisons.devices import cases
from tests.comparisons.devices.cases import Case, Shelf, all_cases

TUNED, TESTED = (0, 1, 2), (3,)
RIGHT = 0.95

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def table(counts: Counter[tuple[str, str]]) -> str:
    kinds = (cases.IDENTICAL, cases.NOISE, cases.FAULT, cases.MISMATCH)
    lines = [f"{'truth':20}" + "".join(f"{kind:>20}" for kind in kinds)]
    lines += [f"{truth:20}" + "".join(f"{counts[truth, kind]:20}" for kind in kinds) for truth in kinds]
    return "\n".join(lines)


def test_at_least_95_percent_of_the_verdicts_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody pulls the plug here
    shelf, counts, wrong = Shelf(tmp_path), Counter[tuple[str, str]](), []
    causes: list[tuple[Case, str]] = []
    total = 0
    kinds: dict[str, list[bool]] = {}
    for case in all_cases(list(TESTED)):
        verdict, truth = case.judged(shelf).verdict, case.expected()
        counts[truth, verdict.kind] += 1
        total += 1
        right = verdict.kind == truth and case.layer in (None, verdict.layer)
        kinds.setdefault(case.what, []).append(right)
        if not right:
            wrong.append(f"{case.name}: {truth} from {case.layer}, told {verdict.kind} from {verdict.layer}")
        elif case.says:
            causes.append((case, verdict.cause))
    told = [case for case, cause in causes if case.says in cause]
    with capsys.disabled():
        print(f"\n{table(counts)}\n{total - len(wrong)} of {total} right; {len(told)} of {len(causes)} causes named")
        print("\n".join(wrong))
    assert total >= 140
    assert min(counts[kind, kind] for kind in (cases.NOISE, cases.FAULT, cases.MISMATCH)) >= 15
    assert len(wrong) <= (1 - RIGHT) * total
    assert [what for what, right in kinds.items() if 2 * sum(right) < len(right)] == []  # no kind is missed as a whole
    assert len(told) >= 0.9 * len(causes)


def test_the_tested_cases_are_not_those_that_thresholds_were_chosen_on() -> None:
    assert not set(TUNED) & set(TESTED)
