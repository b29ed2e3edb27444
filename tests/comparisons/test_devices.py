"""`diff` and `probe diff`: figures, inputs, limits, choices, what is written, and what is refused."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from probe import DeviceComparison, Recipe, diff, read_recording
from probe.commands import main
from probe.comparisons.devices import layers as device_layers, structure as device_structure
from probe.comparisons.devices.layers import Limits
from probe.recordings import Recording, RecordingError
from tests.comparisons.device_recordings import IDS, as_scripts_leave_it, network, noisy, recorded


@pytest.fixture
def a(tmp_path: Path) -> Recording:
    return recorded(tmp_path / "a", network())


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(one) for one in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---------------------------------------------------------------------------------------------------- figures


def oracle(a: np.ndarray, b: np.ndarray, rtol: float, atol: float) -> dict[str, float]:
    """numpy's own, over what is finite on both sides."""
    good = np.isfinite(a) & np.isfinite(b)
    within = np.isclose(b, a, rtol=rtol, atol=atol).mean()
    a, b = a[good], b[good]
    d = np.abs(b - a)
    relative = d / (np.abs(a) + 1e-8)
    return {
        "max_abs": d.max(),
        "mean_abs": d.mean(),
        "median_abs": np.median(d),
        "max_relative": relative.max(),
        "mean_relative": relative.mean(),
        "median_relative": np.median(relative),
        "within": within,
        "cosine": (a @ b) / np.sqrt((a @ a) * (b @ b)),
        "correlation": np.corrcoef(a, b)[0, 1],
    }


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "with NaN and Inf"])
@pytest.mark.parametrize("chunk", [2**18, 64], ids=["one chunk", "many chunks"])
def test_the_figures_of_every_layer_are_numpys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: bool, chunk: int
) -> None:
    monkeypatch.setattr(device_layers, "CHUNK", chunk)
    monkeypatch.setattr(device_structure, "CHUNK", chunk)
    x, y = network(), noisy(network(), 1e-3)
    x["layer_1.output"][0, 0, 0] = 0.0
    if odd:
        x["layer_2.output"][0, 1, 2], y["layer_2.output"][0, 1, 2] = torch.inf, torch.inf
        x["layer_2.output"][0, 1, 3], y["layer_2.output"][0, 1, 3] = torch.inf, -torch.inf
        y["layer_2.output"][2, 1, 3] = torch.nan
    found = diff(recorded(tmp_path / "a", x), recorded(tmp_path / "b", y), rtol=3e-3, atol=1e-4)
    assert [layer.name for layer in found.layers] == list(x)
    for layer in found.layers:
        expected = oracle(x[layer.name].double().numpy().ravel(), y[layer.name].double().numpy().ravel(), 3e-3, 1e-4)
        for name, value in expected.items():
            assert getattr(layer, name) == pytest.approx(value, rel=1e-9, abs=1e-15), (layer.name, name)
    second = found.layers[3]
    counts = (second.nan_a, second.inf_a, second.nan_b, second.inf_b, second.lost)
    assert counts == ((0, 2, 1, 2, 2) if odd else (0, 0, 0, 0, 0))
    assert ("finite" in second.exceeded) is odd


def test_layers_come_in_numeric_order(tmp_path: Path) -> None:
    tensors = network(layers=12)
    a, b = (as_scripts_leave_it(tmp_path / name, tensors) for name in "ab")
    labels = [layer.label for layer in diff(a, b).layers]
    assert labels == ["embedding", *(f"layer_{i}" for i in range(12)), "logits"]


def test_the_five_worst_by_two_rankings(tmp_path: Path, a: Recording) -> None:
    tensors = network()
    tensors["layer_1.output"] = tensors["layer_1.output"].clone()
    tensors["layer_1.output"][0, 0, 0] += 50
    tensors["layer_3.output"] = -tensors["layer_3.output"]
    found = diff(a, recorded(tmp_path / "b", tensors))
    assert [layer.label for layer in found.worst_by_max_abs][:2] == ["layer_1", "layer_3"]
    assert [layer.label for layer in found.worst_by_cosine][:2] == ["layer_3", "layer_1"]
    assert len(found.worst_by_max_abs) == len(found.worst_by_cosine) == 5


