import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probe import ModeComparison, compare
from probe.comparisons import selection as sides
from probe.comparisons.modes import LIMITS, failures
from probe.recordings import read_recording
from tests.comparisons.recorded import IDS, SHAPE, noisy, plain, recorded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    reference = plain()
    modes = {"fp32": reference, "0-int8": noisy(reference, 0.1, seed=2), "2-1-int8": noisy(reference, 0.01)}
    return recorded(tmp_path / "layer_outputs", modes).folder


def test_figures_are_numpys(folder: Path) -> None:
    found = compare(folder, "2-1")
    reference = plain()
    output = noisy(reference, 0.01)
    assert (found.reference_mode, found.compared_mode) == ("fp32", "2-1")
    assert list(found.layers) == ["layer_0", "layer_1", "layer_2"]
    for name, layer in found.layers.items():
        o, r = (x[f"{name}.output"].double().numpy().ravel() for x in (output, reference))
        d, facts = o - r, layer.as_dict()
        assert facts["shape"] == list(SHAPE)
        assert facts["mse"] == pytest.approx(np.mean(d**2), rel=1e-12)
        assert facts["rmse"] == pytest.approx(math.sqrt(np.mean(d**2)), rel=1e-12)
        assert facts["mae"] == facts["difference"]["mean_abs"] == pytest.approx(np.abs(d).mean(), rel=1e-12)
        assert facts["difference"]["max_abs"] == np.abs(d).max()
        assert facts["difference"]["mean"] == pytest.approx(d.mean(), rel=1e-9)
        assert facts["difference"]["std"] == pytest.approx(d.std(), rel=1e-12)
        assert facts["relative_mse"] == pytest.approx(np.mean(d**2) / (np.mean(r**2) + 1e-8), rel=1e-12)
        assert facts["relative_mae"] == pytest.approx(np.abs(d).mean() / (np.abs(r).mean() + 1e-8), rel=1e-12)
        assert facts["correlation"] == pytest.approx(np.corrcoef(o, r)[0, 1], abs=1e-12)
        assert facts["cosine"] == pytest.approx(o @ r / np.linalg.norm(o) / np.linalg.norm(r), abs=1e-12)
        assert facts["percentiles"] == {str(q): pytest.approx(np.percentile(np.abs(d), q)) for q in (50, 90, 95, 99)}
        for side, x in (("reference", r), ("output", o)):
            wanted = {"mean": x.mean(), "std": x.std(), "min": x.min(), "max": x.max()}
            assert facts[side] == {key: pytest.approx(value, rel=1e-9) for key, value in wanted.items()}
    every = [layer.metrics for layer in found.layers.values()]
    assert found.summary == {
        f"avg_{name}": pytest.approx(np.mean([getattr(m, name) for m in every]))
        for name in ("mse", "mae", "correlation")
    }


def test_bands_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(folder, "2-1")
    monkeypatch.setattr(sides, "BAND", 7)
    parts = compare(folder, "2-1")
    for name, layer in whole.layers.items():
        assert parts.layers[name].metrics.max_abs == layer.metrics.max_abs
        assert parts.layers[name].metrics.count == layer.metrics.count
        assert parts.layers[name].metrics.mse == pytest.approx(layer.metrics.mse, rel=1e-12)


def test_json_has_what_the_scripts_of_users_read_and_comes_back(folder: Path) -> None:
    found = compare(folder, "2-1")
    facts = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    ours = ("recordings", "notes", "weights", "definition", "reference_definition", "is_exact", "may_be_identical")
    assert [key for key in facts if key not in ours] == [*("reference_mode", "compared_mode", "layers", "summary")]
    assert set(facts["summary"]) == {"avg_mse", "avg_mae", "avg_correlation"}
    assert ModeComparison.from_dict(facts) == found


