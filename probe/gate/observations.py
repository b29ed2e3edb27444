"""Observations: the figures and golden values of every layer of a recipe, and the flaws that no baseline excuses."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from probe.data.samples import token_fingerprint
from probe.gate.cases import Points, Verdict
from probe.gate.definitions import differing_sites
from probe.gate.golden_values import KEPT, Golden
from probe.gate.path_figures import PathFigures, PrefillRows, bound_of, path_figures
from probe.gate.tolerances import OF_VALUES, RULES, own_error
from probe.metrics import Comparison, LogitComparison, Metrics
from probe.recordings.manifest import AGAIN, RecordingError
from probe.recordings.reading import Recording
from probe.running.calibration import Calibration
from probe.running.capture import UncoveredError
from probe.running.corners import CornerAnswer, corner_answers
from probe.running.coverage import rounding_bound, watching
from probe.running.digests import digest_of, weight_digests
from probe.running.functions import function_errors, scan_error
from probe.running.kept_float import changed_weights, float_layers
from probe.running.measurement import application_problem, is_float_output
from probe.running.modes import Mode, find_mode
from probe.running.paths import Path, keeps_prefill, run_path, stray_sites
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference, Take, check_reference, replay
from probe.running.weights import Count, count_by_layer, count_parameters, summarize
from probe.words import LOGITS, describe_error, first_few

#: The stored figures of each group: those with a rule, except the comparisons of golden values. Rmse, psnr, sqnr and
#: the relative errors follow from mse, mae and the reference, so they have no rule.
FIGURES = {
    group: [name.partition(".")[2] for name in RULES if name.startswith(f"{group}.") and not name.endswith(OF_VALUES)]
    for group in ("injected", "propagated", "logits", "outside")
}


@dataclass(frozen=True)
class Flaw:
    """Something that is wrong whatever the baseline says."""

    verdict: Verdict
    message: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Observation:
    """One layer of a recipe: figures by name, golden values by group, and how many elements they stand for."""

    figures: dict[str, float | None]
    values: dict[str, tuple[float, ...]]
    counts: dict[str, int]
    points: Points = field(default_factory=Points)
    flaws: tuple[Flaw, ...] = ()
    weights: str = ""  # how much of the whole model is on a grid, in a line
    digests: dict[str, str] = field(default_factory=dict)  # of exact tensors: corners.NAME, weights.NAME
    units: dict[str, float] = field(default_factory=dict)  # of distances, by group, where the figures do not tell it
    path: PathFigures | None = None  # of the case of a path: more about it, for the cause


class Stream:
    """The accumulators of one layer in one measurement."""

    def __init__(self, count: int, *, percentiles: bool = True) -> None:
        self.comparison = Comparison(percentiles=percentiles)
        self.golden = Golden(count)

    def take(self, output: Tensor, expected: Tensor) -> None:
        """Append a batch."""
        self.comparison.update(output, expected)
        self.golden.update(output, expected)


class LogitStream(Stream):
    """The accumulators of the logits, which are also compared as predictions of the next token."""

    def __init__(self, reference: Reference) -> None:
        super().__init__(sum(batch.numel() for batch in reference.logits), percentiles=False)
        self.predictions = LogitComparison()
        self._tokens = iter(reference.batches)

    def take(self, output: Tensor, expected: Tensor) -> None:
        """Append a batch."""
        super().take(output, expected)
        self.predictions.update(output[:, :-1], expected[:, :-1], next(self._tokens)[:, 1:])

    def observation(self, bytes_per_token: float, *, missing: str) -> Observation:
        """The figures of the whole model; `missing` says why there are none."""
        if not self.golden.seen:
            return Observation({}, {}, {}, flaws=(Flaw("uncovered", f"there are no logits: {missing}"),))
        values, predictions = self.comparison.metrics(), self.predictions.metrics()
        known = {**values.as_dict(), **predictions.as_dict()}
        for name, bits in (("bits_per_byte", "bits_per_token"), ("change_in_bits_per_byte", "change_in_bits")):
            known[name] = None if known[bits] is None else known[bits] / bytes_per_token
        figures = {f"logits.{name}": known[name] for name in FIGURES["logits"]}
        flaws = tuple(_not_finite(LOGITS, LOGITS, values))
        golden = self.golden
        return Observation(figures, {"logits": golden.values()}, {"logits": golden.count}, golden.points(), flaws)


@torch.no_grad()
def observe(
    model: nn.Module,
    recipe: Recipe,
    reference: Reference,
    calibration: Calibration | None = None,
    *,
    device: str = "cpu",
    bytes_per_token: float = 1.0,
    paths: Sequence[Path] = (),
) -> dict[str, Observation]:
    """Run the recipe twice, propagated and injected: every layer, what lies outside of them, and the logits.

    And run these paths, and observe each as a whole.
    """
    check_reference(model, reference)
    twin, mode = apply(model, recipe, calibration), find_mode(recipe.mode)
    counted = count_parameters(model, twin, recipe) if recipe.format is not None else []
    every = {**reference.outside, **reference.modules}
    declared, changed = float_layers(model, mode, every), changed_weights(model, twin, mode)
    declared |= frozenset(reference.outside if keeps_outside(mode) else ())
    twin = twin.to(device)
    logits = LogitStream(reference)
    counts = {label: reference.count(label) for label in reference.layers}
    kinds = ("propagated", "injected")
    streams = {kind: {label: Stream(count) for label, count in counts.items()} for kind in kinds}
    streams["propagated"][LOGITS] = logits
    streams["injected"] |= {label: Stream(reference.count(label), percentiles=False) for label in reference.outside}
    prefill = PrefillRows(reference.layers, max((path.rows for path in paths), default=0))
    answers = corner_answers(twin, recipe, calibration)
    uncovered: list[str] = []
    with watching(twin, recipe) as strays:
        for kind, layers in streams.items():
            try:
                kept = prefill if kind == "injected" else None
                replay(twin, reference, _into(layers, kept), injected=kind == "injected")
            except UncoveredError as problem:
                uncovered.append(str(problem))
    missing = uncovered[0] if uncovered else "its hook never fired."
    found, parts, stock = {}, dict(twin.named_modules()), dict(model.named_modules())
    for label in reference.layers:
        own = {kind: streams[kind][label] for kind in kinds}
        module = reference.modules[label]
        seen = _layer_observation(label, recipe, reference, own, strays, declared, missing=missing)
        inside = [name for name in changed if name.startswith(f"{module}.")]
        seen = _with_changed(seen, inside)
        found[label] = _with_exact(seen, parts.get(module), stock[module], module, answers)
    for label, module in reference.outside.items():
        is_float = None if label not in declared else "to the bit" if device == "cpu" else "up to the order of sums"
        seen = _outside_observation(label, recipe, streams["injected"][label], is_float, missing=missing)
        seen = _with_changed(seen, [name for name in changed if name.startswith(f"{module}.")])
        found[label] = _with_exact(seen, parts.get(module), stock[module], module, answers)
    apart = tuple(f"{module}." for module in every.values())
    rest = [name for name in changed if not name.startswith(apart)]
    found[LOGITS] = _with_changed(logits.observation(bytes_per_token, missing=missing), rest)
    on_paths = {path.name: _path_observation(model, twin, recipe, reference, path, prefill, found) for path in paths}
    if counted:
        weights, counts_of = summarize(model, counted, recipe).line, count_by_layer(counted, reference.modules)
        found = {label: _with_weights(seen, counts_of.get(label), weights) for label, seen in found.items()}
        on_paths = {path: replace(seen, weights=weights) for path, seen in on_paths.items()}
    return {**found, **on_paths}


def keeps_outside(mode: Mode) -> bool:
    """Whether the mode leaves embedding, final norm and head float: all that quantize do, but for users' functions."""
    return mode.is_quantized and (mode.kind != "user" or mode.library is not None)


