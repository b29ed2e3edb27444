"""Values that are not finite, zeros, single numbers: nothing passes that was not compared, and the side is named."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from probe import DeviceComparison, Recipe, diff
from probe.recordings import Recording
from tests.comparisons.devices.recordings import IDS, network, noisy, recorded

NAN, INF = torch.nan, torch.inf


def compared(tmp_path: Path, x: dict[str, Tensor], y: dict[str, Tensor]) -> DeviceComparison:
    return diff(recorded(tmp_path / "a", x), recorded(tmp_path / "b", y))


def with_values(place: tuple[Any, ...], value: float, *, layer: int = 2) -> dict[str, Tensor]:
    """The network, with `value` at a place of one layer."""
    tensors = network()
    name = f"layer_{layer}.output"
    tensors[name] = tensors[name].clone()
    tensors[name][place] = value
    return tensors


def ending_in(value: float, *, start: int = 2) -> dict[str, Tensor]:
    """The network, with `value` everywhere from a layer on."""
    tensors = network()
    names = list(tensors)
    return {n: torch.full_like(x, value) if names.index(n) > start else x for n, x in tensors.items()}


@pytest.mark.parametrize("start", [-1, 2])
def test_nan_on_both_sides_is_never_a_pass(tmp_path: Path, start: int) -> None:
    found = compared(tmp_path, ending_in(NAN, start=start), ending_in(NAN, start=start))
    first = "embedding" if start < 0 else "layer_2"
    assert (found.verdict.kind, found.verdict.layer, found.verdict.sure) == ("not compared", first, "certain")
    assert found.verdict.cause == (
        "not finite on both sides: nothing was compared (NaN on both sides in all of 576 values)"
    )
    assert not found.passed
    last = found.layers[-1]
    assert (last.compared, last.nan_both, last.exceeded) == (0.0, 768, ("finite",))
    judged = sum(layer.compared == 1 for layer in found.layers)
    assert f"of {judged} of 6 tensors at least 90% was compared" in found.verdict.evidence


def test_nan_in_all_but_one_element_is_no_noise(tmp_path: Path) -> None:
    x, y = with_values((...,), NAN), with_values((...,), NAN)
    x["layer_2.output"][0, 0, 0], y["layer_2.output"][0, 0, 0] = 1.0, 1.0 + 2.0**-23
    found = compared(tmp_path, x, y)
    assert (found.verdict.kind, found.verdict.layer) == ("not compared", "layer_2")
    assert found.verdict.cause == (
        "not finite on both sides: NaN on both sides in 575 of 576 values, too little is left to compare"
    )
    assert any(
        "575 NaN and 0 Inf on both sides of 576 values, 0.17% compared" in line for line in found.verdict.evidence
    )
    assert found.layers[3].compared == pytest.approx(1 / 576)
    assert not found.passed


@pytest.mark.parametrize("noise", [0.0, 2.0**-23], ids=["identical", "noise"])
def test_one_nan_on_both_sides_fails_and_the_rest_is_reported(tmp_path: Path, noise: float) -> None:
    x = with_values((1, 2, 3), NAN)
    found = compared(tmp_path, x, noisy(x, noise))
    assert (found.verdict.kind, found.verdict.layer) == ("not compared", "layer_2")
    assert found.verdict.cause == (
        "not finite on both sides: NaN on both sides in 1 of 576 values, the rest was compared"
    )
    assert any(line.startswith("what was compared differs by at most ") for line in found.verdict.evidence)
    assert not found.passed
    assert found.layers[3].exceeded == ("finite",)


def test_a_fault_is_named_although_other_values_are_nan_on_both_sides(tmp_path: Path) -> None:
    """A channel that is NaN in every token leaves the other channels to be compared."""
    x, y = (with_values((..., 5), NAN, layer=1) for _ in range(2))
    y["layer_1.output"] = y["layer_0.output"] + 2 * (y["layer_1.output"] - y["layer_0.output"])
    found = compared(tmp_path, x, y)
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "layer_1")
    assert found.verdict.cause == "what it adds is 2 times A's: the scale is off by a factor of 2^1"
    assert found.layers[2].compared == pytest.approx(23 / 24)


def test_a_fault_before_nan_on_both_sides_is_the_verdict(tmp_path: Path) -> None:
    x, y = ending_in(NAN), ending_in(NAN)
    y["layer_1.output"] = -y["layer_1.output"]
    found = compared(tmp_path, x, y)
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "layer_1")


def test_after_nan_on_both_sides_nothing_is_blamed(tmp_path: Path) -> None:
    x, y = with_values((...,), NAN, layer=1), with_values((...,), NAN, layer=1)
    y["layer_3.output"] = -y["layer_3.output"]
    found = compared(tmp_path, x, y)
    assert (found.verdict.kind, found.verdict.layer) == ("not compared", "layer_1")


def test_equal_infinities_in_masked_logits_pass_and_are_reported(tmp_path: Path) -> None:
    x, y = network(), noisy(network())
    for tensors in (x, y):
        tensors["logits"] = tensors["logits"].clone()
        tensors["logits"][..., -3:] = -INF  # a padded vocabulary
    found = compared(tmp_path, x, y)
    assert (found.verdict.kind, found.passed) == ("dtype noise", True)
    words = "0 NaN and 72 Inf on both sides of 768 values, 90.62% compared"
    assert any(words in line for line in found.verdict.evidence)
    same = compared(tmp_path / "same", x, x)
    assert (same.verdict.kind, same.passed) == ("identical", True)
    assert any(words in line for line in same.verdict.evidence)


def test_noise_is_measured_beside_a_masked_channel(tmp_path: Path) -> None:
    """Every row has an infinity: the others still show the fault."""
    x, y = network(), network()
    for tensors in (x, y):
        tensors["logits"] = tensors["logits"].clone()
        tensors["logits"][..., -1] = -INF
    y["logits"] *= 1.25
    found = compared(tmp_path, x, y)
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "logits")
    assert found.verdict.cause.startswith("its output is 1.25 times A's")


def test_infinity_in_most_of_a_tensor_on_both_sides_is_not_compared(tmp_path: Path) -> None:
    found = compared(tmp_path, ending_in(INF), ending_in(INF))
    assert (found.verdict.kind, found.verdict.layer) == ("not compared", "layer_2")
    assert found.verdict.cause == (
        "not finite on both sides: nothing was compared (Inf on both sides in all of 576 values)"
    )
    assert found.layers[3].exceeded == ("compared",)
    assert not found.passed


@pytest.mark.parametrize(
    ("on_a", "on_b", "cause", "reason"),
    [
        (NAN, 0.5, "NaN on A where B is finite, in one value", "finite on one device only"),
        (INF, 0.5, "Inf on A where B is finite, in one value", "finite on one device only"),
        (0.5, NAN, "NaN on B where A is finite, in one value", "finite on one device only"),
        (NAN, INF, "NaN on A and Inf on B at the same places, in one value", "NaN or Inf on both, but not the same"),
        (INF, -INF, "infinities of other signs at the same places, in one value", "NaN or Inf on both, but not the"),
        (NAN, 65504.0, "saturates instead of NaN or Inf: +-65504 on B, the largest float16", "one device only"),
        (65504.0, INF, "Inf on B where A is finite, in one value: A saturates there: +-65504 on A, the", "one device"),
    ],
)
def test_the_side_that_is_not_finite_is_named(
    tmp_path: Path, on_a: float, on_b: float, cause: str, reason: str
) -> None:
    found = compared(tmp_path, with_values((1, 2, 3), on_a), with_values((1, 2, 3), on_b))
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "layer_2")
    assert found.verdict.cause.startswith(cause)
    assert reason in found.verdict.evidence[0]
    assert found.layers[3].lost == 1
    assert not found.passed


def test_saturation_needs_most_of_the_values_at_one_end(tmp_path: Path) -> None:
    x, y = with_values((0, slice(0, 4), slice(None)), NAN), with_values((0, 0, 0), 0.0)
    found = compared(tmp_path, x, y)
    assert found.verdict.cause == "NaN on A where B is finite, in 96 values"
    y["layer_2.output"][0, 0, :10] = 65504.0
    assert compared(tmp_path / "few", x, y).verdict.cause == "NaN on A where B is finite, in 96 values"
    y["layer_2.output"][0, :4] = 65504.0
    y["layer_2.output"][0, 0, 0] = 1.0
    assert compared(tmp_path / "most", x, y).verdict.cause.startswith("saturates instead of NaN or Inf: +-65504 on B")


def test_nan_on_either_side_is_counted_whole(tmp_path: Path) -> None:
    x, y = with_values((0, 0, slice(0, 3)), NAN), with_values((1, slice(None), slice(None)), NAN)
    found = compared(tmp_path, x, y)
    assert found.verdict.cause == ("NaN on B where A is finite, in 192 values; NaN on A where B is finite, in 3 values")
    turned = compared(tmp_path / "turned", y, x)
    assert turned.verdict.cause == (
        "NaN on A where B is finite, in 192 values; NaN on B where A is finite, in 3 values"
    )


def test_a_device_of_nan_is_not_said_to_run_the_float_model(tmp_path: Path, a: Recording) -> None:
    recipe = Recipe("2-1", "int8")
    emulated = noisy(network(), 0.02, seed=5)
    e = recorded(tmp_path / "e", emulated, recipe=recipe)
    broken = {name: torch.full_like(x, NAN) for name, x in emulated.items()}
    verdict = diff(e, recorded(tmp_path / "d", broken, recipe=recipe), reference=a).verdict
    assert (verdict.kind, verdict.layer) == ("device fault", "embedding")
    assert verdict.cause == "NaN on B where A is finite, in 576 values"


def test_a_reference_of_nan_measures_nothing(tmp_path: Path) -> None:
    recipe = Recipe("2-1", "int8")
    x = noisy(network(), 0.02, seed=5)
    reference = recorded(tmp_path / "r", {name: torch.full_like(t, NAN) for name, t in network().items()})
    e, d = (recorded(tmp_path / n, t, recipe=recipe) for n, t in (("e", x), ("d", noisy(x))))
    found = diff(e, d, reference=reference)
    assert {(layer.recipe_error, layer.device_error, layer.recipe_errors) for layer in found.layers} == {
        (None, None, None)
    }
    assert found.verdict.kind == "dtype noise"


def test_tensors_of_nan_are_the_worst_in_both_rankings(tmp_path: Path) -> None:
    x, y = with_values((...,), NAN), with_values((...,), NAN)
    y["layer_0.output"] = y["layer_0.output"] + 0.5
    found = compared(tmp_path, x, y)
    assert found.layers[3].cosine is None
    assert found.worst_by_max_abs[0].label == found.worst_by_cosine[0].label == "layer_2"


def test_zeros_on_both_sides_are_reported_and_nothing_but_zeros_fails(tmp_path: Path) -> None:
    x = with_values((...,), 0.0)
    found = compared(tmp_path, x, x)
    assert (found.verdict.kind, found.passed) == ("identical", True)
    assert "all zeros on both sides: layer_2" in found.verdict.evidence
    assert found.worst_by_cosine[0].label != "layer_2"  # the same zeros have no cosine, and do not differ
    dead = {name: torch.zeros_like(t) for name, t in x.items()}
    nothing = compared(tmp_path / "dead", dead, dead)
    assert (nothing.verdict.kind, nothing.verdict.cause) == ("not compared", "nothing but zeros was recorded")
    assert nothing.verdict.evidence[0] == "every value of 6 tensors is 0 on both sides"
    assert not nothing.passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_where_a_has_only_zeros_are_a_fault_in_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    x = {name: t.to(dtype) for name, t in network().items()}
    y = dict(x)
    x["layer_2.output"] = torch.zeros_like(x["layer_2.output"])
    found = compared(tmp_path, x, y)
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "layer_2")
    turned = compared(tmp_path / "turned", y, x)
    assert (turned.verdict.kind, turned.verdict.layer, turned.verdict.cause) == (
        ("device fault", "layer_2", "gives only zeros")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_adds_nothing_on_a_and_something_on_b_is_a_fault(tmp_path: Path, dtype: torch.dtype) -> None:
    x = {name: t.to(dtype) for name, t in network().items()}
    y = dict(x)
    x["layer_2.output"] = x["layer_1.output"]
    found = compared(tmp_path, x, y)
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "layer_2")


@pytest.mark.parametrize("scale", [1e-200, 1e200, 1e-310])
def test_sizes_near_the_ends_of_float64_are_compared(tmp_path: Path, scale: float) -> None:
    x = {name: t.double() * scale for name, t in network().items()}
    y = {name: -t if name == "layer_2.output" else t for name, t in x.items()}
    found = compared(tmp_path, x, y)
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "layer_2")
    assert not found.passed


def test_subnormals_are_values(tmp_path: Path) -> None:
    x = {name: t * 1e-40 for name, t in network().items()}
    assert x["layer_2.output"].any()
    y = {name: torch.zeros_like(t) if name == "layer_2.output" else t for name, t in x.items()}
    found = compared(tmp_path, x, y)
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "layer_2")
    assert found.verdict.cause == "subnormals are flushed to zero: values below 1.2e-38 are 0 on B (float32)"


def test_zeros_of_the_other_sign_are_noise(tmp_path: Path) -> None:
    x, y = with_values((0, 0, 0), 0.0), with_values((0, 0, 0), -0.0)
    found = compared(tmp_path, x, y)
    assert (found.verdict.kind, found.passed) == ("dtype noise", True)


def test_one_number_is_compared_but_explains_nothing(tmp_path: Path) -> None:
    ids = IDS[:1]
    x, y = ({"layer_0.output": torch.tensor([value])} for value in (1.0, 1.5))
    one, other = recorded(tmp_path / "a", x, ids=ids), recorded(tmp_path / "b", y, ids=ids)
    found = diff(one, other)
    assert (found.verdict.kind, found.verdict.cause, found.verdict.sure) == (
        ("device fault", "kind not recognised", "likely")
    )
    assert diff(one, one).verdict.kind == "identical"
    close = recorded(tmp_path / "c", {"layer_0.output": torch.tensor([1.0 + 2.0**-23])}, ids=ids)
    near = diff(one, close)
    assert (near.verdict.kind, near.verdict.sure) == ("dtype noise", "likely")


def test_what_is_not_recognised_is_never_certain(tmp_path: Path) -> None:
    x, y = network(), network()
    generator = torch.Generator().manual_seed(3)
    added = y["layer_2.output"] - y["layer_1.output"]
    y["layer_2.output"] = y["layer_1.output"] + added * (1 + 0.3 * torch.randn(added.shape, generator=generator))
    verdict = compared(tmp_path, x, y).verdict
    assert (verdict.kind, verdict.cause, verdict.sure) == ("device fault", "kind not recognised", "likely")
    y["layer_2.output"] = y["layer_1.output"] + torch.randn(added.shape, generator=generator)
    verdict = compared(tmp_path / "unrelated", x, y).verdict
    assert verdict.cause.startswith("unrelated to the expected values")
    assert verdict.sure == "likely"


def test_only_the_logits_in_common(tmp_path: Path) -> None:
    x, y = network(), noisy(network())
    a = recorded(tmp_path / "a", x)
    b = recorded(tmp_path / "b", {"logits": y["logits"], "layer_9.output": y["layer_3.output"]})
    found = diff(a, b)
    assert (found.verdict.kind, [layer.label for layer in found.layers]) == ("dtype noise", ["logits"])
    assert found.only_one_has == {"A": 5, "B": 1}
    swapped = recorded(tmp_path / "c", {"logits": x["logits"][[1, 0, 2]], "layer_9.output": x["layer_3.output"]})
    verdict = diff(a, swapped).verdict  # whether the device or the capture moved them is not known
    assert (verdict.kind, verdict.sure) == ("mismatched capture", "likely")
    rough = {"logits": (x["logits"] * (1 + 2.0**-9 * torch.randn(3, 8, 32))), "layer_9.output": x["layer_3.output"]}
    verdict = diff(a, recorded(tmp_path / "d", rough)).verdict
    assert verdict.sure == "possible"
    assert verdict.evidence[0].startswith("logits differs by ")


def test_figures_are_of_all_elements(tmp_path: Path) -> None:
    x, y = with_values((0, 0, slice(0, 4)), NAN), with_values((0, 0, slice(2, 6)), NAN)
    x["layer_2.output"][1, 0, 0], y["layer_2.output"][1, 0, 0] = INF, INF
    layer = compared(tmp_path, x, y).layers[3]
    assert (layer.nan_a, layer.nan_b, layer.nan_both, layer.inf_both, layer.lost) == (4, 4, 2, 1, 4)
    assert layer.compared == pytest.approx((576 - 7) / 576)
    assert math.isclose(layer.within, (576 - 6) / 576)
