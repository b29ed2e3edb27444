"""A recording is judged as the run itself; every misfit is told."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.gate.observations import observe
from probe.models.loading import Loaded
from probe.recordings import RecordingError, read_recording
from probe.running.calibration import Calibration
from probe.running.paths import token_rows
from probe.running.recipes import Recipe
from probe.running.reference import Reference, run_reference
from tests.recordings.examples import FLOAT, LAYERS, QUANTIZED, RECIPES, Parts, only, seen, write


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_recording_is_judged_as_the_run_itself(
    stored: Path, loaded: Loaded, reference: Reference, calibration: Calibration, recipe: Recipe
) -> None:
    live = observe(loaded.model, recipe, reference, calibration, bytes_per_token=1.5)
    from_disk = seen(read_recording(stored), recipe, reference, bytes_per_token=1.5)
    assert list(from_disk) == list(live) == [*LAYERS, "logits"]
    for label, one in from_disk.items():
        kinds = ("logits",) if label == "logits" else ("propagated",)
        assert one.figures == only(kinds, live[label].figures), label
        assert one.values == only(kinds, live[label].values)
        assert one.counts == only(kinds, live[label].counts)
        assert one.flaws == ()
        assert one.figures
    assert len(from_disk["layer_0"].points.output) == len(live["layer_0"].points.output)


def test_the_batches_of_the_reference_need_not_be_those_of_the_recording(
    stored: Path, loaded: Loaded, reference: Reference
) -> None:
    recording = read_recording(stored)
    expected = seen(recording, QUANTIZED, reference)
    for size in (1, 3):
        batches = token_batches(text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=size)
        for label, one in seen(recording, QUANTIZED, run_reference(loaded.model, batches)).items():
            assert one.figures == pytest.approx(expected[label].figures, rel=1e-4, abs=1e-7)
            assert one.counts == expected[label].counts
            for kind, values in one.values.items():
                assert values == pytest.approx(expected[label].values[kind], rel=1e-6, abs=1e-6)
            assert one.flaws == ()


def test_the_same_values_in_other_batches_are_the_same_figures(stored: Path, reference: Reference) -> None:
    whole = replace(
        reference,
        batches=(torch.cat(token_rows(reference.batches)),),
        tensors={name: [torch.cat(some)] for name, some in reference.tensors.items()},
        outputs=(torch.cat(reference.outputs),),
    )
    recording = read_recording(stored)
    one, other = (seen(recording, QUANTIZED, some) for some in (reference, whole))
    for label in one:
        assert other[label].figures == pytest.approx(one[label].figures, rel=1e-9, abs=1e-12)
        for kind, values in one[label].values.items():
            assert other[label].values[kind] == pytest.approx(values, rel=1e-6, abs=1e-6)


def test_a_recipe_that_was_not_recorded_is_uncovered(stored: Path, reference: Reference) -> None:
    found = seen(read_recording(stored), Recipe("2-2", "int8"), reference)
    assert list(found) == [*LAYERS, "logits"]
    for label, one in found.items():
        assert (one.figures, one.values) == ({}, {})
        assert [flaw.verdict for flaw in one.flaws] == ["uncovered"]
        assert "mode_2_2-int8, only fp32, fp16, bf16, mode_0-int8, mode_2_1-fp8_e4m3. Copy" in one.flaws[0].message
        assert str(stored) in one.flaws[0].message
        assert label in one.flaws[0].message


def test_a_layer_that_was_not_recorded_is_uncovered_and_the_others_are_judged(
    tmp_path: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], reference: Reference
) -> None:
    some = {name: one for name, one in parts[QUANTIZED].items() if name in ("layer_0.output", "layer_3.output")}
    recording = write(tmp_path / "r", loaded, batches, {QUANTIZED: some})
    found = seen(recording, QUANTIZED, reference)
    assert {label for label, one in found.items() if one.flaws} == {"layer_1", "layer_2", "logits"}
    assert {flaw.verdict for one in found.values() for flaw in one.flaws} == {"uncovered"}
    assert "r has no layer_1 of mode_2_1-fp8_e4m3, only layer_0, layer_3. Copy" in found["layer_1"].flaws[0].message
    assert "there are no logits: " in found["logits"].flaws[0].message
    assert found["layer_0"].figures["propagated.mse"]


def test_layers_that_the_reference_does_not_ask_for_are_left_alone(
    stored: Path, loaded: Loaded, batches: list[Tensor]
) -> None:
    reference = run_reference(loaded.model, batches, ["last"])
    assert list(seen(read_recording(stored), QUANTIZED, reference)) == ["layer_3", "logits"]


def test_the_float_model_under_the_name_of_a_quantized_one_is_not_applied(
    tmp_path: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], reference: Reference
) -> None:
    recording = write(tmp_path / "r", loaded, batches, {QUANTIZED: parts[FLOAT], FLOAT: parts[FLOAT]})
    for label, one in seen(recording, QUANTIZED, reference).items():
        if label != "logits":
            assert [flaw.verdict for flaw in one.flaws] == ["not applied"]
            assert f"mode_2_1-fp8_e4m3 left {label} as it was: its output is the float layer's to the bit" in (
                one.flaws[0].message
            )
    assert not any(one.flaws for one in seen(recording, FLOAT, reference).values())


def test_the_float_model_of_another_device_is_not_applied_either(
    tmp_path: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], reference: Reference
) -> None:
    """Sums in another order, or a narrower float, do not make it a quantized model."""
    close = {name: [one * (1 + 2**-22) for one in some] for name, some in parts[FLOAT].items()}
    half = {name: [one.half() for one in some] for name, some in parts[FLOAT].items()}
    for index, given_parts in enumerate((close, half)):
        recording = write(tmp_path / str(index), loaded, batches, {QUANTIZED: given_parts})
        found = seen(recording, QUANTIZED, reference)
        for label in LAYERS:
            assert [flaw.verdict for flaw in found[label].flaws] == ["not applied"], (index, label)


@pytest.mark.parametrize(("bad", "nans", "infs"), [(torch.nan, 1, 0), (torch.inf, 0, 1)])
def test_nan_and_infinity_are_found_with_their_place(
    tmp_path: Path,
    loaded: Loaded,
    batches: list[Tensor],
    parts: dict[Recipe, Parts],
    reference: Reference,
    bad: float,
    nans: int,
    infs: int,
) -> None:
    broken = {name: [one.clone() for one in some] for name, some in parts[QUANTIZED].items()}
    broken["layer_1.output"][1][0, 2, 5] = bad
    broken["logits"][0][1, 15, 3] = bad
    found = seen(write(tmp_path / "r", loaded, batches, {QUANTIZED: broken}), QUANTIZED, reference)
    assert {label for label, one in found.items() if one.flaws} == {"layer_1", "logits"}
    (flaw,) = found["layer_1"].flaws
    assert flaw.verdict == "not finite"
    index = 2 * 16 * 128 + 2 * 128 + 5
    assert f"propagated: {nans} NaN and {infs} Inf among the {3 * 16 * 128} values of layer_1" in flaw.message
    assert f"the first at index {index}." in flaw.message
    assert [flaw.verdict for flaw in found["logits"].flaws] == ["not finite"]


def test_misfits_say_what_differs(tmp_path: Path, stored: Path, loaded: Loaded, reference: Reference) -> None:
    recording = read_recording(stored)

    def fails(message: str, samples: int = 3, seqlen: int = 16, text: str = "evaluation", model: Any = None) -> None:
        batches = token_batches(text_of(text), loaded.tokenizer, samples=samples, seqlen=seqlen, batch_size=2)
        other = run_reference(model or loaded.model, batches)
        with pytest.raises(RecordingError, match=message) as problem:
            seen(recording, QUANTIZED, other)
        assert str(problem.value).startswith(str(stored))
        assert "Record this model on these tokens" in str(problem.value)

    fails(r"the number of samples is 3, that of the reference is 2: they cannot be compared", samples=2)
    fails(r"the length of a sample is 16, that of the reference is 8: they cannot be compared", seqlen=8)
    fails(r"the fingerprint of the tokens is \w{16}, that of the reference is \w{16}: they", text="calibration")
    fails(r"the fingerprint of the model is \w{16}, that of the reference is \w{16}: they", model=changed(loaded))


def changed(loaded: Loaded) -> torch.nn.Module:
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] += 1
    return model


def test_a_recording_that_does_not_know_its_weights_is_judged(
    tmp_path: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], reference: Reference
) -> None:
    given_parts = {QUANTIZED: parts[QUANTIZED]}
    recording = write(tmp_path / "r", loaded, batches, given_parts, model_fingerprint=None)
    assert seen(recording, QUANTIZED, reference)["layer_0"].figures["propagated.mse"]


@pytest.mark.parametrize("name", ["layer_2.output", "logits"])
def test_other_shapes_are_told_and_never_cropped(
    tmp_path: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], reference: Reference, name: str
) -> None:
    for cut in (lambda one: one[..., :-1], lambda one: torch.cat([one, one], -1), lambda one: one[..., None]):
        other = {**parts[QUANTIZED], name: [cut(one) for one in parts[QUANTIZED][name]]}
        recording = write(tmp_path / "r", loaded, batches, {QUANTIZED: other}, overwrite=True)
        with pytest.raises(
            RecordingError, match=rf"{name} of mode_2_1-fp8_e4m3 has the shape \[3, 16, .* never cropped"
        ):
            seen(recording, QUANTIZED, reference)


def test_a_reference_of_something_else_is_refused(stored: Path, reference: Reference) -> None:
    recording = read_recording(stored)
    for wrong in ({"model_fingerprint": "0" * 16}, {"data_fingerprint": "0" * 16}):
        with pytest.raises(
            ValueError, match=r"the reference is of model \w+ and tokens \w+, expected .*0{16}"
        ) as problem:
            seen(recording, QUANTIZED, reference, **wrong)
        assert not isinstance(problem.value, RecordingError)
