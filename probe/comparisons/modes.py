"""A mode against its reference, layer by layer, from their recordings.

Nothing is cropped or broadcast: what cannot be compared element by element is an error that says which differs.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from probe.comparisons.results import LayerComparison, ModeComparison
from probe.comparisons.selection import Side, bands, find_reference, find_side, pick_labels
from probe.metrics import Comparison
from probe.recordings import Recording, read_recording

__all__ = ["LayerComparison", "ModeComparison", "compare", "compare_sides"]


def compare(
    recording: Recording | Path | str,
    mode: str,
    *,
    reference: str = "fp32",
    reference_recording: Recording | Path | str | None = None,
    layers: Sequence[str | int] | None = None,
    format: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModeComparison:
    """Compare a recorded mode with its reference, in the same recording or in another one.

    `layers` are 0, first, last, all, layer_0 or a regular expression; by default all outputs of layers. A folder is
    read without verifying its sha256: give read_recording(folder) to have every byte checked first.
    """
    here = _read(recording)
    there = here if reference_recording is None else _read(reference_recording)
    return compare_sides(
        find_side(here, mode, format),
        find_reference(there, reference, format),
        layers=None if layers is None else [str(one) for one in layers],
        progress=progress,
    )


def compare_sides(
    side: Side,
    reference: Side,
    *,
    layers: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModeComparison:
    """As compare, of sides that were found."""
    labels = _check_sides(side, reference, layers)
    found = {}
    for place, label in enumerate(labels):
        if progress:
            progress(f"{side.name} {label} ({place + 1} of {len(labels)})")
        comparison = Comparison()
        for band in bands(label, side, reference):
            comparison.update(*band)
            del band
        found[label] = LayerComparison(label, side.shape(label), comparison.metrics())
    notes = dict.fromkeys((*side.recording.notes, *reference.recording.notes))
    folders = (str(reference.recording.folder), str(side.recording.folder))
    return ModeComparison(reference.name, side.name, folders, found, tuple(notes))


def _read(recording: Recording | Path | str) -> Recording:
    return recording if isinstance(recording, Recording) else read_recording(recording, verify=False)


def _check_sides(side: Side, reference: Side, wanted: Sequence[str] | None) -> list[str]:
    """The labels to compare, once all that must be the same is."""
    here, there = side.recording, reference.recording
    if side.recipe == reference.recipe:
        devices = f" Two devices: probe diff {there.folder} {here.folder}." if here.folder != there.folder else ""
        raise ValueError(f"{side.name} is compared with itself. Give another mode, or another --reference.{devices}")
    for what, own, other in _facts(here, there):
        if own is not None and other is not None and own != other:
            raise ValueError(
                f"the {what} differs: {own} in {here.folder}, {other} in {there.folder}. Only recordings of one "
                "model on the same tokens can be compared: record both on the same input."
            )
    chosen, expected = pick_labels(side, wanted), pick_labels(reference, wanted)
    for label in sorted(set(chosen) ^ set(expected)):
        has, lacks = (side, reference) if label in chosen else (reference, side)
        raise ValueError(
            f"{label} was recorded of {has.name}, but not of {lacks.name}. Record the same layers of both, or choose "
            "with --layers among those that both have."
        )
    for label in chosen:
        if side.shape(label) != reference.shape(label):
            raise ValueError(
                f"the shape of {label} differs: {list(side.shape(label))} in {side.name}, "
                f"{list(reference.shape(label))} in {reference.name}. They are compared element by element and never "
                "cropped: record both on the same input."
            )
    return chosen


def _facts(here: Recording, there: Recording) -> Iterable[tuple[str, object, object]]:
    a, b = here.manifest, there.manifest
    yield "number of samples", a.tokens.samples, b.tokens.samples
    yield "length of a sample", a.tokens.seqlen, b.tokens.seqlen
    yield "fingerprint of the tokens", a.tokens.fingerprint, b.tokens.fingerprint
    yield "fingerprint of the weights", a.fingerprint, b.fingerprint
