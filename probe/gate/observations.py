"""Observations: a recipe runs, and its layers, what lies outside of them, its paths and logits are measured."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from probe.gate.definitions import differing_sites
from probe.gate.golden_values import KEPT
from probe.gate.measured_layers import (
    FIGURES,
    Flaw,
    Observation,
    OutputStream,
    Stream,
    layer_observation,
    not_finite,
)
from probe.gate.path_figures import PrefillRows, bound_of, path_figures
from probe.gate.tolerances import own_error
from probe.models.offload import return_free_memory
from probe.models.quantized import statement_of
from probe.running.calibration import Calibration
from probe.running.capture import UncoveredError
from probe.running.corners import CornerAnswer, corner_answers
from probe.running.coverage import watching
from probe.running.digests import digest_of, weight_digests
from probe.running.functions import function_errors, scan_error
from probe.running.kept_float import changed_weights, float_layers
from probe.running.measurement import application_problem, is_float_output
from probe.running.modes import Mode, find_mode
from probe.running.paths import Path, keeps_prefill, run_path, stray_sites
from probe.running.recipes import Recipe, apply, gridded_modules
from probe.running.reference import Reference, Take, check_reference, replay
from probe.running.weights import Count, count_by_layer, count_parameters, summarize
from probe.words import describe_error, first_few


@torch.no_grad()
def observe(
    model: nn.Module,
    recipe: Recipe,
    reference: Reference,
    calibration: Calibration | None = None,
    *,
    device: str = "cpu",
    bytes_per_token: float | None = 1.0,
    paths: Sequence[Path] = (),
) -> dict[str, Observation]:
    """Run the recipe twice, propagated and injected: every layer, what lies outside of them, and the output.

    And run these paths, and observe each as a whole.
    """
    check_reference(model, reference)
    twin, mode = apply(model, recipe, calibration), find_mode(recipe.mode)
    return_free_memory()  # of the weights that were replaced
    counted = count_parameters(model, twin, recipe) if mode.is_quantized else []
    stated, every = statement_of(twin), {**reference.outside, **reference.modules}
    declared, changed = float_layers(model, mode, every), changed_weights(model, twin, mode)
    gridded = gridded_modules(model, recipe, reference.outside)
    declared |= frozenset(label for label in reference.outside if keeps_outside(mode) and label not in gridded)
    twin = twin.to(device)
    whole, output = reference.kind.label, OutputStream(reference)
    counts = {label: reference.count(label) for label in reference.layers}
    kinds = ("propagated", "injected")
    streams = {kind: {label: Stream(count) for label, count in counts.items()} for kind in kinds}
    streams["propagated"][whole] = output
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
        seen = layer_observation(label, recipe, reference, own, strays, declared, missing=missing)
        inside = [name for name in changed if name.startswith(f"{module}.")]
        seen = _with_changed(seen, inside)
        found[label] = _with_exact(seen, parts.get(module), stock[module], module, answers)
    for label, module in reference.outside.items():
        is_float = None if label not in declared else "to the bit" if device == "cpu" else "up to the order of sums"
        stream = streams["injected"][label]
        seen = _outside_observation(label, recipe, stream, is_float, missing=missing)
        if label in gridded and stream.golden.seen:
            stray = next((text for name, text in strays.items() if name.startswith(f"{module}.")), "")
            seen = _with_application(seen, label, recipe, stream, stray)
        seen = _with_changed(seen, [name for name in changed if name.startswith(f"{module}.")])
        found[label] = _with_exact(seen, parts.get(module), stock[module], module, answers)
    apart = tuple(f"{module}." for module in every.values())
    rest = [name for name in changed if not name.startswith(apart)]
    found[whole] = _with_changed(output.observation(bytes_per_token, missing=missing), rest)
    on_paths = {path.name: _path_observation(model, twin, recipe, reference, path, prefill, found) for path in paths}
    if counted:
        weights = summarize(model, counted, recipe, stated).line
        counts_of = count_by_layer(counted, reference.modules, whole=whole)
        found = {label: _with_weights(seen, counts_of.get(label), weights) for label, seen in found.items()}
        on_paths = {path: replace(seen, weights=weights) for path, seen in on_paths.items()}
    return {**found, **on_paths}


def _with_application(seen: Observation, label: str, recipe: Recipe, stream: Stream, stray: str) -> Observation:
    """The observation with a flaw if a module outside the layers that the recipe quantizes is as it was."""
    problem = application_problem(stream.comparison.metrics(), is_declared_float=False) or stray
    flaw = Flaw("not applied", f"{recipe} was not applied to the {label}: {problem}.")
    return replace(seen, flaws=(*seen.flaws, flaw)) if problem and not seen.flaws else seen


def keeps_outside(mode: Mode) -> bool:
    """Whether the mode leaves embedding, final norm and head float: all that quantize do, but for users' functions.

    What a recipe includes is on a grid all the same (`gridded_modules`).
    """
    return mode.is_quantized and (mode.kind != "user" or mode.library is not None)


def _outside_observation(
    label: str, recipe: Recipe, stream: Stream, is_float: str | None, *, missing: str
) -> Observation:
    """A module outside the layers, fed the reference's input; `is_float`: how far it must be the float one."""
    if not stream.golden.seen:
        return Observation({}, {}, {}, flaws=(Flaw("uncovered", f"{label} gave nothing: {missing}"),))
    metrics = stream.comparison.metrics()
    flaws = not_finite(label, "injected", metrics)
    same = metrics.identical if is_float == "to the bit" else is_float_output(metrics)
    if is_float and not same and not flaws:
        mse = "undefined" if metrics.mse is None else f"{metrics.mse:.3g}"
        text = f"{recipe} keeps the {label} float, but given the reference's input it is not the float one {is_float}"
        flaws.append(Flaw("not float", f"{text}: mse {mse}."))
    figures = {f"outside.{name}": getattr(metrics, name) for name in FIGURES["outside"]}
    values = {"outside": stream.golden.coarse(KEPT["outside"])}
    return Observation(figures, values, {"outside": stream.golden.count}, stream.golden.points(), tuple(flaws))


def _with_weights(seen: Observation, count: Count | None, weights: str) -> Observation:
    """The observation with the exact counts of the layer; those of the output are of the whole model."""
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