def test_what_is_finite_on_one_side_only_is_the_worst_of_all(tmp_path: Path, a: Recording) -> None:
    tensors = network()
    tensors["layer_2.output"] = torch.full_like(tensors["layer_2.output"], torch.nan)
    tensors["layer_3.output"] = -tensors["layer_3.output"]
    found = diff(a, recorded(tmp_path / "b", tensors))
    assert found.worst_by_max_abs[0].label == found.worst_by_cosine[0].label == "layer_2"
    assert (found.layers[3].max_abs, found.layers[3].within) == (None, 0.0)
    assert found.layers[3].exceeded == ("max_abs", "mean_abs", "cosine", "finite")


@pytest.mark.parametrize(
    ("value", "cause"), [(torch.nan, "NaN on B where A is finite, in one value"), (-torch.inf, "Inf on B")]
)
def test_one_value_that_is_not_finite_is_a_fault_where_all_else_agrees(
    tmp_path: Path, a: Recording, value: float, cause: str
) -> None:
    tensors = network()
    tensors["layer_2.output"] = tensors["layer_2.output"].clone()
    tensors["layer_2.output"][1, 2, 3] = value
    verdict = diff(a, recorded(tmp_path / "b", tensors)).verdict
    assert (verdict.kind, verdict.layer, verdict.sure) == ("device fault", "layer_2", "certain")
    assert verdict.cause.startswith(cause)
    assert verdict.evidence[0] == "layer_2 has 1 of 576 values that are finite on one device only"


# ----------------------------------------------------------------------------------------------------- inputs


def test_other_tokens_are_a_mismatched_capture_and_nothing_is_compared(tmp_path: Path, a: Recording) -> None:
    other = IDS.clone()
    other[1, 5], other[2, 0] = 7, 9
    found = diff(a, recorded(tmp_path / "b", network(), ids=other))
    said = f"2 of 24 token ids differ, the first in sample 1 at position 5: {int(IDS[1, 5])} on A, 7 on B"
    assert (found.verdict.kind, found.verdict.sure, found.layers) == ("mismatched capture", "certain", ())
    assert found.inputs.said == said
    assert said in found.verdict.evidence
    assert not found.passed


def test_the_same_samples_in_another_order_are_told_so(tmp_path: Path, a: Recording) -> None:
    order = torch.tensor([2, 0, 1])
    tensors = {name: x[order] for name, x in network().items()}
    found = diff(a, recorded(tmp_path / "b", tensors, ids=IDS[order]))
    assert found.verdict.kind == "mismatched capture"
    assert found.inputs.said.endswith("; the samples are the same ones in another order")


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ((slice(2), slice(None)), "A has 3 samples, B has 2"),
        ((slice(None), slice(7)), "A has 8 tokens in a sample, B has 7"),
    ],
)
def test_another_number_of_samples_or_tokens_is_never_cropped(
    tmp_path: Path, a: Recording, cut: tuple[slice, slice], said: str
) -> None:
    tensors = {name: x[cut].clone() for name, x in network().items()}
    found = diff(a, recorded(tmp_path / "b", tensors, ids=IDS[cut].clone()))
    assert (found.verdict.kind, found.inputs.said, found.layers) == ("mismatched capture", said, ())


def test_without_ids_the_fingerprints_are_compared(tmp_path: Path, a: Recording) -> None:
    def forget(recording: Recording, fingerprint: str | None) -> Recording:
        tokens = dataclasses.replace(recording.manifest.tokens, file=None, fingerprint=fingerprint)
        return Recording(recording.folder, dataclasses.replace(recording.manifest, tokens=tokens))

    b = recorded(tmp_path / "b", network())
    prints = a.manifest.tokens.fingerprint
    assert diff(forget(a, prints), b).inputs.said == f"the fingerprints of the token ids agree: {prints}"
    found = diff(forget(a, "other"), b)
    assert found.inputs.said == f"the fingerprints of the token ids differ: other on A, {prints} on B"
    assert found.verdict.kind == "mismatched capture"
    unknown = diff(forget(a, None), b)
    assert unknown.inputs.status == "unknown"
    assert unknown.inputs.said == "A did not keep the token ids: whether inputs agree is not known"
    assert unknown.verdict.kind == "identical"