def _outside_observation(
    label: str, recipe: Recipe, stream: Stream, is_float: str | None, *, missing: str
) -> Observation:
    """A module outside the layers, fed the reference's input; `is_float`: how far it must be the float one."""
    if not stream.golden.seen:
        return Observation({}, {}, {}, flaws=(Flaw("uncovered", f"{label} gave nothing: {missing}"),))
    metrics = stream.comparison.metrics()
    flaws = _not_finite(label, "injected", metrics)
    same = metrics.identical if is_float == "to the bit" else is_float_output(metrics)
    if is_float and not same and not flaws:
        mse = "undefined" if metrics.mse is None else f"{metrics.mse:.3g}"
        text = f"{recipe} keeps the {label} float, but given the reference's input it is not the float one {is_float}"
        flaws.append(Flaw("not float", f"{text}: mse {mse}."))
    figures = {f"outside.{name}": getattr(metrics, name) for name in FIGURES["outside"]}
    values = {"outside": stream.golden.coarse(KEPT["outside"])}
    return Observation(figures, values, {"outside": stream.golden.count}, stream.golden.points(), tuple(flaws))


def _with_weights(seen: Observation, count: Count | None, weights: str) -> Observation:
    """The observation with the exact counts of the layer; those of the logits are of the whole model."""
    if count is None:
        return replace(seen, weights=weights)
    own = {"weights.on_grid": float(count.on_grid), "weights.float": float(count.floating)}
    return replace(seen, figures={**seen.figures, **own}, weights=weights)


