"""What the gate sees of a recipe: both measurements of every layer, golden values, and flaws no baseline excuses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from probe.data.samples import token_fingerprint
from probe.gate.cases import Verdict
from probe.gate.golden_values import Golden, corner_sketch
from probe.gate.tolerances import OF_VALUES, RULES
from probe.metrics import Comparison, LogitComparison, Metrics
from probe.recordings.manifest import AGAIN, RecordingError
from probe.recordings.reading import Recording
from probe.running.calibration import Calibration
from probe.running.capture import UncoveredError
from probe.running.corners import CornerAnswer, corner_answers
from probe.running.coverage import rounding_bound, watching
from probe.running.measurement import NOISE
from probe.running.modes import find_mode
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference, check_reference, replay
from probe.words import LOGITS

#: The stored figures of each group: those with a rule, except the comparisons of golden values. Rmse, psnr, sqnr and
#: the relative errors follow from mse, mae and the reference, so they have no rule.
FIGURES = {
    group: tuple(
        name for kind, _, name in (one.partition(".") for one in RULES) if kind == group and name not in OF_VALUES
    )
    for group in ("injected", "propagated", "logits")
}


@dataclass(frozen=True)
class Flaw:
    """Something wrong in itself, whatever the baseline says."""

    verdict: Verdict
    message: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Observation:
    """One layer of a recipe: figures by name, golden values by group, and how many elements they stand for."""

    figures: dict[str, float | None]
    values: dict[str, tuple[float, ...]]
    counts: dict[str, int]
    points: dict[str, list[float]] = field(default_factory=dict)
    flaws: tuple[Flaw, ...] = ()


class Stream:
    """The accumulators of one layer in one measurement."""

    def __init__(self, count: int, *, percentiles: bool) -> None:
        self.comparison = Comparison(percentiles=percentiles)
        self.golden = Golden(count)
        self.seen = False

    def take(self, output: Tensor, expected: Tensor) -> None:
        """Append a batch."""
        self.comparison.update(output, expected)
        self.golden.update(output, expected)
        self.seen = True


@torch.no_grad()
def observe(
    model: nn.Module,
    recipe: Recipe,
    reference: Reference,
    calibration: Calibration | None = None,
    *,
    device: str = "cpu",
    bytes_per_token: float = 1.0,
) -> dict[str, Observation]:
    """Run the recipe twice, propagated and injected, and look at every layer of the reference, and at the logits."""
    check_reference(model, reference)
    twin = apply(model, recipe, calibration).to(device)
    streams = {
        kind: {label: Stream(reference.count(label), percentiles=True) for label in reference.layers}
        for kind in ("propagated", "injected")
    }
    whole, logits = LogitComparison(), Stream(sum(one.numel() for one in reference.logits), percentiles=False)
    batches = iter(reference.batches)

    def propagated(label: str, output: Tensor, expected: Tensor) -> None:
        if label == LOGITS:
            whole.update(output[:, :-1], expected[:, :-1], next(batches)[:, 1:])
            logits.take(output, expected)
        else:
            streams["propagated"][label].take(output, expected)

    def injected(label: str, output: Tensor, expected: Tensor) -> None:
        streams["injected"][label].take(output, expected)

    answers = corner_answers(twin, recipe, calibration)
    uncovered: list[str] = []
    with watching(twin, recipe) as strays:
        for take, feed in ((propagated, False), (injected, True)):
            try:
                replay(twin, reference, take, injected=feed)
            except UncoveredError as problem:
                uncovered.append(str(problem))
    found = {}
    for label in reference.layers:
        own = {kind: layers[label] for kind, layers in streams.items()}
        seen = layer_observation(label, recipe, reference, own, strays, uncovered)
        found[label] = _with_corners(seen, reference.modules[label], answers)
    found[LOGITS] = logits_observation(whole, logits, uncovered, bytes_per_token)
    return found


def _with_corners(seen: Observation, module: str, answers: dict[str, CornerAnswer]) -> Observation:
    """What the grids inside the layer make of corner values, beside what they make of the text."""
    inside = [answer.relative.numpy() for name, answer in answers.items() if name.startswith(f"{module}.")]
    if not inside:
        return seen
    sketch, count = corner_sketch(inside)
    return replace(seen, values={**seen.values, "corners": sketch}, counts={**seen.counts, "corners": count})


def layer_observation(
    label: str,
    recipe: Recipe,
    reference: Reference,
    streams: dict[str, Stream],
    strays: dict[str, str],
    uncovered: list[str],
) -> Observation:
    """A layer from its measurements; the injected one, if there is one, shows whether the recipe was applied."""
    judged = "injected" if "injected" in streams else "propagated"
    figures: dict[str, float | None] = {}
    values: dict[str, tuple[float, ...]] = {}
    counts: dict[str, int] = {}
    flaws: list[Flaw] = []
    for kind, stream in streams.items():
        if not stream.seen:
            why = uncovered[0] if uncovered else "its hook never fired."
            flaws.append(Flaw("uncovered", f"{label} gave nothing in the {kind} run: {why}"))
            continue
        metrics = stream.comparison.metrics()
        figures |= {f"{kind}.{name}": getattr(metrics, name) for name in FIGURES[kind]}
        values[kind], counts[kind] = stream.golden.values(), stream.golden.count
        flaws += _not_finite(label, kind, metrics)
        if kind == judged:
            flaws += _not_applied(label, recipe, reference, metrics, strays)
    shown = streams[judged].golden.points
    points = {"reference": _plain(shown[0]), "output": _plain(shown[1])}
    return Observation(figures, values, counts, points, tuple(flaws))


def _plain(values: object) -> list[float]:
    return [float(f"{x:.6g}") for x in values]  # type: ignore[attr-defined]


def _not_finite(label: str, kind: str, metrics: Metrics) -> list[Flaw]:
    if metrics.first_nonfinite is None:
        return []
    bad = metrics.nan_output + metrics.inf_output - metrics.nan_reference - metrics.inf_reference
    return [
        Flaw(
            "not finite",
            f"{kind}: {metrics.nan_output} NaN and {metrics.inf_output} Inf among the {metrics.count} values of "
            f"{label}, where the reference has {metrics.nan_reference + metrics.inf_reference}; "
            f"the first at index {metrics.first_nonfinite}.",
            (f"{bad} values are not finite though the reference is",),
        )
    ]


def _not_applied(
    label: str, recipe: Recipe, reference: Reference, metrics: Metrics, strays: dict[str, str]
) -> list[Flaw]:
    if find_mode(recipe.mode).is_reference:
        return []
    module = reference.modules[label]
    inside = [text for name, text in strays.items() if name.startswith(f"{module}.")]
    if metrics.identical or (metrics.relative_mse is not None and metrics.relative_mse < NOISE):
        what = "to the bit" if metrics.identical else "but for the order of sums"
        return [Flaw("not applied", f"{recipe} left {label} as it was: its output is the float layer's {what}.")]
    if inside:
        return [Flaw("not applied", f"{recipe} was not applied to all of {label}: {inside[0]}.", tuple(inside[1:4]))]
    bound = rounding_bound(recipe, _change(reference, label))
    if metrics.mse is not None and metrics.mse < bound:
        return [
            Flaw(
                "not applied",
                f"the error of {label} is below what rounding to {recipe.format or recipe.mode} must cause: "
                f"mse {metrics.mse:.3g}, at least {bound:.3g}.",
            )
        ]
    return []


def _change(reference: Reference, label: str) -> float:
    """Mean square of what the float layer adds to its input; of its output where the shapes differ."""
    squares = count = 0.0
    for given, made in zip(reference.tensors[f"{label}.input"], reference.tensors[f"{label}.injected"], strict=True):
        added = made.float() - given.float() if made.shape == given.shape else made.float()
        squares += float(added.double().square().sum())
        count += added.numel()
    return squares / count


def logits_observation(
    whole: LogitComparison, stream: Stream, uncovered: list[str], bytes_per_token: float
) -> Observation:
    """The figures of the whole model."""
    if not stream.seen:
        return Observation({}, {}, {}, flaws=(Flaw("uncovered", f"there are no logits: {uncovered[0]}"),))
    metrics, values = whole.metrics(), stream.comparison.metrics()
    known = {
        **values.as_dict(),
        **metrics.as_dict(),
        "bits_per_byte": _per_byte(metrics.bits_per_token, bytes_per_token),
        "change_in_bits_per_byte": _per_byte(metrics.change_in_bits, bytes_per_token),
    }
    figures = {f"logits.{name}": known[name] for name in FIGURES["logits"]}
    golden = stream.golden
    return Observation(
        figures, {"logits": golden.values()}, {"logits": golden.count}, flaws=tuple(_not_finite(LOGITS, LOGITS, values))
    )


def _per_byte(bits: float | None, bytes_per_token: float) -> float | None:
    return None if bits is None else bits / bytes_per_token


@torch.no_grad()
def observe_recording(
    recording: Recording,
    recipe: Recipe,
    reference: Reference,
    *,
    model_fingerprint: str,
    data_fingerprint: str,
    bytes_per_token: float = 1.0,
) -> dict[str, Observation]:
    """What `observe` sees of a recipe, from its recording: the propagated figures of every layer, and the logits.

    A layer or recipe that was not recorded is a flaw, `uncovered`. A recording of another model, of other tokens or
    of other shapes is a RecordingError: there is nothing to compare.
    """
    _check_same(recording, reference, model_fingerprint, data_fingerprint)
    key = str(recipe)
    has = ", ".join(recording.layers(key)) if key in recording.recipes else ", ".join(recording.recipes)
    found = {}
    for label in reference.layers:
        stream = Stream(reference.count(label), percentiles=True)
        for output, expected in _pairs(recording, key, f"{label}.output", reference.tensors[f"{label}.output"]):
            stream.take(output, expected)
        uncovered = [f"{recording.folder} has no {label} of {key}, only {has}. {AGAIN}"]
        found[label] = layer_observation(label, recipe, reference, {"propagated": stream}, {}, uncovered)
    whole, logits = LogitComparison(), Stream(sum(one.numel() for one in reference.logits), percentiles=False)
    batches = iter(reference.batches)
    for output, expected in _pairs(recording, key, LOGITS, reference.logits):
        whole.update(output[:, :-1], expected[:, :-1], next(batches)[:, 1:])
        logits.take(output, expected)
    uncovered = [f"{recording.folder} has none of {key}, only {has}. {AGAIN}"]
    found[LOGITS] = logits_observation(whole, logits, uncovered, bytes_per_token)
    return found


def _check_same(recording: Recording, reference: Reference, model_fingerprint: str, data_fingerprint: str) -> None:
    own = (reference.model, token_fingerprint(reference.batches))
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