def test_another_shape_is_a_mismatched_capture(tmp_path: Path, a: Recording) -> None:
    tensors = {name: x[..., :16].clone() for name, x in network().items()}
    found = diff(a, recorded(tmp_path / "b", tensors))
    assert (found.verdict.kind, found.verdict.layer, found.layers) == ("mismatched capture", "embedding", ())
    assert found.verdict.cause == "the shapes differ: nothing is cropped"
    assert found.verdict.evidence == ("embedding is [3, 8, 24] on A, [3, 8, 16] on B",)


def test_an_embedding_that_differs_for_the_same_tokens_is_a_fault_of_the_embedding(tmp_path: Path) -> None:
    x, y = network(), network()
    y["embedding.output"] = y["embedding.output"] * 1.5
    found = diff(recorded(tmp_path / "a", x), recorded(tmp_path / "b", y))
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "embedding")
    assert found.verdict.cause == "its output is 1.5 times A's: the scale is off by +50.00%"


def test_without_ids_the_embedding_tells_another_prompt_and_another_order(tmp_path: Path) -> None:
    a = as_scripts_leave_it(tmp_path / "a", network())
    words = {int(token): network()["embedding.output"].reshape(-1, 24)[i] for i, token in enumerate(IDS.reshape(-1))}
    other = torch.stack([words[int(token)] for token in (IDS * 7 % 19).reshape(-1)]).view(3, 8, 24)
    prompt = diff(a, as_scripts_leave_it(tmp_path / "b", {**network(seed=5), "embedding.output": other})).verdict
    assert (prompt.kind, prompt.layer, prompt.sure) == ("mismatched capture", "embedding", "likely")
    assert prompt.cause == "the inputs differ: another prompt"
    moved = {name: x[[1, 2, 0]] for name, x in network().items()}
    order = diff(a, as_scripts_leave_it(tmp_path / "c", moved)).verdict
    assert (order.kind, order.cause) == ("mismatched capture", "the order of the samples differs")
    late = {name: x.roll(1, 1) for name, x in network().items()}
    shift = diff(a, as_scripts_leave_it(tmp_path / "d", late)).verdict
    assert shift.kind == "mismatched capture"
    assert shift.cause == "the tokens of B come one place later than A's: padding or a begin token"


def test_layers_under_other_names_are_a_mismatched_capture_and_a_skipped_layer_is_a_fault(
    tmp_path: Path, a: Recording
) -> None:
    x = network()
    shifted = {**x, "layer_1.output": x["layer_0.output"], "layer_2.output": x["layer_1.output"]}
    shifted["layer_3.output"] = x["layer_2.output"]
    verdict = diff(a, recorded(tmp_path / "b", shifted)).verdict
    assert (verdict.kind, verdict.layer) == ("mismatched capture", "layer_1")
    assert verdict.cause == "the layers are shifted: layer_1 of B is layer_0 of A, and so on"
    swapped = {**x, "layer_1.output": x["layer_2.output"]}
    verdict = diff(a, recorded(tmp_path / "c", swapped)).verdict
    assert verdict.cause == "layer_1 of B is layer_2 of A: layers under other names"
    last = {**x, "layer_3.output": x["layer_2.output"]}
    verdict = diff(a, recorded(tmp_path / "d", last)).verdict
    assert (verdict.kind, verdict.layer) == ("device fault", "layer_3")
    assert verdict.cause == "gives its input back on B: the layer is skipped"


def test_a_layer_that_adds_one_token_late_is_a_fault(tmp_path: Path, a: Recording) -> None:
    x = network()
    added = x["layer_2.output"] - x["layer_1.output"]
    x["layer_2.output"] = x["layer_1.output"] + added.roll(1, 1)
    verdict = diff(a, recorded(tmp_path / "b", x)).verdict
    assert (verdict.kind, verdict.layer) == ("device fault", "layer_2")
    assert verdict.cause == "what it adds comes one token later than on A"