def _into(layers: Mapping[str, Stream], kept: PrefillRows | None) -> Take:
    def take(label: str, output: Tensor, expected: Tensor) -> None:
        layers[label].take(output, expected)
        if kept is not None:
            kept.take(label, output)

    return take


def uncovered_path(path: str, reason: str) -> Observation:
    """A path that the model cannot run."""
    text = f'{path} could not run: {reason.rstrip(".")}. Fix that, or leave the path out: without = ["{path}"].'
    return Observation({}, {}, {}, flaws=(Flaw("uncovered", text),))


def _path_observation(
    model: nn.Module,
    twin: nn.Module,
    recipe: Recipe,
    reference: Reference,
    path: Path,
    prefill: PrefillRows,
    layers: Mapping[str, Observation],
) -> Observation:
    """A path of the quantized copy, given its prefill; one that cannot run is uncovered, and says why."""
    try:
        with ExitStack() as watched:
            strays = watched.enter_context(stray_sites(twin)) if len(path.calls) > 1 else []
            outputs = run_path(twin, path, reference)
    except Exception as problem:  # a model that is not ours may raise anything
        return uncovered_path(path.name, describe_error(problem))
    units = {label: own_error(layers[label].figures, "injected") for label in outputs}
    without = [label for label, unit in units.items() if not unit]
    if without:
        flaw = Flaw("uncovered", f"{path.name} has nothing to be compared with: see {first_few(without)}.")
        return Observation({}, {}, {}, flaws=(flaw,))
    mode, keeps = find_mode(recipe.mode), keeps_prefill(model, recipe, path, reference.modules)
    bounds = {label: bound_of(mode, keeps[label]) for label in outputs}
    modules = {label: f"{reference.modules[label]}." for label in outputs}
    inside = {label: [name for name in strays if name.startswith(module)] for label, module in modules.items()}
    sites = {
        label: names[0].removeprefix(modules[label]).replace("sites.", "") for label, names in inside.items() if names
    }
    found = path_figures(path, outputs, prefill, units, bounds, sites)
    flaws = tuple(Flaw(verdict, message) for verdict, message in found.wrong)
    return Observation(dict(found.figures), found.values, found.counts, flaws=flaws, units=found.units, path=found)


def _with_changed(seen: Observation, changed: Sequence[str]) -> Observation:
    """The observation with a flaw for weights that are declared float, but changed."""
    if not changed or any(flaw.verdict == "not float" for flaw in seen.flaws):
        return seen
    flaw = Flaw("not float", f"{changed[0]} is declared float, but changed.", tuple(changed[1:4]))
    return replace(seen, flaws=(*seen.flaws, flaw))


def _with_exact(
    seen: Observation, layer: nn.Module | None, stock: nn.Module, module: str, answers: Sequence[CornerAnswer]
) -> Observation:
    """The observation with what has no noise, or next to none.

    Digests of the weights and of what the grids make of corner values, the grids that are not their definitions, and
    the errors of the functions on the way.
    """
    if layer is None:
        return seen
    inside = [one for one in answers if one.site.startswith(f"{module}.")]
    corners: dict[str, list[Tensor]] = {}
    for one in inside:
        corners.setdefault(one.site.removeprefix(f"{module}."), []).append(one.answer)
    digests = {f"weights.{name}": digest for name, digest in weight_digests(layer).items()}
    digests |= {f"corners.{site}": digest_of(*parts) for site, parts in corners.items()}
    figures: dict[str, float | None] = {"corners.twins": float(len(differing_sites(inside)))} if inside else {}
    if errors := function_errors(layer, stock):
        figures["functions.error"] = max(one.ulps for one in errors)
    if (scan := scan_error(layer)) is not None:
        figures["functions.scan"] = scan
    return replace(seen, figures={**seen.figures, **figures}, digests={**seen.digests, **digests})