def test_nan_and_lossless_layers_come_back_too(tmp_path: Path) -> None:
    reference = plain()
    output = noisy(reference, 0.01)
    output["layer_0.output"] = reference["layer_0.output"].clone()
    output["layer_1.output"][1, 2, 3] = math.nan
    found = compare(recorded(tmp_path / "r", {"fp32": reference, "0-int8": output}), "0")
    assert found.layers["layer_1"].first_nonfinite == (1, 2, 3)
    assert found.layers["layer_0"].metrics.psnr == math.inf
    assert ModeComparison.from_dict(json.loads(json.dumps(found.as_dict(), allow_nan=False))) == found


def test_what_is_no_comparison_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"this is no comparison of a mode \(KeyError: 'reference_mode'\)\. Expected the output"
    ):
        ModeComparison.from_dict({})


@pytest.mark.parametrize("mode", ["2-1", "mode_2_1", "2-1-int8", "mode_2_1-int8"])
def test_a_mode_has_four_spellings(folder: Path, mode: str) -> None:
    assert compare(folder, mode).compared_mode == "2-1"


def test_any_mode_is_a_reference(folder: Path) -> None:
    assert compare(folder, "2-1", reference="0").reference_mode == "0"


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ([0], ["layer_0"]),
        (["last", "first"], ["layer_0", "layer_2"]),
        (["all"], ["layer_0", "layer_1", "layer_2"]),
        (["layer_1"], ["layer_1"]),
        (["layer_[02]"], ["layer_0", "layer_2"]),
    ],
)
def test_layers_are_chosen_in_their_own_order(folder: Path, layers: list[Any], found: list[str]) -> None:
    assert list(compare(folder, "2-1", layers=layers).layers) == found


def test_deep_layers_are_in_numeric_order(tmp_path: Path) -> None:
    reference = plain(layers=12)
    recording = recorded(tmp_path / "r", {"fp32": reference, "0-int8": noisy(reference, 0.1)})
    assert list(compare(recording, "0").layers) == [f"layer_{n}" for n in range(12)]


def test_logits_and_inputs_are_compared_when_they_are_named(tmp_path: Path) -> None:
    reference = {**plain(layers=1), "layer_0.input": torch.ones(SHAPE), "logits": torch.randn(SHAPE)}
    recording = recorded(tmp_path / "r", {"fp32": reference, "0-int8": noisy(reference, 0.1)})
    assert list(compare(recording, "0").layers) == ["layer_0"]
    assert list(compare(recording, "0", layers=["logits", "layer_0.input"]).layers) == ["layer_0.input", "logits"]


def test_the_reference_may_lie_elsewhere(tmp_path: Path) -> None:
    reference = plain()
    there = recorded(tmp_path / "there", {"fp32": reference})
    here = recorded(tmp_path / "here", {"2-1-int8": noisy(reference, 0.01)})
    found = compare(here, "2-1", reference_recording=there)
    assert found.recordings == (str(there.folder), str(here.folder))
    assert found.layers["layer_0"].label == "excellent"


def test_a_recording_of_users_without_a_manifest_is_compared_with_a_note(tmp_path: Path) -> None:
    reference = plain(layers=1)["layer_0.output"].numpy()
    np.save(tmp_path / "mode_fp32_layer_0.npy", reference)
    np.save(tmp_path / "mode_2-1_layer_0.npy", reference + np.float32(0.5))
    found = compare(tmp_path, "2-1")
    assert found.layers["layer_0"].metrics.mae == pytest.approx(0.5, rel=1e-6)
    assert any("the inputs cannot be verified" in note for note in found.notes)


def test_narrow_dtypes_are_compared_as_they_are(tmp_path: Path) -> None:
    reference = plain()
    output = {name: x.bfloat16() for name, x in reference.items()}
    found = compare(recorded(tmp_path / "r", {"fp32": reference, "0-int8": output}), "0")
    d = output["layer_0.output"].double() - reference["layer_0.output"].double()
    assert found.layers["layer_0"].metrics.mse == pytest.approx(float(d.square().mean()), rel=1e-12)


# ------------------------------------------------------------------------------------------------ what is refused


