"""The diagnosis: plain grids that equal the real ones, signatures that are told apart, and a line that always comes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probe.data.batches import token_batches
from probe.data.texts import text_of
from probe.diagnosis.causes import WIDTH, diagnose, wrong_corners
from probe.diagnosis.linear_steps import grid_step
from probe.diagnosis.plain_grids import PlainGrid, suspects
from probe.diagnosis.signatures import Step, explain
from probe.formats import FORMATS, GATE_FORMATS
from probe.models.loading import Loaded, load_model
from probe.numerics.corners import corner_values
from probe.numerics.grids import activation_grid, sequence_grid, weight_on_grid
from probe.running.calibration import Calibration, calibrate_on
from probe.running.corners import corner_answers
from probe.running.modes import GROUPS, register_mode, unregister_mode
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference, run_reference
from probe.running.traces import LayerTrace
from tests.faults.block_faults import final_norm_on_grid
from tests.faults.breaking import damaged

FORMAT = pytest.mark.parametrize("format", GATE_FORMATS)
AMAX = 3.7


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


@pytest.fixture(scope="module")
def activation() -> Tensor:
    """[sequence, token, channel], larger than AMAX here and there; the width is no multiple of a block."""
    x = torch.randn(2, 40, 72, generator=torch.Generator().manual_seed(3)) * 1.5
    x[0, 5] *= 1e-4
    x[1, 7, 3] = 0.0
    return x


def expected_grid(format: str) -> PlainGrid:
    static = FORMATS[format].scale in ("float32", "e4m3")
    return PlainGrid(FORMATS[format], AMAX if static else None)


# --- plain grids


@FORMAT
def test_a_plain_grid_is_the_grid_of_an_activation(activation: Tensor, format: str) -> None:
    assert torch.equal(expected_grid(format)(activation), activation_grid(format, AMAX)(activation))


@FORMAT
def test_a_plain_grid_is_the_grid_of_a_weight(activation: Tensor, format: str) -> None:
    assert torch.equal(PlainGrid(FORMATS[format])(activation[0]), weight_on_grid(activation[0], format))


@FORMAT
def test_a_plain_grid_is_the_grid_of_a_sequence(activation: Tensor, format: str) -> None:
    plain = PlainGrid(FORMATS[format], AMAX if format == "nvfp4" else None, per_sequence=True)
    assert torch.equal(plain(activation), sequence_grid(format, AMAX)(activation))


@FORMAT
def test_a_plain_grid_is_right_at_the_corners(format: str) -> None:
    given = corner_values(FORMATS[format], 72, amax=expected_grid(format).amax)
    assert torch.equal(expected_grid(format)(given), activation_grid(format, AMAX)(given))


@FORMAT
def test_a_nan_spoils_as_much_in_a_plain_grid_as_in_a_real_one(activation: Tensor, format: str) -> None:
    x = activation.clone()
    x[0, 3, 40] = torch.nan
    assert torch.equal(expected_grid(format)(x).isnan(), activation_grid(format, AMAX)(x).isnan())


@FORMAT
def test_every_fault_that_can_be_replayed_is_recognized(activation: Tensor, format: str) -> None:
    """What is said may be another sentence only where that fault gives the very same values."""
    grid = expected_grid(format)
    replays = dict(suspects(grid, activation, largest=5.0))
    assert len(replays) >= 15
    recognized = set()
    for sentence, faulty in replays.items():
        made = faulty(activation)
        if torch.equal(made, grid(activation)):
            continue
        said = explain(grid_step("site", grid, activation, made, largest=5.0)).partition(" (mean")[0]
        assert said in replays, (sentence, said)
        assert torch.equal(replays[said](activation), made), (sentence, said)
        recognized.add(sentence)
    assert "rounding looks like floor, not nearest" in recognized


# --- signatures

EXPECTED = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(5))


def changed(place: Any, value: float | Tensor) -> Tensor:
    out = EXPECTED.clone()
    out[place] = value
    return out


@pytest.mark.parametrize(
    ("actual", "said"),
    [
        (EXPECTED, ""),
        (EXPECTED * (1 + 1e-6), ""),
        (EXPECTED * 1.03, "the scale is off by +3.00%"),
        (EXPECTED * 4, "the scale is off by a factor of 2^2"),
        (EXPECTED / 2, "the scale is off by a factor of 2^-1"),
        (EXPECTED * 37.5, "the scale is off by a factor of 37.5"),
        (-EXPECTED, "the sign is turned"),
        (torch.zeros_like(EXPECTED), "gives only zeros"),
        (EXPECTED[:, :20], "has shape [2, 20, 64], expected [2, 40, 64]"),
        (EXPECTED.half(), "is float16, expected float32"),
        (changed((1, 3, 17), torch.nan), "NaN in 1 of 5120 values, the first at [1, 3, 17]"),
        (changed((0, 2), torch.inf), "Inf in 64 of 5120 values, the first at [0, 2, 0]"),
        (changed((..., 17), EXPECTED[..., 17] * 2), "only channel 17: the scale is off by a factor of 2^1"),
        (changed((0, 9), 0.0), "only token 9:"),
        (changed((slice(None), 9), 0.0), "only token 9: gives only zeros"),
        (changed((1,), EXPECTED[1] * 0.5), "only sequence 1: the scale is off by a factor of 2^-1"),
        (changed((1, 3, 17), 8.0), "one value, at [1, 3, 17]: 8 instead of"),
        (torch.where(EXPECTED.abs() < 0.3, 0.0, EXPECTED), "values are zero and should not be"),
        (EXPECTED.flip(1), "unlike what it should be"),
        (EXPECTED + 0.05 * EXPECTED.flip(1), "of the values differ, by 0.05 of its rms; no known signature"),
    ],
)
def test_a_difference_is_told_by_its_signature(actual: Tensor, said: str) -> None:
    found = explain(Step("a step", actual, EXPECTED))
    assert found == said if not said else said in found


@pytest.mark.parametrize(
    ("rounding", "said"),
    [
        (lambda q: q, "not quantized"),
        (lambda q: torch.floor(q + 0.3), "rounding is biased down (mean error -0.20 steps)"),
        (lambda q: torch.floor(q + torch.rand(q.shape, dtype=q.dtype)), "rounding looks random, not nearest"),
        (lambda q: torch.round(q).clamp(-100, 100), "largest values differ: clamped at 2.913"),
        (lambda q: torch.round(q / 1.02) * 1.02, "the scale is off by +2.00%"),
    ],
)
def test_a_rounding_that_no_row_replays_is_told_by_its_errors(
    activation: Tensor, rounding: Callable[[Tensor], Tensor], said: str
) -> None:
    torch.manual_seed(1)
    given = activation.clamp(-AMAX, AMAX)
    scale = AMAX / 127
    made = (rounding(given.double() / scale) * scale).float()
    assert said in explain(grid_step("site", expected_grid("int8"), given, made))


# --- the whole way


@pytest.mark.parametrize("mode", GROUPS["all"])
@pytest.mark.parametrize("format", ["int8", "fp4_e2m1", "nvfp4"])
def test_of_a_healthy_layer_every_step_agrees(
    loaded: Loaded, reference: Reference, calibration: Calibration, mode: str, format: str
) -> None:
    said = diagnose(LayerTrace(loaded.model, Recipe(mode, format), reference, calibration, "layer_2"))
    steps = 62 if mode == "3" else 60  # of two batches; mode 3 has one grid more
    assert said == f"all {steps} steps of layer_2 agree with their definitions: look at its input or the calibration"


@FORMAT
def test_the_corners_of_a_healthy_model_are_right(loaded: Loaded, calibration: Calibration, format: str) -> None:
    for mode in GROUPS["all"]:
        recipe = Recipe(mode, format)
        answers = corner_answers(apply(loaded.model, recipe, calibration), recipe, calibration)
        assert len(answers) >= 4
        assert wrong_corners(answers.values()) == {}


@pytest.mark.parametrize("mode", ["linear_w", "linear_wa"])
@pytest.mark.parametrize("model", ["tiny-mamba", "tiny-llama"])
def test_linear_modes_are_looked_into_in_any_model(model: str, mode: str) -> None:
    other = load_model(model)
    batches = token_batches(text_of("evaluation"), other.tokenizer, samples=1, seqlen=32, batch_size=1)
    scales = calibrate_on(other, "calibration", 2, 64)
    said = diagnose(
        LayerTrace(other.model, Recipe(mode, "int8"), run_reference(other.model, batches), scales, "layer_0")
    )
    assert said.startswith("all ")


def test_the_model_outside_of_its_layers_is_looked_at_for_the_logits(
    loaded: Loaded, reference: Reference, calibration: Calibration
) -> None:
    recipe = Recipe("2-1", "int8")
    assert "are those of the float model" in diagnose(
        LayerTrace(loaded.model, recipe, reference, calibration, "logits")
    )
    with damaged(final_norm_on_grid, 0):
        said = diagnose(LayerTrace(loaded.model, recipe, reference, calibration, "logits"))
    assert said.startswith("weight backbone.norm_f.weight; ")


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
    ("change", "said"),
    [
        (lambda x: noisy(x) * 1.1, "layer_1 as a whole; what it adds is 1.1 times the float layer's"),
        (one_channel, "of the squared error is in one channel (5)"),
        (one_nan, "NaN in 1 of"),
        (lambda x: noisy(x) + 0.5, "the error has a mean of +1.00 of its rms"),
        (torch.zeros_like, "layer_1; it gives its input back: the layer is skipped"),
        (lambda x: x, "its output is the float layer's: the mode was not applied to it"),
        (noisy, "no cause found: layer_1 differs from the float layer by"),
    ],
)
def test_of_a_users_mode_the_layer_is_told_as_a_whole(
    loaded: Loaded, reference: Reference, user_mode: Any, change: Callable[[Tensor], Tensor], said: str
) -> None:
    assert said in diagnose(LayerTrace(loaded.model, user_mode(change), reference, None, "layer_1"))


def test_a_part_that_never_ran_is_the_cause(loaded: Loaded, reference: Reference, calibration: Calibration) -> None:
    def shortcut(patient: Any) -> None:
        patient.mixer.forward = lambda hidden_states, **_: 0.5 * hidden_states

    with damaged(shortcut, 1):
        said = diagnose(LayerTrace(loaded.model, Recipe("2-1", "int8"), reference, calibration, "layer_1"))
    assert said == "site in_proj.input; it never ran"


def explode(patient: Any) -> None:
    raise RuntimeError("line one\nline two " + 200 * "x")


def test_a_diagnosis_never_raises_and_is_one_line(
    loaded: Loaded, reference: Reference, calibration: Calibration
) -> None:
    int8 = Recipe("2-1", "int8")
    with damaged(explode, 1):
        said = diagnose(LayerTrace(loaded.model, int8, reference, calibration, "layer_1"))
    assert said.startswith("no cause found: line one line two xx")
    assert said.endswith("...")
    assert len(said) == WIDTH
    for odd in (
        diagnose(LayerTrace(loaded.model, int8, reference, None, "layer_1")),
        diagnose(LayerTrace(loaded.model, int8, reference, calibration, "no such layer")),
        diagnose(LayerTrace(nn.Linear(2, 2), int8, reference, calibration, "layer_1")),
        diagnose(LayerTrace(loaded.model, int8, None, calibration, "layer_1")),  # type: ignore[arg-type]
    ):
        assert odd.startswith("no cause found: ")
        assert len(odd) <= WIDTH
