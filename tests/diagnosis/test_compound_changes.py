"""Random and compound changes that no signature describes: none may be named, of steps, of outputs, or on paths."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from probe.data.samples import TextSamples
from probe.diagnosis.changed_outputs import ChangedOutput
from probe.diagnosis.explanations import UNKNOWN, explain
from probe.diagnosis.golden_outputs import explain_change
from probe.diagnosis.linear_steps import grid_step, product_step
from probe.diagnosis.path_steps import diagnose_path
from probe.diagnosis.signatures import Step
from probe.models.loading import load_model
from probe.numerics.sketches import SAMPLE, places_of, sketched
from probe.running.calibration import calibrate_on
from probe.running.paths import paths_of
from probe.running.recipes import Recipe
from probe.running.reference import run_reference
from probe.running.traces import LayerTrace
from tests.diagnosis.grids import expected_grid

Change = Callable[[Tensor, torch.Generator], Tensor]


def noise(x: Tensor, random: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=random).to(x)


def chosen(x: Tensor, share: float, random: torch.Generator) -> Tensor:
    return torch.rand(x.shape, generator=random) < share


def by_line(x: Tensor, axis: int, random: torch.Generator) -> Tensor:
    """A random number for each line along an axis."""
    shape = [size if other == axis else 1 for other, size in enumerate(x.shape)]
    return torch.randn(shape, generator=random).to(x)


#: None of these is a factor, a constant, a permutation, a narrower float, a clip or a loss of a few lines.
CHANGES: dict[str, Change] = {
    "noise": lambda x, r: x + 0.1 * x.std() * noise(x, r),
    "noise as large as the value": lambda x, r: x * (1 + 0.05 * noise(x, r)),
    "signs of a tenth": lambda x, r: torch.where(chosen(x, 0.1, r), -x, x),
    "a factor for each channel": lambda x, r: x * (1 + 0.1 * by_line(x, -1 % x.dim(), r)),
    "a factor for each token": lambda x, r: x * (1 + 0.1 * by_line(x, 1, r)),
    "a factor, and noise as large": lambda x, r: 1.02 * x + 0.02 * x.std() * noise(x, r),
    "a shift, and a permutation": lambda x, r: x.roll(1, 1)[..., torch.randperm(x.shape[-1], generator=r)],
    "half of two neighbours": lambda x, r: 0.5 * (x + x.roll(1, -1)),
    "another tensor": lambda x, r: x.std() * noise(x, r),
    "exploded": lambda x, r: 1e3 * x.std() * noise(x, r),
    "nearly nothing": lambda x, r: 1e-2 * x.std() * noise(x, r),
    "two constants": lambda x, r: x + 0.05 * x.std() * torch.where(chosen(x, 0.5, r), 1.0, -1.0),
    "squares": lambda x, r: x + 0.1 * x.square() / x.std(),
    "tanh": lambda x, r: x.std() * torch.tanh(x / x.std()),
}


def generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + list(CHANGES).index(name))


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("seed", range(3))
def test_no_signature_fires_on_a_change_of_sums(name: str, seed: int) -> None:
    random = generator(seed, name)
    given, weight = torch.randn(2, 40, 64, generator=random), torch.randn(48, 64, generator=random).double()
    product = (given.double() @ weight.T).float()
    changed = CHANGES[name](product, random)
    assert UNKNOWN in explain(Step("a step", changed, product))
    assert UNKNOWN in explain(product_step("a product", weight, None, given, changed))


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "fp4_e2m1", "nvfp4"])
@pytest.mark.parametrize("name", CHANGES)
def test_no_replay_fires_on_a_grid_whose_input_was_changed_before(activation: Tensor, name: str, format: str) -> None:
    grid = expected_grid(format)
    made = grid(CHANGES[name](activation, generator(0, name)))
    assert UNKNOWN in explain(grid_step("site", grid, activation, made))


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("seed", range(2))
def test_no_hypothesis_fires_on_an_output_that_was_changed(name: str, seed: int) -> None:
    """Of a user's mode: the stored output is known by its sketch and sample."""
    random = generator(seed, name)
    given, added = torch.randn(3, 40, 64, generator=random), torch.randn(3, 40, 64, generator=random)
    healthy = given + added + 0.01 * noise(added, random)
    flat = healthy.double().reshape(-1).numpy()
    stored = (*sketched(flat).tolist(), *flat[places_of(flat.size, SAMPLE)].tolist())
    changed = given + CHANGES[name](healthy - given, random)
    parts = {} if name == "nearly nothing" else {"inside": [added]}
    found = ChangedOutput.of([changed], [given], [given + added], stored, parts)
    assert found is not None
    assert UNKNOWN in explain_change(found)


def test_a_module_that_is_left_out_is_not_half_of_the_stored_one() -> None:
    random = generator(0, "noise")
    given, added, other = (torch.randn(3, 40, 64, generator=random) for _ in range(3))
    flat = (given + added + other).double().reshape(-1).numpy()
    stored = tuple(sketched(flat).tolist())
    for changed, sentence in (
        (given + other, "the output of inside is left out"),
        (given + other + 0.5 * added, "the output of inside is 0.5 times the stored one"),
    ):
        inside = added if "left out" in sentence else 0.5 * added
        found = ChangedOutput.of([changed], [given], [given + added + other], stored, {"inside": [inside]})
        assert found is not None
        assert explain_change(found) == sentence


@pytest.mark.parametrize(("model", "recipe"), [("tiny-mamba", ("2-1", "int8")), ("tiny-llama", ("linear_wa", "int8"))])
@pytest.mark.parametrize("name", ["noise", "noise as large as the value", "signs of a tenth", "squares"])
def test_no_step_of_a_path_is_blamed_for_what_it_does_not_explain(
    model: str, recipe: tuple[str, str], name: str
) -> None:
    loaded = load_model(model)
    reference = run_reference(loaded.model, TextSamples("evaluation", 2, 24, 2).batches(loaded.tokenizer))
    trace = LayerTrace(loaded.model, Recipe(*recipe), reference, calibrate_on(loaded, "calibration", 2, 64), "layer_1")
    path, random = paths_of(2, 24)["decode"], generator(0, name)

    def decoded_only(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return CHANGES[name](output, random) if output.shape[1] == 1 else output

    inner = "mixer.out_proj" if model == "tiny-mamba" else "mlp.up_proj"
    trace.twin.get_submodule(f"{trace.module}.{inner}").register_forward_hook(decoded_only)
    cause = diagnose_path(trace, path, path.places[path.half == 1])
    assert cause.startswith(f"{inner.removeprefix('mixer.')}; only tokens 12 to 19: {UNKNOWN}: ")
