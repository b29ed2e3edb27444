"""The diagnosis of a layer: healthy steps agree, each cause is named, and a line always comes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.diagnosis.causes import WIDTH, corner_cause, diagnose, wrong_corners
from probe.diagnosis.plain_grids import PlainGrid
from probe.formats import FORMATS, GATE_FORMATS
from probe.models.loading import Loaded, load_model
from probe.numerics.grids import weight_on_grid
from probe.running.calibration import Calibration, calibrate_on
from probe.running.corners import corner_answers
from probe.running.modes import GROUPS
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference, run_reference
from probe.running.traces import LayerTrace
from tests.faults.breaking import Patient, damaged, grid, scanning, weight

FORMAT = pytest.mark.parametrize("format", GATE_FORMATS)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model("tiny-mamba")


@pytest.fixture(scope="module")
def calibration(loaded: Loaded) -> Calibration:
    return calibrate_on(loaded, "calibration", 4, 128)


@pytest.fixture(scope="module")
def reference(loaded: Loaded) -> Reference:
    batches = token_batches(text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=48, batch_size=2)
    return run_reference(loaded.model, batches)


@pytest.mark.parametrize("mode", GROUPS["all"])
@pytest.mark.parametrize("format", ["int8", "fp4_e2m1", "nvfp4"])
def test_of_a_healthy_layer_every_step_agrees(
    loaded: Loaded, reference: Reference, calibration: Calibration, mode: str, format: str
) -> None:
    cause = diagnose(LayerTrace(loaded.model, Recipe(mode, format), reference, calibration, "layer_2"))
    steps = 62 if mode == "3" else 60  # of two batches; mode 3 has one grid more
    assert (
        cause
        == f"no known cause: all {steps} steps of layer_2 agree with their definitions, and nothing stored differs"
    )


@FORMAT
def test_the_corners_of_a_healthy_model_are_right(loaded: Loaded, calibration: Calibration, format: str) -> None:
    for mode in GROUPS["all"]:
        recipe = Recipe(mode, format)
        answers = corner_answers(apply(loaded.model, recipe, calibration), recipe, calibration)
        assert len(answers) >= 4
        assert wrong_corners(answers) == {}


@pytest.mark.parametrize("mode", ["linear_w", "linear_wa"])
@pytest.mark.parametrize("model", ["tiny-mamba", "tiny-llama"])
def test_linear_modes_are_looked_into_in_any_model(model: str, mode: str) -> None:
    other = load_model(model)
    batches = token_batches(text_of("evaluation"), other.tokenizer, samples=1, seqlen=32, batch_size=1)
    scales = calibrate_on(other, "calibration", 2, 64)
    cause = diagnose(
        LayerTrace(other.model, Recipe(mode, "int8"), run_reference(other.model, batches), scales, "layer_0")
    )
    assert cause.startswith("no known cause: all ")


def final_norm_on_grid(patient: Patient) -> None:
    gamma = patient.twin.backbone.norm_f.weight
    gamma.copy_(weight_on_grid(gamma, "fp4_e2m1"))


def test_the_model_outside_of_its_layers_is_looked_at_for_the_logits(
    loaded: Loaded, reference: Reference, calibration: Calibration
) -> None:
    recipe = Recipe("2-1", "int8")
    assert "are those of the float model" in diagnose(
        LayerTrace(loaded.model, recipe, reference, calibration, "logits")
    )
    with damaged(final_norm_on_grid, 0):
        cause = diagnose(LayerTrace(loaded.model, recipe, reference, calibration, "logits"))
    assert cause.startswith("weight backbone.norm_f.weight; ")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ends": "open"}, "not clamped"),
        ({"factor": 2.0}, "the scale is off by a factor of 2^1, or the scale rule looks like ceil"),
        ({"rule": "rceil"}, "the scale rule looks like rceil"),
    ],
)
def test_of_faults_that_the_text_cannot_tell_apart_corner_values_tell_the_one(
    loaded: Loaded, reference: Reference, calibration: Calibration, changes: dict[str, Any], sentence: str
) -> None:
    """With e4m3 the scale times two, the rule ceil and the lack of a clamp change only the largest values of a text."""
    faulty = PlainGrid(FORMATS["fp8_e4m3"], **changes)
    with damaged(grid("in_proj.output", lambda _: faulty), 1):
        cause = diagnose(LayerTrace(loaded.model, Recipe("2-1", "fp8_e4m3"), reference, calibration, "layer_1"))
    assert cause == f"site in_proj.output; {sentence}"


def test_where_all_steps_agree_the_sources_are_told_first_one_first(
    loaded: Loaded, reference: Reference, calibration: Calibration
) -> None:
    trace = LayerTrace(loaded.model, Recipe("2-1", "fp8_e4m3"), reference, calibration, "layer_1")
    config, row = "configuration; layer_norm_epsilon 1e-05 -> 0.001", "format fp8_e4m3; max 448 -> 240"
    assert diagnose(trace, [config]) == config
    assert diagnose(trace, [config, row]) == row
    assert diagnose(trace, [config, "tokens; other"]) == f"{config} (and 1 more)"
    assert corner_cause(trace, [config, row]) == row
    assert corner_cause(trace, [config]) == config
    assert corner_cause(trace) == "no known cause: corner values give other results, as their definition does"


def test_a_step_that_disagrees_comes_before_any_source(
    loaded: Loaded, reference: Reference, calibration: Calibration
) -> None:
    with damaged(weight("D", torch.zeros_like), 1):
        trace = LayerTrace(loaded.model, Recipe("2-1", "fp8_e4m3"), reference, calibration, "layer_1")
        assert diagnose(trace, ["configuration; something"]) == "weight D; zero"


def test_a_layer_that_carries_a_state_is_no_function_of_its_input(
    loaded: Loaded, reference: Reference, calibration: Calibration
) -> None:
    kept: list[Tensor] = []

    def carried(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
        y, last = real(u, delta, A, B, C, kept[-1] if kept and len(kept[-1]) == len(u) else None)
        kept[:] = [last]
        return y, last

    with damaged(scanning(carried), 1):
        cause = diagnose(LayerTrace(loaded.model, Recipe("2-1", "int8"), reference, calibration, "layer_1"))
    assert cause.startswith("layer_1 is not a function of its input: its second run differs by ")
    assert len(cause) <= WIDTH


def test_a_reference_that_is_not_the_float_layers_is_blamed_and_not_the_mode(
    loaded: Loaded, reference: Reference, calibration: Calibration
) -> None:
    """The reference holds what the recipe gives, so that the recipe seems not to be applied."""
    recipe = Recipe("2-1", "fp8_e4m3")
    made = [batch.output for batch in LayerTrace(loaded.model, recipe, reference, calibration, "layer_1").batches()]
    wrong = replace(reference, tensors={**reference.tensors, "layer_1.injected": [x for x in made if x is not None]})
    cause = diagnose(LayerTrace(loaded.model, recipe, wrong, calibration, "layer_1"))
    assert cause.startswith("the reference of layer_1 is not what the float layer gives: ")


def test_a_sample_that_is_there_twice_is_told(loaded: Loaded, calibration: Calibration) -> None:
    batches = token_batches(text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=48, batch_size=3)
    batches[0][2] = batches[0][0]
    trace = LayerTrace(
        loaded.model, Recipe("2-1", "int8"), run_reference(loaded.model, batches), calibration, "layer_1"
    )
    assert diagnose(trace) == "input; sample 2 is sample 0, evaluated twice"


def test_a_part_that_never_ran_is_the_cause(loaded: Loaded, reference: Reference, calibration: Calibration) -> None:
    def shortcut(patient: Any) -> None:
        patient.mixer.forward = lambda hidden_states, **_: 0.5 * hidden_states

    with damaged(shortcut, 1):
        cause = diagnose(LayerTrace(loaded.model, Recipe("2-1", "int8"), reference, calibration, "layer_1"))
    assert cause == "site in_proj.input; it never ran"


def explode(patient: Any) -> None:
    raise RuntimeError("line one\nline two " + 200 * "x")


def test_a_diagnosis_never_raises_and_is_one_line(
    loaded: Loaded, reference: Reference, calibration: Calibration
) -> None:
    int8 = Recipe("2-1", "int8")
    with damaged(explode, 1):
        cause = diagnose(LayerTrace(loaded.model, int8, reference, calibration, "layer_1"))
    assert cause.startswith("no known cause: line one line two xx")
    assert cause.endswith("...")
    assert len(cause) == WIDTH
    for odd in (
        diagnose(LayerTrace(loaded.model, int8, reference, None, "layer_1")),
        diagnose(LayerTrace(loaded.model, int8, reference, calibration, "no such layer")),
        diagnose(LayerTrace(nn.Linear(2, 2), int8, reference, calibration, "layer_1")),
        diagnose(LayerTrace(loaded.model, int8, None, calibration, "layer_1")),  # type: ignore[arg-type]
    ):
        assert odd.startswith("no known cause: ")
        assert len(odd) <= WIDTH