@pytest.mark.parametrize(("size", "kind"), [(3e-7, "dtype noise"), (6e-6, "device fault")])
def test_the_line_between_noise_and_fault_is_where_the_figures_say(
    tmp_path: Path, a: Recording, size: float, kind: str
) -> None:
    """Noise without structure in what layer_2 adds; what sound devices stay below is 1e-6 there."""
    x = network()
    added = (x["layer_2.output"].double() - x["layer_1.output"]) * size
    error = added * torch.randn(added.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x["layer_2.output"] = (x["layer_2.output"] + error).float()
    found = diff(a, recorded(tmp_path / "b", x), layers="layer_[012]")
    assert found.layers[2].noise == pytest.approx(1.1e-6, rel=0.3)
    assert (found.verdict.kind, found.verdict.layer) == (kind, "layer_2")


# ----------------------------------------------------------------------------------------------------- limits


def test_limits_decide_and_can_be_changed(tmp_path: Path, a: Recording) -> None:
    tensors = network()
    tensors["layer_3.output"] = tensors["layer_3.output"] + 2.0**-8  # 0.0039, constant
    b = recorded(tmp_path / "b", tensors)
    found = diff(a, b)
    assert found.layers[4].exceeded == ("mean_abs",)
    wide = diff(a, b, limits=Limits(max_abs=1, mean_abs=1, cosine=0))
    assert not any(layer.exceeded for layer in wide.layers)
    assert wide.verdict.kind == "device fault"
    assert not wide.passed  # a fault does not pass, whatever the limits
    assert diff(a, b, limits=Limits(max_abs=1e-3)).layers[4].exceeded == ("max_abs", "mean_abs")
    close = Limits(max_abs=1, mean_abs=1, cosine=1)
    assert diff(a, b, limits=close).layers[4].exceeded == ("cosine",)


def test_a_figure_at_its_limit_has_not_kept_it(tmp_path: Path) -> None:
    zeros, ones = torch.zeros(3, 8, 4), torch.full((3, 8, 4), 0.5)
    a = recorded(tmp_path / "a", {"layer_0.output": zeros})
    b = recorded(tmp_path / "b", {"layer_0.output": ones})
    found = diff(a, b, limits=Limits(max_abs=0.5, mean_abs=0.51, cosine=0))
    assert found.layers[0].exceeded == ("max_abs", "cosine")  # the cosine of zeros is undefined


def test_noise_within_the_limits_passes(tmp_path: Path, a: Recording) -> None:
    found = diff(a, recorded(tmp_path / "b", noisy(network())))
    assert found.passed
    assert (found.verdict.kind, found.verdict.layer) == ("dtype noise", "layer_0")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_abs": -1.0}, "the limit max_abs is -1.0. Expected a number, 0 or more."),
        ({"mean_abs": math.nan}, "the limit mean_abs is nan. Expected a number, 0 or more."),
        ({"cosine": 1.5}, "the limit cosine is 1.5. Expected -1 to 1."),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(limits: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match="limit") as caught:
        Limits(**limits)
    assert str(caught.value) == message


def test_tolerances_must_be_numbers(a: Recording) -> None:
    with pytest.raises(ValueError, match=r"rtol is -1. Expected a number, 0 or more."):
        diff(a, a, rtol=-1)
    with pytest.raises(ValueError, match=r"atol is nan. Expected a number, 0 or more."):
        diff(a, a, atol=math.nan)


# ---------------------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("pattern", "labels"),
    [
        ("layer_*", ["layer_0", "layer_1", "layer_2", "layer_3"]),
        ("layer_[12]", ["layer_1", "layer_2"]),
        ("layer_1", ["layer_1"]),
        (r"_(0|3)$", ["layer_0", "layer_3"]),
        ("logits", ["logits"]),
    ],
)
def test_layers_by_glob_or_regular_expression(a: Recording, pattern: str, labels: list[str]) -> None:
    assert [layer.label for layer in diff(a, a, layers=pattern).layers] == labels


def test_a_pattern_that_matches_nothing_is_refused(a: Recording) -> None:
    names = "embedding, layer_0, layer_1, layer_2, layer_3, logits"
    with pytest.raises(ValueError, match="matches none") as caught:
        diff(a, a, layers="block_*")
    assert str(caught.value) == (
        f"layers 'block_*' matches none of {names}. Give a glob such as 'layer_*', or a regular expression."
    )
    with pytest.raises(ValueError, match=r"and is no regular expression \(missing \), unterminated"):
        diff(a, a, layers="(")