def _layer_observation(
    label: str,
    recipe: Recipe,
    reference: Reference,
    streams: dict[str, Stream],
    strays: dict[str, str],
    declared: Collection[str],
    *,
    missing: str,
) -> Observation:
    """A layer from its measurements; the injected one, if there is one, shows whether the recipe was applied."""
    judged = "injected" if "injected" in streams else "propagated"
    figures: dict[str, float | None] = {}
    values: dict[str, tuple[float, ...]] = {}
    counts: dict[str, int] = {}
    flaws: list[Flaw] = []
    for kind, stream in streams.items():
        if not stream.golden.seen:
            flaws.append(Flaw("uncovered", f"{label} gave nothing in the {kind} run: {missing}"))
            continue
        metrics = stream.comparison.metrics()
        figures |= {f"{kind}.{name}": getattr(metrics, name) for name in FIGURES[kind]}
        values[kind], counts[kind] = stream.golden.values(), stream.golden.count
        flaws += _not_finite(label, kind, metrics)
        if kind == judged:
            flaws += _not_applied(label, recipe, reference, metrics, strays, declared, is_injected=kind == "injected")
    return Observation(figures, values, counts, streams[judged].golden.points(), tuple(flaws))


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
    label: str,
    recipe: Recipe,
    reference: Reference,
    metrics: Metrics,
    strays: dict[str, str],
    declared: Collection[str],
    *,
    is_injected: bool,
) -> list[Flaw]:
    """A layer that the recipe left as it was; of a layer that is declared float, whether it changed.

    A recording has no injected run, so a layer that is declared float shows the errors of the layers before it.
    """
    is_declared = label in declared
    if find_mode(recipe.mode).is_reference or (is_declared and not is_injected):
        return []
    module = reference.modules[label]
    inside = [text for name, text in strays.items() if name.startswith(f"{module}.")]
    if problem := application_problem(metrics, is_declared_float=is_declared):
        if is_declared:
            return [Flaw("not float", f"{label} of {recipe} is {problem}.")]
        return [Flaw("not applied", f"{recipe} left {label} as it was: {problem}.")]
    if is_declared:
        return []
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


@torch.no_grad()
def observe_recording(
    recording: Recording,
    recipe: Recipe,
    reference: Reference,
    *,
    model_fingerprint: str,
    data_fingerprint: str,
    declared: Collection[str] = (),
    bytes_per_token: float = 1.0,
) -> dict[str, Observation]:
    """As `observe`, from a recording of the recipe: the propagated figures of every layer, and the logits.

    A layer or recipe that was not recorded is a flaw, `uncovered`. A recording of another model, of other tokens or
    of other shapes is a RecordingError: there is nothing to compare. `declared` are the layers that stay float.
    """
    _check_same(recording, reference, model_fingerprint, data_fingerprint)
    key = str(recipe)
    has = ", ".join(recording.layers(key)) if key in recording.recipes else ", ".join(recording.recipes)
    found = {}
    for label in reference.layers:
        stream = Stream(reference.count(label))
        for output, expected in _pairs(recording, key, f"{label}.output", reference.tensors[f"{label}.output"]):
            stream.take(output, expected)
        missing = f"{recording.folder} has no {label} of {key}, only {has}. {AGAIN}"
        found[label] = _layer_observation(
            label, recipe, reference, {"propagated": stream}, {}, declared, missing=missing
        )
    logits = LogitStream(reference)
    for output, expected in _pairs(recording, key, LOGITS, reference.logits):
        logits.take(output, expected)
    missing = f"{recording.folder} has none of {key}, only {has}. {AGAIN}"
    found[LOGITS] = logits.observation(bytes_per_token, missing=missing)
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