REFERENCE = plain()
OTHER_SHAPE = {**REFERENCE, "layer_2.output": torch.zeros(2, 6, 9)}
RECORDINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "good": ({"fp32": REFERENCE, "2-1-int8": noisy(REFERENCE, 0.1)}, {}),
    "two": ({"fp32": REFERENCE, "2-1-int8": REFERENCE, "2-1-fp8_e4m3": noisy(REFERENCE, 0.1)}, {}),
    "only": ({"fp32": REFERENCE}, {}),
    "none": ({"2-1-int8": REFERENCE}, {}),
    "shape": ({"fp32": REFERENCE, "2-1-int8": OTHER_SHAPE}, {}),
    "fewer": ({"fp32": REFERENCE, "2-1-int8": plain(layers=2)}, {}),
    "tokens": ({"2-1-int8": REFERENCE}, {"batches": [IDS + 1]}),
    "more": ({"2-1-int8": plain(shape=(3, 6, 8))}, {"batches": [torch.zeros(3, 6, dtype=torch.int64)]}),
    "longer": ({"2-1-int8": plain(shape=(2, 7, 8))}, {"batches": [torch.zeros(2, 7, dtype=torch.int64)]}),
    "weights": ({"2-1-int8": REFERENCE}, {"model_fingerprint": "b" * 16}),
    "own": ({"fp32": REFERENCE}, {"model_fingerprint": "a" * 16}),
}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mode not recorded": ("good", {"mode": "2-4"}, "good has no mode '2-4'. It has: fp32, 2-1. Nearest: 2-1."),
    "format not recorded": (
        "two",
        {"mode": "2-1", "format": "fp4_e2m1"},
        "two has no mode '2-1' in format 'fp4_e2m1'. It has: fp32, 2-1-fp8_e4m3, 2-1. Nearest: 2-1-fp8_e4m3.",
    ),
    "which format": (
        "two",
        {"mode": "2-1"},
        "two has mode 2-1 in fp8_e4m3, int8. Say which with --format, or 2-1-FORMAT.",
    ),
    "no reference": (
        "none",
        {"mode": "2-1"},
        "none has no fp32 to compare with. It has: 2-1. Record it: probe record --modes fp32 --out {folder}, or name "
        "another with --reference or --reference-dir.",
    ),
    "itself": ("good", {"mode": "fp32"}, "fp32 is compared with itself. Give another mode, or another --reference."),
    "itself elsewhere": (
        "good",
        {"mode": "2-1", "reference": "2-1", "there": "none"},
        "2-1 is compared with itself. Give another mode, or another --reference. Two devices: probe diff {there} "
        "{folder}.",
    ),
    "layer": ("good", {"mode": "2-1", "layers": ["9"]}, "'9' is no layer of 2-1 in {folder}. It has: layer_"),
    "expression": (
        "good",
        {"mode": "2-1", "layers": ["layer_("]},
        "layer 'layer_(' is not a regular expression",
    ),
    "shape": (
        "shape",
        {"mode": "2-1"},
        "the shape of layer_2 differs: [2, 6, 9] in 2-1, [2, 6, 8] in fp32. They are compared element by element and "
        "never cropped: record both on the same input.",
    ),
    "layers": (
        "fewer",
        {"mode": "2-1"},
        "layer_2 was recorded of fp32, but not of 2-1. Record the same layers of both, or choose with --layers among "
        "those that both have.",
    ),
    "tokens": ("tokens", {"mode": "2-1", "there": "only"}, "the fingerprint of the tokens differs: "),
    "samples": ("more", {"mode": "2-1", "there": "only"}, "the number of samples differs: 3 in {folder}, 2 in"),
    "length": ("longer", {"mode": "2-1", "there": "only"}, "the length of a sample differs: 7 in {folder}, 6 in"),
    "weights": (
        "weights",
        {"mode": "2-1", "there": "own"},
        "the fingerprint of the weights differs: bbbbbbbbbbbbbbbb in {folder}, aaaaaaaaaaaaaaaa in",
    ),
}