def test_a_chosen_layer_is_judged_beside_what_it_was_given(tmp_path: Path) -> None:
    """The noise that reaches layer_3 is measured, though only layer_3 is asked for."""
    x = network()
    error = 1e-3 * torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(2))
    y = {name: tensor + error if name in ("layer_2.output", "layer_3.output") else tensor for name, tensor in x.items()}
    a, b = recorded(tmp_path / "a", x), recorded(tmp_path / "b", y)
    assert diff(a, b, layers="layer_3").verdict.kind == "dtype noise"
    assert diff(a, b).verdict.layer == "layer_2"


def test_what_a_layer_makes_of_a_difference_that_it_was_given_is_not_its_fault(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(4)
    matrix = torch.randn(24, 24, generator=draw) / 24**0.5
    given = torch.randn(3, 8, 24, generator=draw)
    other = given * (1 + 1e-2 * torch.randn(given.shape, generator=draw))
    for folder, x in (("a", given), ("b", other)):
        y = x + 0.5 * torch.tanh(x @ matrix)
        recorded(
            tmp_path / folder, {"layer_2.output": x, "layer_3.output": y, "layer_4.output": y + 0.5 * (y @ matrix)}
        )
    found = diff(tmp_path / "a", tmp_path / "b", layers="layer_[34]")
    assert found.layers[0].added > 5e-3
    assert all(layer.beyond_noise < 0.5 for layer in found.layers)
    assert (found.verdict.kind, found.verdict.cause) == ("dtype noise", "rounding and the order of sums")


def test_recipes_are_found_or_asked_for(tmp_path: Path, a: Recording) -> None:
    one = recorded(tmp_path / "b", network(), recipe=Recipe("bf16"))
    assert (diff(a, one).recipe_a, diff(a, one).recipe_b) == ("fp32", "bf16")
    with pytest.raises(ValueError, match="has no mode 'bf16'"):
        diff(a, one, recipe="bf16")
    assert diff(a, one, recipe=("fp32", "bf16")).verdict.kind == "identical"
    with pytest.raises(ValueError, match=r"format 'int8' is given without a recipe\. Give the mode too\."):
        diff(a, one, format="int8")


def test_several_recipes_need_a_choice(tmp_path: Path) -> None:
    from probe.recordings import write_recording

    parts = {name: [x] for name, x in network().items()}
    recipes = [(Recipe("fp32"), parts), (Recipe("2-1", "int8"), parts)]
    both = write_recording(tmp_path / "both", recipes, model="m", batches=[IDS], device="cpu")
    with pytest.raises(RecordingError, match="which are to be compared"):
        diff(both, both)
    assert diff(both, both, recipe="2-1").recipe_b == "mode_2_1-int8"
    assert diff(both, both, recipe="2-1", format="int8").recipe_a == "mode_2_1-int8"


def test_nothing_in_common_is_refused(tmp_path: Path, a: Recording) -> None:
    b = recorded(tmp_path / "b", {"layer_9.output": torch.zeros(3, 8, 4)})
    with pytest.raises(RecordingError, match=r"have no tensor in common: .* Record the same layers on both\."):
        diff(a, b)


def test_what_only_one_has_and_other_weights_are_noted(tmp_path: Path) -> None:
    x = network()
    a = recorded(tmp_path / "a", x, fingerprint="11")
    b = recorded(tmp_path / "b", {name: t for name, t in x.items() if name != "logits"}, fingerprint="22")
    notes = diff(a, b).notes
    assert "only A has logits: not compared" in notes
    assert "the weights differ: fingerprint 11 on A, 22 on B (of another dtype, or of another model)" in notes


# -------------------------------------------------------------------------------------------------- reference


def emulated(size: float = 0.02) -> dict[str, torch.Tensor]:
    return noisy(network(), size, seed=5)


def test_with_a_reference_errors_are_in_units_of_the_recipes_own(tmp_path: Path, a: Recording) -> None:
    recipe = Recipe("2-1", "int8")
    x, y = emulated(), noisy(emulated(), 0.004, seed=6)
    found = diff(recorded(tmp_path / "e", x, recipe=recipe), recorded(tmp_path / "d", y, recipe=recipe), reference=a)
    assert (found.verdict.kind, found.reference) == ("dtype noise", str(a.folder))
    layer, name = found.layers[2], "layer_1.output"
    floats = network()[name]

    def apart(expected: torch.Tensor, output: torch.Tensor) -> float:
        rows = expected.double().square().mean(-1, keepdim=True).sqrt()
        return float((((output - expected).double() / rows).square().mean()).sqrt())

    assert layer.recipe_error == pytest.approx(apart(floats, x[name]), rel=1e-6)
    assert layer.device_error == pytest.approx(apart(floats, y[name]), rel=1e-6)
    assert layer.recipe_errors == pytest.approx(apart(x[name], y[name]) / apart(floats, x[name]), rel=1e-6)
    assert any(said.startswith("the device is at most 0.2") for said in found.verdict.evidence)


def test_a_device_that_runs_the_float_model_is_found(tmp_path: Path, a: Recording) -> None:
    recipe = Recipe("2-1", "int8")
    e, d = (
        recorded(tmp_path / "e", emulated(), recipe=recipe),
        recorded(tmp_path / "d", noisy(network()), recipe=recipe),
    )
    verdict = diff(e, d, reference=a).verdict
    assert (verdict.kind, verdict.layer) == ("device fault", "layer_0")
    assert verdict.cause == "the recipe was not applied: B gives what the float model gives"


def test_a_recipe_that_is_the_float_reference_itself_is_no_recipe(tmp_path: Path, a: Recording) -> None:
    recipe = Recipe("2-1", "int8")
    e, d = recorded(tmp_path / "e", network(), recipe=recipe), recorded(tmp_path / "d", emulated(), recipe=recipe)
    verdict = diff(e, d, reference=a).verdict
    assert (verdict.kind, verdict.cause) == (
        "mismatched capture",
        "A is the float reference itself: its recipe was not applied",
    )


def test_the_reference_must_be_of_the_same_tokens_and_a_float_one(tmp_path: Path, a: Recording) -> None:
    recipe = Recipe("2-1", "int8")
    e = recorded(tmp_path / "e", emulated(), recipe=recipe)
    other = recorded(tmp_path / "o", network(), ids=IDS + 1)
    verdict = diff(e, e, reference=other).verdict
    assert (verdict.kind, verdict.cause) == ("mismatched capture", "the inputs of the reference differ")
    with pytest.raises(RecordingError, match=r"there is no float reference of it. Record fp32 into the reference\."):
        diff(e, e, reference=e)


# ----------------------------------------------------------------------------------------------- command line


def test_exit_code_0_and_json_alone_on_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    recorded(tmp_path / "b", noisy(network()))
    code, out, _ = run(capsys, "diff", a.folder, tmp_path / "b", "--json", "-")
    document = json.loads(out, parse_constant=pytest.fail)
    assert code == 0
    assert document["passed"] is True
    assert document["verdict"]["kind"] == "dtype noise"
    assert list(document["layers"]) == ["embedding", "layer_0", "layer_1", "layer_2", "layer_3", "logits"]
    assert document == json.loads(json.dumps(diff(a, tmp_path / "b").as_dict()))


def test_a_fault_is_told_in_text_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    tensors = network()
    added = tensors["layer_2.output"] - tensors["layer_1.output"]
    tensors["layer_2.output"] = tensors["layer_1.output"] + 2 * added
    recorded(tmp_path / "b", tensors)
    code, out, err = run(capsys, "diff", a.folder, tmp_path / "b")
    assert (code, err) == (1, "")
    (verdict,) = (line for line in out.splitlines() if line.startswith("Verdict"))
    assert verdict == (
        "Verdict: device fault from layer_2 on (certain): what it adds is 2 times A's: the scale is off by a factor "
        "of 2^1"
    )
    assert "Inputs: the token ids agree: 3 samples of 8" in out
    marks = {line.split()[1]: line[0] for line in out.splitlines() if line[:2] in ("> ", "✗ ", "= ")}
    assert marks["layer_2"] == ">"
    assert marks["layer_1"] == "="
    assert "FAILED: 1 of 6 tensors exceed max abs < 0.01, mean abs < 0.001, cosine > 0.99; first layer_2" in out


def test_limits_layers_and_recipes_from_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    recorded(tmp_path / "b", noisy(network()), recipe=Recipe("bf16"))
    common = ("diff", a.folder, tmp_path / "b", "--recipe", "fp32", "bf16", "--layers", "layer_*", "--json", "-")
    assert run(capsys, *common, "--max-abs", "1", "--mean-abs", "1", "--cosine", "0.5")[0] == 0
    code, out, _ = run(capsys, *common, "--max-abs", "1e-9", "--mean-abs", "1e-9", "--cosine", "0.999", "--rtol", "0")
    document = json.loads(out)
    assert code == 1
    assert document["limits"] == {"max_abs": 1e-9, "mean_abs": 1e-9, "cosine": 0.999}
    assert (document["rtol"], document["atol"]) == (0, 1e-3)
    assert list(document["layers"]) == ["layer_0", "layer_1", "layer_2", "layer_3"]
    assert document["layers"]["layer_0"]["exceeded"] == ["max_abs", "mean_abs"]


def test_the_report_has_page_figures_and_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recorded(tmp_path / "a", network())
    tensors = noisy(network(), 0.5)
    tensors["layer_2.output"][0, 0, 0] = torch.nan
    recorded(tmp_path / "b", tensors, device="<script>alert(1)</script>")
    code, _, err = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--report", tmp_path / "r")
    assert code == 1
    assert err == f"report: {tmp_path / 'r' / 'diff.html'}\n"
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        "diff.html",
        "diff.json",
        "error_by_layer.png",
        "values.png",
    ]
    page = (tmp_path / "r" / "diff.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page
    assert page.count("data:image/png;base64,") == 2
    assert "device fault from layer_0 on" in page
    for name in ("error_by_layer.png", "values.png"):
        assert (tmp_path / "r" / name).read_bytes().startswith(b"\x89PNG")
    json.loads((tmp_path / "r" / "diff.json").read_text(), parse_constant=pytest.fail)


def test_the_report_of_identical_and_of_mismatched_recordings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    assert run(capsys, "diff", a.folder, a.folder, "--report", tmp_path / "same")[0] == 0
    recorded(tmp_path / "b", network(), ids=IDS + 1)
    code, out, _ = run(
        capsys, "diff", a.folder, tmp_path / "b", "--report", tmp_path / "other", "--json", tmp_path / "j"
    )
    assert code == 1
    assert "FAILED: mismatched capture" in out
    for name in ("same", "other"):
        assert "<img" not in (tmp_path / name / "diff.html").read_text()
    assert json.loads((tmp_path / "j").read_text())["layers"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}", "nowhere"], "there is no folder nowhere."),
        (["{a}", "{a}", "--recipe", "1", "2", "3"], "--recipe has 3 names. Give one for both, or one for A and one"),
        (["{a}", "{a}", "--recipe", "2-1"], "has no mode '2-1'."),
        (["{a}", "{a}", "--layers", "nothing"], "layers 'nothing' matches none of"),
        (["{a}", "{a}", "--max-abs", "nan"], "the limit max_abs is nan."),
        (["{a}", "{a}", "--reference", "{a}"], "there is no float reference of it."),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], a: Recording, arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, "diff", *(one.format(a=a.folder) for one in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("probe: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_what_a_recording_says_never_reaches_the_terminal_as_a_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    b = recorded(tmp_path / "b", network())
    evil = dataclasses.replace(b.manifest, device="\x1b[31mred")
    from probe.report.devices.page import device_text

    text = device_text(diff(a, Recording(b.folder, evil)))
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text


def test_the_comparison_is_a_frozen_value(a: Recording) -> None:
    found = diff(a, read_recording(a.folder))
    assert isinstance(found, DeviceComparison)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rtol = 1.0  # type: ignore[misc]


def test_progress_is_told_tensor_by_tensor(a: Recording) -> None:
    told: list[str] = []
    diff(a, a, layers="layer_[01]", progress=told.append)
    assert told == ["0 of 2 tensors: layer_0.output", "1 of 2 tensors: layer_1.output"]


def test_a_changed_byte_is_found_when_asked_to_verify(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    recorded(tmp_path / "b", network())
    (file,) = (tmp_path / "b").glob("fp32*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert run(capsys, "diff", a.folder, tmp_path / "b")[0] == 1
    code, _, err = run(capsys, "diff", a.folder, tmp_path / "b", "--verify")
    assert code == 2
    assert "sha256" in err
