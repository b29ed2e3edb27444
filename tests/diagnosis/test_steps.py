"""Faults of single steps of a block: each is named by the step and by the fault, and by no other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.diagnosis.causes import diagnose
from probe.diagnosis.plain_grids import PlainGrid
from probe.formats import FORMATS
from probe.models.loading import Loaded, load_model
from probe.models.outside import outside_modules
from probe.numerics.integers import IntegerParameters
from probe.running.calibration import Calibration, calibrate_on
from probe.running.recipes import Recipe
from probe.running.reference import Reference, run_reference
from probe.running.traces import LayerTrace
from tests.faults.breaking import Damage, Patient, damaged, grid, recalled, scanning, weight, with_functions

Traced = Callable[[str, str], LayerTrace]


@pytest.fixture(scope="module")
def traced() -> Traced:
    loaded: Loaded = load_model("tiny-mamba")
    calibration: Calibration = calibrate_on(loaded, "calibration", 4, 128)
    batches = token_batches(text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=48, batch_size=2)
    reference: Reference = run_reference(loaded.model, batches, outside=outside_modules(loaded.model))
    return lambda format, label: LayerTrace(loaded.model, Recipe("2-1", format), reference, calibration, label)


def rows_swapped(w: Tensor) -> Tensor:
    w[[3, 17]] = w[[17, 3]]
    return w


def columns_swapped(w: Tensor) -> Tensor:
    w[:, [3, 17]] = w[:, [17, 3]]
    return w


def narrow(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def computed_in(name: str, dtype: torch.dtype) -> Damage:
    def call(real: Any, module: nn.Linear, x: Tensor) -> Tensor:
        return functional.linear(x.to(dtype), module.weight.to(dtype)).float()

    return lambda patient: recalled(patient.mixer.get_submodule(name), call)


def bias_twice(patient: Patient) -> None:
    bias = patient.mixer.dt_proj.bias.detach()
    with_functions(softplus=lambda x: functional.softplus(x + bias))(patient)


def epsilon(patient: Patient) -> None:
    patient.block.norm.variance_epsilon = 0.01


def reset(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    first, _ = real(u[:, :20], delta[:, :20], A, B[:, :20], C[:, :20], state)
    rest, last = real(u[:, 20:], delta[:, 20:], A, B[:, 20:], C[:, 20:], None)
    return torch.cat([first, rest], 1), last


def state_lost(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    return real(u, delta, A, B, C * (torch.arange(C.shape[-1]) != 3), state)


def one_block(healthy: Any) -> Callable[[Tensor], Tensor]:
    """The second block of token 5 of sequence 0 has a scale one exponent up."""
    coarse = PlainGrid(FORMATS[healthy.format], factor=2.0)

    def on_grid(x: Tensor) -> Tensor:
        y: Tensor = healthy(x).clone()
        y[0, 3, 32:64] = coarse(x)[0, 3, 32:64]
        return y

    return on_grid


def ragged_float(healthy: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([healthy(x)[..., :32], x[..., 32:]], -1)


def one_ulp(healthy: Any) -> Any:
    old = healthy.parameters
    scale = torch.nextafter(old.scale, torch.tensor(torch.inf))
    return replace(healthy, parameters=IntegerParameters(scale, old.zero_point, old.bits, old.symmetric))


def late(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    return real(u, delta, A, B.roll(1, 1), C, state)


FAULTS: list[tuple[str, Damage, str]] = [
    ("int8", weight("x_proj.weight", rows_swapped), "weight x_proj.weight; rows 3 and 17 are swapped"),
    ("fp8_e4m3", weight("in_proj.weight", rows_swapped), "weight in_proj.weight; rows 3 and 17 are swapped"),
    ("int8", weight("x_proj.weight", columns_swapped), "weight x_proj.weight; columns 3 and 17 are swapped"),
    ("int8", weight("x_proj.weight", lambda w: w * (1 + 1.2e-7)), "weight x_proj.weight; the scale is off by +1.2e-07"),
    ("int8", bias_twice, "the scan; the bias of dt_proj is added twice"),
    ("int8", computed_in("x_proj", torch.bfloat16), "x_proj; computed in bfloat16"),
    ("int8", computed_in("out_proj", torch.float16), "out_proj; computed in float16"),
    ("int8", epsilon, "the norm; eps 0.01 instead of 1e-05"),
    ("int8", scanning(lambda real, u, d, A, *rest: real(u, d, narrow(A), *rest)), "the scan; A is rounded to bfloat16"),
    ("int8", scanning(lambda real, u, d, *rest: real(u, narrow(d), *rest)), "the scan; delta is rounded to bfloat16"),
    ("int8", scanning(reset), "the scan; the state is lost at token 20"),
    ("int8", scanning(state_lost), "the scan; state 3 of 16 is lost"),
    ("int8", scanning(late), "the scan; B is one token late"),
    ("int8", with_functions(silu=lambda x: narrow(functional.silu(narrow(x)))), "; the gate is computed in bfloat16"),
    ("fp4_e2m1", grid("in_proj.input", one_block), "site in_proj.input; 1 of 384 blocks has its scale off by 2^1"),
    ("fp8_e4m3", grid("x_proj.output", ragged_float), "site x_proj.output; the last, shorter block is not quantized"),
    ("int8", grid("in_proj.output", one_ulp), "site in_proj.output; the scale is one ulp up"),
    ("int8", grid("conv1d.output", one_ulp), "site conv1d.output; the scale is one ulp up"),
]


@pytest.mark.parametrize(("format", "damage", "cause"), FAULTS, ids=[cause for _, _, cause in FAULTS])
def test_a_fault_of_a_step_is_named(traced: Traced, format: str, damage: Damage, cause: str) -> None:
    with damaged(damage, 1):
        assert cause in diagnose(traced(format, "layer_1"))


def head(change: Callable[..., Tensor]) -> Damage:
    return lambda patient: recalled(patient.twin.lm_head, change)


def table(change: Callable[..., Tensor]) -> Damage:
    return lambda patient: recalled(patient.twin.get_input_embeddings(), change)


def row_changed(patient: Patient) -> None:
    changed = patient.twin.lm_head.weight.detach().clone()
    changed[17] *= 2
    patient.twin.lm_head.weight = nn.Parameter(changed, requires_grad=False)


OUTSIDE: list[tuple[str, Damage, str]] = [
    (
        "head",
        head(lambda real, module, x: functional.linear(x.bfloat16(), module.weight.bfloat16()).float()),
        "head; computed in bfloat16",
    ),
    ("head", head(lambda real, module, x: real(x.roll(1, 1))), "head; it is one token late"),
    ("head", row_changed, "head; weight: only row 17: the scale is off by a factor of 2^1"),
    ("norm", lambda patient: setattr(patient.final_norm, "variance_epsilon", 1e-3), "norm; eps 0.001 instead of 1e-05"),
    ("norm", lambda patient: recalled(patient.final_norm, lambda real, module, x: x), "norm; the norm is left out"),
    ("embedding", table(lambda real, module, x: 2 * real(x)), "embedding; the scale is off by a factor of 2^1"),
    (
        "embedding",
        table(lambda real, module, x: real(torch.cat([x[:1]] * len(x)))),
        "embedding; other tokens: sample 1 is sample 0",
    ),
    ("embedding", table(lambda real, module, x: real((x + 1) % 256)), "embedding; other tokens: ids are off by +1"),
]


@pytest.mark.parametrize(("label", "damage", "cause"), OUTSIDE, ids=[cause for _, _, cause in OUTSIDE])
def test_a_fault_outside_the_layers_is_named(traced: Traced, label: str, damage: Damage, cause: str) -> None:
    with damaged(damage, 1):
        assert diagnose(traced("int8", label)) == cause
