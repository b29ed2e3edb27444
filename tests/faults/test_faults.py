"""What the gate is worth: every injected fault is caught in its layer and named, and no harmless change is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from probe.diagnosis.causes import WIDTH
from probe.gate.cases import Outcome
from probe.gate.verdicts import strength
from tests.faults import block_faults, grid_faults
from tests.faults.bench import SmallGate, settings_of
from tests.faults.catalogue import Fault, WideFault
from tests.faults.harmless import HARMLESS, Harmless

AnyFault = Fault | WideFault
FAULTS: tuple[AnyFault, ...] = (
    *grid_faults.ROUNDING,
    *grid_faults.SCALES,
    *grid_faults.BLOCKS,
    *grid_faults.ENDS,
    *grid_faults.AT_CORNERS,
    *block_faults.LEFT_OUT,
    *block_faults.WEIGHTS,
    *block_faults.BLOCK,
    *block_faults.WIDE,
)
RECIPES = {
    model: sorted({fault.recipe for fault in FAULTS if fault.model == model})
    for model in sorted({fault.model for fault in FAULTS})
}
#: On these the harmless changes are tried: a static and a float recipe, and another model.
TRIED = (("tiny-mamba", "mode_2_1-int8"), ("tiny-mamba", "fp16"), ("tiny-llama", "linear_wa-int8"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> SmallGate:
    settings = {model: settings_of(model, recipes) for model, recipes in RECIPES.items()}
    made = SmallGate(tmp_path_factory.mktemp("faults"), settings)
    for model, recipes in RECIPES.items():
        made.make_baselines(model, recipes)
    return made


def test_there_are_at_least_40_faults_and_no_two_of_one_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_fault_is_caught_in_its_layer_and_named(gate: SmallGate, fault: AnyFault, kill: Any) -> None:
    healthy = gate.judge_healthy(fault.model, fault.recipe)
    with fault.applied():
        outcomes = gate.judge(fault.model, fault.recipe, shared=not fault.everywhere)
    outcome = outcomes[fault.label]
    kill(fault.name, fault.label, fault.recipe, outcome.verdict or "NOT CAUGHT", _strongest(outcome), outcome.cause)
    assert all(one.status == "passed" for one in healthy.values())
    assert outcome.status == "failed", "not caught"
    assert outcome.verdict in fault.verdicts
    assert fault.cause in outcome.cause
    assert len(outcome.cause) <= WIDTH
    if not fault.everywhere:
        assert [layer for layer in healthy if _injected(outcomes[layer]) != _injected(healthy[layer])] == [fault.label]


@pytest.mark.parametrize("change", HARMLESS.values(), ids=lambda change: change.name.replace(" ", "_"))
def test_a_harmless_change_fails_nothing(gate: SmallGate, change: Harmless) -> None:
    with change.applied():
        for model, recipe in TRIED:
            outcomes = gate.judge(model, recipe, shared=False, batch_size=change.batch_size)
            assert {layer: one.message for layer, one in outcomes.items() if one.status != "passed"} == {}


def _injected(outcome: Outcome) -> dict[str, float | None]:
    return {name: figure.new for name, figure in outcome.figures.items() if name.startswith(("injected.", "corners."))}


def _strongest(outcome: Outcome) -> str:
    """The figure that moved by most, and by how many of its tolerances."""
    moved = {name: figure for name, figure in outcome.figures.items() if figure.moved}
    own = {name: figure for name, figure in moved.items() if not name.startswith("propagated.")} or moved
    if not own:
        return "-"
    name, figure = max(own.items(), key=lambda pair: strength(pair[1]))
    return f"{name} x {strength(figure):.3g}"
