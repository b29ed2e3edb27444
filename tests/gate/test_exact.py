"""What has no noise is compared to the bit: each break of a grid, a weight or a function is red, and is named."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.gate.definitions import ExactLayer, differing_sites, exact_changes, twin_corners
from probe.models import scans
from probe.models.loading import load_model
from probe.numerics import fast, integers, reference, rounding
from probe.numerics.quantize import fake_quantize
from probe.running.calibration import calibrate_on
from probe.running.corners import corner_answers
from probe.running.digests import digest_of, weight_digests
from probe.running.modes import register_mode, unregister_mode
from probe.running.recipes import Recipe, apply
from probe.running.reference import run_reference
from probe.running.traces import LayerTrace
from tests.faults.bench import SmallGate, settings_of
from tests.faults.breaking import Patient, damaged, grid, weight

MODEL, INT8, E5M2, DYNAMIC = "tiny-mamba", "mode_2_1-int8", "mode_2_1-fp8_e5m2", "mode_3-fp4_e2m1"
OWN = ("layer_0", "layer_1", "layer_2", "layer_3")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> SmallGate:
    made = SmallGate(tmp_path_factory.mktemp("exact"), {MODEL: settings_of(MODEL, [INT8, E5M2, DYNAMIC])})
    made.make_baselines(MODEL, [INT8, E5M2, DYNAMIC])
    return made


def toward_zero(x: Tensor, rounding: str, noise: Tensor | None) -> Tensor:
    nearest = torch.round(x) if rounding == "half_even" else torch.copysign(torch.floor(x.abs() + 0.5), x)
    return torch.where((x - x.trunc()).abs() == 0.5, x.trunc(), nearest)


def one_code_up(values: Tensor) -> Tensor:
    values[3, 5] += values.abs().max() / 127
    return values


def flushed(_: object) -> Callable[[Tensor], Tensor]:
    def on_grid(x: Tensor) -> Tensor:
        made, padded = fake_quantize(x, "fp8_e5m2"), functional.pad(x, (0, -x.shape[-1] % 32))
        amax = padded.reshape(*padded.shape[:-1], -1, 32).abs().amax(-1, keepdim=True)
        least = torch.ldexp(torch.ones_like(amax), torch.frexp(amax).exponent - 1 - 15 - 14)  # the smallest normal
        return torch.where(made.abs() < least.expand(*amax.shape[:-1], 32).flatten(-2)[..., : x.shape[-1]], 0.0, made)

    return on_grid


def whole_batch(healthy: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: fake_quantize(x.reshape(1, -1), healthy.format, block_size=x.numel()).reshape(x.shape)


def one_ulp_up(healthy: Any) -> Any:
    old = healthy.parameters
    scale = torch.nextafter(old.scale, torch.tensor(torch.inf))
    return replace(healthy, parameters=integers.IntegerParameters(scale, old.zero_point, old.bits, old.symmetric))


def other_eps(patient: Patient) -> None:
    patient.block.norm.variance_epsilon = 1e-4


def tanh(patient: Patient) -> None:
    class TanhSiLU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.5 * (1 + torch.tanh(x / 2))

    patient.mixer.activation = TanhSiLU()


def cut_scan(u: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    y, h = scans.fast(u, *rest)
    y[:, u.shape[1] // 32 * 32 :] = 0
    return y, h


BREAKS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]], tuple[str, ...], str, str]] = {
    "ties toward zero": (
        INT8,
        lambda: mock.patch.multiple(integers, round_integer=toward_zero, numba_twin=lambda *_: None),
        OWN,
        "corners.changed",
        "in_proj.input at -",
    ),
    "one code": (
        INT8,
        lambda: damaged(weight("in_proj.weight", one_code_up), 1),
        ("layer_1",),
        "weights.changed",
        "weight mixer.in_proj.weight[3, 5]: code 17 -> 18 (1 of 65536 values)",
    ),
    "subnormals flushed": (
        E5M2,
        lambda: damaged(grid("in_proj.input", flushed), 2),
        ("layer_2",),
        "corners.changed",
        "in_proj.input at ",
    ),
    "one scale for the batch": (
        DYNAMIC,
        lambda: damaged(grid("conv1d.input", whole_batch), 1),
        ("layer_1",),
        "corners.changed",
        "conv1d.input at ",
    ),
    "scale one ulp up": (
        INT8,
        lambda: damaged(grid("x_proj.output", one_ulp_up), 1),
        ("layer_1",),
        "corners.changed",
        "x_proj.output at ",
    ),
    "epsilon of the norm": (INT8, lambda: damaged(other_eps, 1), ("layer_1",), "functions.error", "function norm at "),
    "SiLU by tanh": (
        INT8,
        lambda: damaged(tanh, 1),
        ("layer_1",),
        "functions.error",
        "function mixer.activation at ",
    ),
    "end of the scan": (DYNAMIC, lambda: mock.patch.dict(scans.SCANS, {"fast": cut_scan}), OWN, "functions.scan", ""),
}


@pytest.mark.parametrize("name", list(BREAKS))
def test_a_break_is_red_in_its_layer_and_named(gate: SmallGate, name: str) -> None:
    recipe, breaking, layers, figure, line = BREAKS[name]
    healthy = gate.judge_healthy(MODEL, recipe)
    assert {label: one.message for label, one in healthy.items() if one.status != "passed"} == {}
    with breaking():
        outcomes = gate.judge(MODEL, recipe)
    red = [label for label in OWN if outcomes[label].status == "failed"]
    assert red == list(layers)
    for label in red:
        assert outcomes[label].verdict in ("drift", "changed values")
        assert outcomes[label].figures[figure].moved
        assert outcomes[label].is_own
    assert not line or any(detail.startswith(line) for detail in outcomes[layers[0]].details), outcomes[
        layers[0]
    ].details


TWINS = {
    "definition of integers": (INT8, rounding.ROUNDINGS, {"half_even": lambda x, noise: torch.floor(x)}, "reference"),
    "definition of MX": (E5M2, vars(reference), {"round_elements": lambda y, *rest: torch.zeros_like(y)}, "reference"),
    "torch operations": (E5M2, vars(fast), {"round_magnitudes_": lambda y, *rest: y.zero_()}, "torch"),
}


@pytest.mark.parametrize("name", list(TWINS))
def test_a_twin_that_does_no_work_here_is_compared_too(gate: SmallGate, name: str) -> None:
    """Kernels do the work on the CPU: what else computes the grids is wrong somewhere else, and is red here."""
    recipe, place, changed, how = TWINS[name]
    try:
        twin_corners.cache_clear()
        with mock.patch.dict(place, changed):
            outcomes = gate.judge(MODEL, recipe)
    finally:
        twin_corners.cache_clear()
    for label in OWN:
        assert [name for name, one in outcomes[label].figures.items() if one.moved] == ["corners.twins"]
    cause = outcomes["layer_0"].cause
    assert cause.startswith(f"layer_0; site in_proj.input; implementation '{how}' makes "), cause
    assert ", the model " in cause


@pytest.fixture(scope="module")
def trace() -> LayerTrace:
    loaded = load_model(MODEL)
    reference = run_reference(loaded.model, [torch.arange(64).reshape(2, 32)], ["all"])
    return LayerTrace(
        loaded.model, Recipe("2-1", "int8"), reference, calibrate_on(loaded, "calibration", 2, 64), "layer_1"
    )


LLAMA = ("linear_w", "linear_wa", "bf16")


@pytest.mark.parametrize("format", ["int8", "fp4_e2m1", "mxint8", "nvfp4", "fp8_e5m2"])
@pytest.mark.parametrize(("model", "mode"), [(MODEL, "0"), (MODEL, "bf16"), *(("tiny-llama", one) for one in LLAMA)])
def test_the_definitions_have_the_digests_of_a_healthy_copy(model: str, mode: str, format: str) -> None:
    """Otherwise no failure could name what changed."""
    loaded = load_model(model)
    recipe = Recipe(mode) if mode == "bf16" else Recipe(mode, format)
    scales = calibrate_on(loaded, "calibration", 1, 32)
    reference = run_reference(loaded.model, [torch.arange(32).reshape(1, 32)], ["all"])
    layer = LayerTrace(loaded.model, recipe, reference, scales, "layer_1")
    found = weight_digests(layer.twin.get_submodule(layer.module))
    defined = {name: ExactLayer(layer).defined_weight(name) for name in found}
    assert {name: digest_of(one) for name, one in defined.items() if one is not None} == found
    assert differing_sites(corner_answers(layer.twin, recipe, scales)) == []


def test_a_definition_that_changed_too_is_said(trace: LayerTrace) -> None:
    name = "mixer.in_proj.weight"
    lines = exact_changes(trace, {"weights": [name]}, {f"weights.{name}": "00000000"})
    assert lines == [
        f"weight {name}: its definition changed too (format table, grid or float weights); "
        "it is what its definition gives now"
    ]
    site = "mixer.in_proj.input"
    assert exact_changes(trace, {"corners": [site]}, {f"corners.{site}": "00000000"}) == [
        "in_proj.input: its definition changed too (format table, grid or float weights); "
        "it is what its definition gives now"
    ]


def test_tensors_that_come_or_go_are_named(trace: LayerTrace) -> None:
    gone = {"weights": ["mixer.none"], "corners": ["mixer.no.site"]}
    assert exact_changes(trace, gone, {"weights.mixer.none": "0", "corners.mixer.no.site": "0"}) == [
        "weight mixer.none: the copy has no such tensor",
        "no.site: no grid is asked",
    ]
    new = {"weights": ["mixer.D"], "corners": ["mixer.in_proj.input"]}
    assert exact_changes(trace, new, {}) == [
        "weight mixer.D: the baseline has no such tensor",
        "in_proj.input: the baseline has no such site",
    ]


def test_a_mode_of_a_user_has_no_definition(trace: LayerTrace) -> None:
    register_mode("exact_trial", lambda model, format, calibration: model)
    try:
        own = replace(trace, recipe=Recipe("exact_trial", "int8"))
        lines = exact_changes(own, {"weights": ["mixer.D"]}, {"weights.mixer.D": "00000000"})
    finally:
        unregister_mode("exact_trial")
    assert lines == ["weight mixer.D: other bits than stored; the mode has no readable definition of it"]


def test_what_cannot_be_named_does_not_hide_the_failure(trace: LayerTrace) -> None:
    with mock.patch.object(ExactLayer, "changes", side_effect=ValueError("no such thing")):
        assert exact_changes(trace, {}, {}) == ["what changed cannot be named: no such thing"]


def test_a_grid_that_is_not_its_definition_is_never_stored(gate: SmallGate, tmp_path: Path) -> None:
    with (
        damaged(grid("x_proj.output", one_ulp_up), 1),
        pytest.raises(AssertionError, match=r"corners\.twins is 1, which"),
    ):
        SmallGate(tmp_path, gate.settings).make_baselines(MODEL, [INT8])


def test_the_sign_of_a_zero_counts() -> None:
    twin = apply(load_model(MODEL).model, recipe := Recipe("2-1", "fp8_e4m3"))
    answers = corner_answers(twin, recipe, None)
    assert differing_sites(answers) == []
    wrong = [replace(one, answer=torch.where(one.answer == 0, 0.0, one.answer)) for one in answers]
    assert len(differing_sites(wrong)) == len({one.site for one in answers})
