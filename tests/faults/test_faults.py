"""What the gate is worth: every injected fault is caught in its layer and named, and no harmless change is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.faults import user_faults
from tests.faults.bench import SmallGate, settings_of
from tests.faults.catalogue import UNKNOWN, AnyFault
from tests.faults.groups import FAULTS, RECIPES
from tests.faults.harmless import HARMLESS, Harmless

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
    assert sum(UNKNOWN in fault.cause for fault in FAULTS) <= 0.1 * len(FAULTS)


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