@pytest.mark.parametrize(("name", "given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_said(name: str, given: dict[str, Any], message: str, tmp_path: Path) -> None:
    options = dict(given)
    elsewhere = options.pop("there", None)
    made = {
        each: recorded(tmp_path / each, RECORDINGS[each][0], **RECORDINGS[each][1])
        for each in {name, elsewhere} - {None}
    }
    there = made[elsewhere] if elsewhere else None
    with pytest.raises(ValueError) as error:  # noqa: PT011
        compare(made[name], **options, reference_recording=there)
    assert message.format(folder=made[name].folder, there=there.folder if there else "") in str(error.value)


@pytest.mark.parametrize("mode", ["2-1"])
def test_fewer_layers_are_compared_where_they_are_chosen(mode: str, tmp_path: Path) -> None:
    made = recorded(tmp_path / "r", {"fp32": plain(), "2-1-int8": noisy(plain(layers=2), 0.1)})
    assert list(compare(made, mode, layers=["layer_0"]).layers) == ["layer_0"]


# ---------------------------------------------------------------------------------------------------- failures


def test_a_sound_mode_has_no_failures(folder: Path) -> None:
    assert failures(compare(folder, "2-1")) == []


def test_an_identical_layer_is_a_failure(tmp_path: Path) -> None:
    reference = plain()
    output = {**noisy(reference, 0.1), "layer_1.output": reference["layer_1.output"]}
    found = failures(compare(recorded(tmp_path / "r", {"fp32": reference, "2-1-int8": output}), "2-1"))
    assert found == ["layer_1 is identical with fp32, to the bit: was 2-1 applied?"]


def test_what_is_not_finite_is_a_failure_and_its_first_place_is_reported(tmp_path: Path) -> None:
    reference = plain()
    output = noisy(reference, 0.1)
    output["layer_2.output"][1, 0, 5] = math.inf
    output["layer_2.output"][1, 4, 0] = math.nan
    found = failures(compare(recorded(tmp_path / "r", {"fp32": reference, "2-1-int8": output}), "2-1"))
    assert found == [
        "layer_2 is not finite: 1 NaN and 1 Inf in 2-1, first at (1, 0, 5); 0 NaN and 0 Inf in fp32",
    ]


def test_nan_on_both_sides_is_a_failure_and_nothing_was_compared(tmp_path: Path) -> None:
    reference = plain()
    output = noisy(reference, 0.1)
    for tensors in (reference, output):
        tensors["layer_2.output"] = torch.full(SHAPE, math.nan)
    count = math.prod(SHAPE)
    found = compare(recorded(tmp_path / "r", {"fp32": reference, "2-1-int8": output}), "2-1")
    nan = f"{count} NaN and 0 Inf"
    assert failures(found) == [f"layer_2 is not finite: {nan} in 2-1; {nan} in fp32: nothing was compared"]
    assert found.layers["layer_2"].label == "undefined"


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_kept_on_its_own_side(folder: Path, limit: str) -> None:
    found = compare(folder, "2-1")
    figure, at_most = LIMITS[limit]
    values = [getattr(layer.metrics, figure) for layer in found.layers.values()]
    worst = max(values) if at_most else min(values)
    assert failures(found, {limit: worst}) == []
    beyond = worst * (1 - 1e-9) if at_most else worst * (1 + 1e-9)
    (failure,) = failures(found, {limit: beyond})
    name = list(found.layers)[values.index(worst)]
    assert failure == f"{name}: {figure} {worst:.6g} is {'above' if at_most else 'below'} the limit {beyond:g}"


def test_a_figure_that_is_undefined_is_beyond_any_limit(tmp_path: Path) -> None:
    reference = {"layer_0.output": torch.ones(SHAPE)}
    found = compare(recorded(tmp_path / "r", {"fp32": reference, "0-int8": noisy(reference, 0.1)}), "0")
    assert failures(found, {"min_correlation": -1.0}) == ["layer_0: correlation is undefined, and the limit is -1"]


def test_a_limit_that_does_not_exist_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no limit 'max_msee'\. Known: max_mse, max_mae"):
        failures(compare(folder, "2-1"), {"max_msee": 1.0})


def test_a_changed_byte_is_found_when_it_is_verified(folder: Path) -> None:
    file = folder / "mode_2_1-int8.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    compare(folder, "2-1")
    with pytest.raises(ValueError, match="its sha256 is"):
        compare(read_recording(folder), "2-1")
