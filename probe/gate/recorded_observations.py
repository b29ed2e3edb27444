"""Observations of a recording that was made elsewhere: propagated figures only."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from probe.data.calls import input_fingerprint
from probe.gate.measured_layers import Observation, OutputStream, Stream, layer_observation
from probe.recordings.manifest import AGAIN, RecordingError
from probe.recordings.reading import Recording
from probe.running.recipes import Recipe
from probe.running.reference import Reference


@torch.no_grad()
def observe_recording(
    recording: Recording,
    recipe: Recipe,
    reference: Reference,
    *,
    model_fingerprint: str,
    data_fingerprint: str,
    configuration: Mapping[str, str] = MappingProxyType({}),
    declared: Collection[str] = (),
    bytes_per_token: float | None = 1.0,
) -> dict[str, Observation]:
    """As `observe`, from a recording of the recipe: the propagated figures of every layer, and the output.

    A layer or recipe that was not recorded is a flaw, `uncovered`. A recording of another model, of other tokens or
    of other shapes is a RecordingError: there is nothing to compare. `declared` are the layers that stay float.
    """
    _check_same(recording, reference, model_fingerprint, data_fingerprint)
    if other := recording.manifest.other_configuration(configuration):
        raise RecordingError(
            f"{recording.folder} was recorded of a model with another configuration ({other}): they cannot be "
            "compared. Record this model, or take the configuration of the recording."
        )
    key = str(recipe)
    _check_include(recording, recipe)
    has = ", ".join(recording.layers(key)) if key in recording.recipes else ", ".join(recording.recipes)
    found = {}
    for label in reference.layers:
        stream = Stream(reference.count(label))
        for output, expected in _pairs(recording, key, f"{label}.output", reference.tensors[f"{label}.output"]):
            stream.take(output, expected)
        missing = f"{recording.folder} has no {label} of {key}, only {has}. {AGAIN}"
        found[label] = layer_observation(
            label, recipe, reference, {"propagated": stream}, {}, declared, missing=missing
        )
    whole, stream = reference.kind.label, OutputStream(reference)
    for output, expected in _pairs(recording, key, whole, reference.outputs):
        stream.take(output, expected)
    missing = f"{recording.folder} has none of {key}, only {has}. {AGAIN}"
    found[whole] = stream.observation(bytes_per_token, missing=missing)
    return found


def _check_same(recording: Recording, reference: Reference, model_fingerprint: str, data_fingerprint: str) -> None:
    own = (reference.model, input_fingerprint(reference.batches))
    if own != (model_fingerprint, data_fingerprint):
        raise ValueError(
            f"the reference is of model {own[0]} and tokens {own[1]}, expected {model_fingerprint} and "
            f"{data_fingerprint}. Make it again with probe.run_reference."
        )
    tokens, model = recording.manifest.tokens, recording.manifest.fingerprint
    samples, lengths = sum(len(batch) for batch in reference.batches), {batch.shape[1] for batch in reference.batches}
    for what, recorded, expected in (
        ("number of samples", {tokens.samples}, {samples}),
        ("length of a sample", {tokens.seqlen}, lengths),
        ("fingerprint of the tokens", {tokens.fingerprint}, {data_fingerprint}),
        ("fingerprint of the model", {model}, {model_fingerprint if model else None}),
    ):
        if recorded != expected:
            there, here = (", ".join(sorted(map(str, some))) for some in (recorded, expected))
            raise RecordingError(
                f"{recording.folder}: the {what} is {there}, that of the reference is {here}: they cannot be compared. "
                "Record this model on these tokens, or take the model and the tokens of the recording."
            )


def _check_include(recording: Recording, recipe: Recipe) -> None:
    """Refuse a recipe that probe applied with another `include`; what was quantized before is not known."""
    recorded = recording.manifest.recipes.get(str(recipe))
    if recorded is not None and recorded.applied == "by probe" and recorded.include != recipe.include:
        there, here = (", ".join(some) or "nothing" for some in (recorded.include, recipe.include))
        raise RecordingError(
            f"{recording.folder}: {recipe} was recorded with include {there}, and the settings include {here}: they "
            "cannot be compared. Record it again with the same --include."
        )


def _pairs(recording: Recording, recipe: str, name: str, expected: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Recorded and expected, in the batches of the reference; nothing where nothing was recorded."""
    if recipe not in recording.recipes or name not in recording.names(recipe):
        return
    shape = recording.shape(recipe, name)
    sizes = [len(one) for one in expected]
    wanted = (sum(sizes), *expected[0].shape[1:])
    if shape != wanted:
        raise RecordingError(
            f"{recording.folder}: {name} of {recipe} has the shape {list(shape)}, the reference {list(wanted)}: they "
            "cannot be compared, and are never cropped. Record this model on these tokens."
        )
    for output, one in zip(torch.split(recording.tensor(recipe, name), sizes), expected, strict=True):
        yield output.float(), one.float()
