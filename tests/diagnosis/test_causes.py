"""The diagnosis of a layer: healthy steps agree, each cause is named, and a line always comes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.diagnosis.causes import WIDTH, diagnose, wrong_corners
from probe.formats import GATE_FORMATS
from probe.models.loading import Loaded, load_model
from probe.running.calibration import Calibration, calibrate_on
from probe.running.corners import corner_answers
from probe.running.modes import GROUPS, register_mode, unregister_mode
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference, run_reference
from probe.running.traces import LayerTrace
from tests.faults.block_faults import final_norm_on_grid
from tests.faults.breaking import damaged

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
    assert cause == f"all {steps} steps of layer_2 agree with their definitions: look at its input or the calibration"


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
    assert cause.startswith("all ")


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


class Changed(nn.Module):
    """A block whose mixer's output is changed on its way out."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.change(self.inner(*args, **kwargs))


def noisy(x: Tensor) -> Tensor:
    return x * (1 + 0.001 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2)))


def one_channel(x: Tensor) -> Tensor:
    x = noisy(x)
    x[..., 5] += 1.0
    return x


def one_nan(x: Tensor) -> Tensor:
    x[0, 2, 5] = torch.nan
    return x


@pytest.fixture
def user_mode() -> Iterator[Callable[[Callable[[Tensor], Tensor]], Recipe]]:
    def register(change: Callable[[Tensor], Tensor]) -> Recipe:
        def build(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
            block: Any = model.get_submodule("backbone.layers.1")
            block.mixer = Changed(block.mixer, change)
            return model

        register_mode("theirs", build)
        return Recipe("theirs", "int8")

    yield register
    unregister_mode("theirs")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda x: noisy(x) * 1.1, "layer_1 as a whole; what it adds is 1.1 times the float layer's"),
        (one_channel, "of the squared error is in one channel (5)"),
        (one_nan, "NaN in 1 of"),
        (lambda x: noisy(x) + 0.5, "the error has a mean of +1.00 of its rms"),
        (torch.zeros_like, "layer_1; it returns its input: the layer is skipped"),
        (lambda x: x, "its output is the float layer's: the mode was not applied to it"),
        (noisy, "no cause found: layer_1 differs from the float layer by"),
    ],
)
def test_the_layer_of_a_users_mode_is_explained_as_a_whole(
    loaded: Loaded, reference: Reference, user_mode: Any, change: Callable[[Tensor], Tensor], cause: str
) -> None:
    assert cause in diagnose(LayerTrace(loaded.model, user_mode(change), reference, None, "layer_1"))


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
    assert cause.startswith("no cause found: line one line two xx")
    assert cause.endswith("...")
    assert len(cause) == WIDTH
    for odd in (
        diagnose(LayerTrace(loaded.model, int8, reference, None, "layer_1")),
        diagnose(LayerTrace(loaded.model, int8, reference, calibration, "no such layer")),
        diagnose(LayerTrace(nn.Linear(2, 2), int8, reference, calibration, "layer_1")),
        diagnose(LayerTrace(loaded.model, int8, None, calibration, "layer_1")),  # type: ignore[arg-type]
    ):
        assert odd.startswith("no cause found: ")
        assert len(odd) <= WIDTH
