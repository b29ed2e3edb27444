"""The likely cause of a failure: the first step of a layer that disagrees with its definition, with an explanation.

`diagnose` compares the trace of a layer (running/traces.py) step by step with outputs that are computed another way
(`mamba_steps.py`, `linear_steps.py`) and explains the first disagreement (`signatures.py`).
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from probe.diagnosis.linear_steps import grid_step, kept_weights, linear_steps
from probe.diagnosis.mamba_steps import Block, NeverRanError, mamba_steps
from probe.diagnosis.plain_grids import PlainGrid
from probe.diagnosis.signatures import SIGNATURES, Step, explain
from probe.formats import FORMATS
from probe.models.linear import linear_weights
from probe.running.calibration import PERCENTILE_SITES, amax_lookup
from probe.running.corners import CornerAnswer
from probe.running.measurement import NOISE
from probe.running.traces import BatchTrace, LayerTrace, Parts
from probe.words import LOGITS

#: The longest line that a diagnosis may be.
WIDTH = 110
#: Quantiles of two texts differ by less than this part: 5 % between those of tiny-mamba.
OTHER_TEXT = 0.1


@torch.no_grad()
def diagnose(trace: LayerTrace, sources: Sequence[str] = ()) -> str:
    """The likely cause of the layer's failure in one line: the step, then its explanation. Never raises."""
    try:
        cause = _cause(trace)
    except Exception as problem:  # a diagnosis must not hide the failure it explains
        cause = f"no cause found: {str(problem) or type(problem).__name__}"
    line = " ".join(cause.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def corner_cause(trace: LayerTrace) -> str:
    """The cause in one line where only the answers at corner values have changed."""
    wrong = _wrong_corner(trace)
    return f"{wrong} (at corner values)"[:WIDTH] if wrong else "corner values give other results"


def wrong_corners(answers: Iterable[CornerAnswer]) -> dict[str, str]:
    """The sites whose grid is not that of the recipe, with an explanation each."""
    found: dict[str, str] = {}
    for one in answers:  # a site has several
        if explanation := explain(grid_step(one.site, PlainGrid.at(one.grid), one.given, one.answer)):
            found.setdefault(one.site, explanation)
    return found


def _wrong_corner(trace: LayerTrace) -> str:
    """The first site whose grid is wrong at corner values, with its explanation; empty if there is none."""
    for site, explanation in wrong_corners(trace.corners()).items():
        return f"site {site.removeprefix(f'{trace.module}.').removeprefix('mixer.')}; {explanation}"
    return ""


def _cause(trace: LayerTrace) -> str:
    mode, label = trace.mode, trace.label
    outside = _changed_outside(trace)
    if label == LOGITS or label not in trace.reference.modules:
        return outside or "no cause found: embedding, norm and head outside the layers are those of the float model"
    examined = 0
    conv_outputs: dict[str, list[Tensor]] = {}
    for batch in trace.batches():
        if batch.output is None:
            return f"{label} is never called as a module, so its hooks do not fire: compiled, fused or skipped"
        if obvious := _obvious(batch, label, batch.output):
            return obvious
        for name, tensors in batch.parts.items():
            conv_outputs.setdefault(name, []).append(tensors.get("conv1d.output.given", torch.zeros(0)))
        try:
            for step in _steps(trace, batch.parts):
                examined += 1
                if explanation := explain(step):
                    return f"{step.name}; {explanation}"
        except NeverRanError as problem:
            return str(problem)
    if mode.kind in ("user", "float") or not examined:
        return outside or _as_a_whole(trace)
    corner = "" if outside else _wrong_corner(trace)
    return (
        outside
        or (corner and f"{corner}, though no value of this text shows it")
        or _odd_calibration(trace, conv_outputs)
        or f"all {examined} steps of {label} agree with their definitions: look at its input or the calibration"
    )


def _steps(trace: LayerTrace, parts: Parts) -> Iterator[Step]:
    """The steps of the layer in one batch, whatever kind of mode it is."""
    model, twin, mode, layer = trace.model, trace.twin, trace.mode, trace.module
    if mode.kind == "float":
        yield from kept_weights(model.get_submodule(layer), twin.get_submodule(layer), mode.dtype)
    elif mode.kind == "linear":
        yield from linear_steps(trace, parts)
    elif mode.kind == "ssm":
        assert trace.recipe.format is not None
        for name, tensors in parts.items():
            path = f"{layer}.{name}" if name else layer
            amax = amax_lookup(trace.calibration, f"{path}.mixer.")
            blocks = twin.get_submodule(path), model.get_submodule(path)
            format = FORMATS[trace.recipe.format]
            yield from mamba_steps(Block(tensors, *blocks, mode, format, amax, f"{path}.mixer"))


def _changed_outside(trace: LayerTrace) -> str:
    """A parameter outside all layers that differs from the float model's; modes of users may change any."""
    mode = trace.mode
    if mode.kind == "user":
        return ""
    inside = tuple(f"{layer}." for layer in trace.reference.modules.values())
    on_grid = set(linear_weights(trace.model)) if mode.kind == "linear" else set()
    for step in kept_weights(trace.model, trace.twin, mode.dtype if mode.kind == "float" else None):
        name = step.name.removeprefix("weight ")
        of_a_block = ".mixer." in name or name.endswith(".norm.weight")  # which may not be selected
        if name in on_grid or name.startswith(inside) or of_a_block:
            continue
        if explanation := explain(step):
            return f"{step.name}; {explanation}"
    return ""


def _obvious(batch: BatchTrace, label: str, output: Tensor) -> str:
    """A layer whose output alone shows that it is skipped, or that the mode was not applied."""
    given, expected = batch.given, batch.expected
    if output.shape == given.shape and bool((output == given).all()) and bool((expected != given).any()):
        return f"{label}; it returns its input: the layer is skipped"
    if output.shape == expected.shape:
        error = (output - expected).double().square().mean() / expected.double().square().mean().clamp(min=1e-30)
        if bool(error < NOISE):
            return f"{label}; its output is the float layer's: the mode was not applied to it"
    return ""


def _as_a_whole(trace: LayerTrace) -> str:
    """For a layer whose steps are not known: its output beside the float layer's, over all batches."""
    label, unexplained = trace.label, ""
    for batch in trace.batches():
        output, expected = batch.output, batch.expected
        if output is None or output.shape != expected.shape:
            continue
        if pattern := _pattern(output.double(), expected.double(), batch.given.double()):
            return f"{label} as a whole; {pattern}"
        error = float((output.double() - expected.double()).square().mean().sqrt())
        difference = f"{label} differs from the float layer by {error:.3g} rms, without a pattern"
        unexplained = unexplained or f"no cause found: {difference}"
    return unexplained or f"no cause found: {label} gave nothing to compare"


def _pattern(output: Tensor, expected: Tensor, given: Tensor) -> str:
    """A pattern in a difference that contains rounding errors too."""
    step = Step("", output, expected)
    if obvious := SIGNATURES["NaN or Inf"](step) or SIGNATURES["zeros"](step):
        return obvious
    d = output - expected
    for axis, name in ((-1, "channel"), (-2, "token")):
        if d.dim() >= 2 and d.shape[axis] > 2:
            others = [other for other in range(d.dim()) if other != d.dim() + axis]
            energy = d.square().sum(dim=others)
            share = float(energy.max() / energy.sum().clamp(min=1e-300))
            if share > 0.5:
                return f"{share:.0%} of the squared error is in one {name} ({int(energy.argmax())})"
    base = given if given.shape == expected.shape else torch.zeros_like(expected)
    wanted, got = expected - base, output - base
    slope = float((wanted * got).sum() / wanted.square().sum().clamp(min=1e-300))
    left = float((got - slope * wanted).square().sum() / d.square().sum().clamp(min=1e-300))
    if left < 0.7:
        return f"what it adds is {slope:.4g} times the float layer's"
    mean = float(d.mean() / d.square().mean().sqrt().clamp(min=1e-300))
    return f"the error has a mean of {mean:+.2f} of its rms" if abs(mean) > 0.3 else ""


def _odd_calibration(trace: LayerTrace, conv_outputs: dict[str, list[Tensor]]) -> str:
    """A scale of the calibration that does not fit this text; empty if all do."""
    calibration, format = trace.calibration, trace.recipe.format
    if calibration is None or format is None or not FORMATS[format].needs_calibration:
        return ""
    site = PERCENTILE_SITES[0]
    for name, tensors in conv_outputs.items():
        mixer = f"{trace.module}.{name}.mixer".replace("..", ".")
        amax, largest = calibration.amax.get(f"{mixer}.{site}"), calibration.amax.get(f"{mixer}.scan.u")
        values = torch.cat([tensor.reshape(-1).abs() for tensor in tensors])
        if amax is None or not values.numel():
            continue
        if largest == amax and calibration.percentile < 1:
            return f"calibration of {site}; amax {amax:.4g} is the largest value (minmax), not a percentile"
        alpha = calibration.percentile
        quantile = float(values.kthvalue(max(1, round(values.numel() * alpha))).values)
        if abs(amax / quantile - 1) > OTHER_TEXT:
            return f"calibration of {site}; amax {amax:.4g}, but the {alpha:g} quantile of this text is {quantile:.4g}"
    return ""
