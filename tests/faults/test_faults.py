"""What the gate is worth: every injected fault is caught in its layer and named, and no harmless change is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.faults import user_faults
from tests.faults.bench import SmallGate, settings_of
from tests.faults.catalogue import UNCOVERED, UNKNOWN, AnyFault
from tests.faults.groups import FAULTS, RECIPES
from tests.faults.harmless import HARMLESS, Harmless
from tests.faults.results import is_sentence

#: On these the harmless changes are tried: a static and a float recipe, and another model.
TRIED = (("tiny-mamba", "mode_2_1-int8"), ("tiny-mamba", "fp16"), ("tiny-llama", "linear_wa-int8"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[SmallGate]:
    settings = {model: settings_of(model, recipes) for model, recipes in RECIPES.items()}
    with user_faults.registered():
        made = SmallGate(tmp_path_factory.mktemp("faults"), settings)
        for model, recipes in RECIPES.items():
            made.make_baselines(model, recipes)
        yield made


def test_there_are_at_least_200_faults_and_no_two_of_one_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 200


def test_the_cause_of_at_most_a_tenth_of_the_faults_is_not_known() -> None:
    unknown = [fault for fault in FAULTS if any(UNKNOWN in cause for cause in fault.causes)]
    assert len(unknown) <= 0.1 * len(FAULTS)


def test_every_row_states_whole_sentences() -> None:
    """Any text is allowed only in the long messages of errors, and of what was not covered."""
    loose = [fault for fault in FAULTS if any("*" in cause or not cause for cause in fault.causes)]
    assert {fault.kind for fault in loose if fault.verdicts != UNCOVERED} <= {"error"}


@pytest.mark.parametrize(
    ("text", "sentence", "holds"),
    [
        ("the scan; state 3 of 16 is lost", "the scan; state 3 of 16 is lost", True),
        ("the scan; state 4 of 16 is lost", "the scan; state 3 of 16 is lost", False),
        ("differs by 0.092, by -1.5e-05", "differs by #, by #", True),
        ("differs by much", "differs by #", False),
        ("site a; not clamped", "site a", False),
        ("an error: of any kind", "an error: *", True),
    ],
)
def test_a_cause_must_be_the_whole_sentence_of_a_row(text: str, sentence: str, holds: bool) -> None:
    assert is_sentence(text, sentence) is holds


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_fault_is_caught_in_its_layer_and_named(gate: SmallGate, fault: AnyFault, kill: Any) -> None:
    result = gate.run(fault)
    kill(fault.name, fault.label, fault.recipe, result.verdict, result.strongest, result.cause)
    assert result.problems() == []


@pytest.mark.parametrize("change", HARMLESS.values(), ids=lambda change: change.name.replace(" ", "_"))
def test_a_harmless_change_fails_nothing(gate: SmallGate, change: Harmless) -> None:
    with change.applied():
        for model, recipe in reversed(TRIED) if change.is_reversed else TRIED:
            outcomes = gate.judge(model, recipe, shared=False, batch_size=change.batch_size)
            assert {layer: one.message for layer, one in outcomes.items() if one.status != "passed"} == {}
