"""The likely cause of a failure: the first step of a layer that does not do what it should, and how it looks.

`diagnose` runs one layer of the quantized model on the reference's input, step by step beside expectations that are
computed another way (`mamba_steps.py`, `plain_grids.py`), and has the first disagreement explained (`signatures.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from probe.diagnosis.corners import wrong_corners
from probe.diagnosis.linear_steps import kept_weights, linear_steps
from probe.diagnosis.mamba_steps import Block, NeverRanError, mamba_steps, watched
from probe.diagnosis.signatures import GRIDS, Step, explain
from probe.formats import FORMATS
from probe.models.linear import GridLinear, linears
from probe.models.mamba import mamba_blocks
from probe.running.calibration import PERCENTILE_SITES, Calibration
from probe.running.capture import UncoveredError
from probe.running.measurement import NOISE
from probe.running.modes import Mode, find_mode
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference, replay
from probe.words import LOGITS

#: The longest line that a diagnosis may be.
WIDTH = 110
#: Quantiles of two texts differ by less than this part: 5 % between those of tiny-mamba.
OTHER_TEXT = 0.1


@torch.no_grad()
def diagnose(
    model: nn.Module, recipe: Recipe, reference: Reference, calibration: Calibration | None, label: str
) -> str:
    """The likely cause why this layer failed, in one line: what, then how it looks. Never raises."""
    try:
        found = _diagnosed(model, recipe, reference, calibration, label)
    except Exception as problem:  # a diagnosis must not hide the failure it explains
        found = f"no cause found: {str(problem) or type(problem).__name__}"
    line = " ".join(found.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _diagnosed(
    model: nn.Module, recipe: Recipe, reference: Reference, calibration: Calibration | None, label: str
) -> str:
    mode, twin = find_mode(recipe.mode), apply(model, recipe, calibration)
    outside = _outside(model, twin, mode, list(reference.modules.values()))
    if label == LOGITS or label not in reference.modules:
        return outside or "no cause found: embedding, norm and head outside the layers are those of the float model"
    examined = 0
    lives: dict[str, list[Tensor]] = {}
    for index in range(len(reference.batches)):
        one = _batch(reference, label, index)
        module = twin.get_submodule(reference.modules[label])
        with _recording(module, mode) as seen:
            output = _output(twin, one, label)
        if output is None:
            return f"{label} is never called as a module, so its hooks do not fire: compiled, fused or skipped"
        found = _whole(one, label, output)
        if found:
            return found
        for name, tensors in seen.items():
            lives.setdefault(name, []).append(tensors.get("conv1d.output.given", torch.zeros(0)))
        try:
            for step in _steps(model, twin, recipe, calibration, reference.modules[label], seen):
                examined += 1
                said = explain(step)
                if said:
                    return f"{step.name}; {said}"
        except NeverRanError as problem:
            return str(problem)
    if mode.kind in ("user", "float") or not examined:
        return outside or _statistics(reference, twin, label)
    return (
        outside
        or _at_corners(twin, recipe, calibration, reference.modules[label])
        or _calibrated(calibration, recipe, reference.modules[label], lives)
        or f"all {examined} steps of {label} agree with their definitions: look at its input or the calibration"
    )


def _batch(reference: Reference, label: str, index: int) -> Reference:
    """The reference with nothing but one layer and one batch."""
    keys = (f"{label}.{kind}" for kind in ("input", "output", "injected"))
    return replace(
        reference,
        batches=reference.batches[index : index + 1],
        layers=(label,),
        modules={label: reference.modules[label]},
        tensors={key: reference.tensors[key][index : index + 1] for key in keys},
        logits=reference.logits[index : index + 1],
    )


def _output(twin: nn.Module, reference: Reference, label: str) -> Tensor | None:
    """What the layer makes of the reference's input; None if it never ran."""
    outputs: list[Tensor] = []
    try:
        replay(twin, reference, lambda _, output, __: outputs.append(output.clone()), injected=True)
    except UncoveredError:
        return None
    return outputs[0]


@contextmanager
def _recording(module: nn.Module, mode: Mode) -> Iterator[dict[str, dict[str, Tensor]]]:
    """What the parts of a layer took and gave: name of the block or linear -> `part.given`, `part.made`."""
    seen: dict[str, dict[str, Tensor]] = {}

    def keep(tensors: dict[str, Tensor], part: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            made = output if isinstance(output, Tensor) else output[0]
            if given is not None:
                tensors.setdefault(f"{part}.given", given.detach().clone())
            tensors.setdefault(f"{part}.made", made.detach().clone())

        return hook

    with ExitStack() as hooks:

        def watch(owner: str, parts: dict[str, nn.Module]) -> None:
            for part, watched_module in parts.items():
                hook = keep(seen.setdefault(owner, {}), part)
                hooks.callback(watched_module.register_forward_hook(hook, with_kwargs=True).remove)

        if mode.kind == "ssm":
            for name, block in mamba_blocks(module):
                watch(name, watched(block))
        elif mode.kind == "linear":
            for name, linear in module.named_modules():
                if isinstance(linear, GridLinear):
                    watch(name, {"linear": linear, "input": linear.input})
        yield seen


def _steps(
    model: nn.Module,
    twin: nn.Module,
    recipe: Recipe,
    calibration: Calibration | None,
    layer: str,
    seen: dict[str, dict[str, Tensor]],
) -> Iterator[Step]:
    mode = find_mode(recipe.mode)
    if mode.kind == "float":
        yield from kept_weights(model.get_submodule(layer), twin.get_submodule(layer), mode.dtype)
    elif mode.kind == "linear":
        yield from linear_steps(model, twin, recipe, calibration, layer, seen)
    elif mode.kind == "ssm":
        for name, tensors in seen.items():
            path = f"{layer}.{name}" if name else layer
            amax = (lambda site, path=path: calibration.amax_of(f"{path}.mixer.{site}")) if calibration else _no_amax
            assert recipe.format is not None
            stock = model.get_submodule(path)
            yield from mamba_steps(Block(tensors, twin.get_submodule(path), stock, mode, recipe.format, amax))


def _no_amax(site: str) -> float | None:
    return None


def _outside(model: nn.Module, twin: nn.Module, mode: Mode, layers: list[str]) -> str:
    """Whether a parameter outside all layers is not that of the float model; of user modes nothing is known."""
    if mode.kind == "user":
        return ""
    found, dtype = dict(twin.named_parameters()), mode.dtype if mode.kind == "float" else None
    for name, parameter in model.named_parameters():
        if name in found and not any(name.startswith(f"{layer}.") for layer in layers):
            if mode.kind == "linear" and name.removesuffix(".weight") in linears(model):
                continue
            if ".mixer." in name or name.endswith(".norm.weight"):
                continue  # of a block that was not selected
            said = explain(
                Step(name, found[name].detach(), parameter.detach().to(dtype or parameter.dtype), noise=GRIDS)
            )
            if said:
                return f"weight {name}; {said}"
    return ""


def _whole(reference: Reference, label: str, output: Tensor) -> str:
    """What can be said of the layer at once: skipped, or not quantized at all."""
    given = reference.tensors[f"{label}.input"][0].float()
    expected = reference.tensors[f"{label}.injected"][0].float()
    if output.shape == given.shape and bool((output == given).all()) and bool((expected != given).any()):
        return f"{label}; it gives its input back: the layer is skipped"
    if output.shape == expected.shape:
        error = (output - expected).double().square().mean() / expected.double().square().mean().clamp(min=1e-30)
        if bool(error < NOISE):
            return f"{label}; its output is the float layer's: the mode was not applied to it"
    return ""


def _statistics(reference: Reference, twin: nn.Module, label: str) -> str:
    """Of a layer that cannot be looked into: its output beside the float layer's, over all batches."""
    worst = ""
    for index in range(len(reference.batches)):
        one = _batch(reference, label, index)
        output, expected = _output(twin, one, label), one.tensors[f"{label}.injected"][0].float()
        if output is None or output.shape != expected.shape:
            continue
        said = _compared(output.double(), expected.double(), one.tensors[f"{label}.input"][0].double())
        if said:
            return f"{label} as a whole; {said}"
        error = float((output.double() - expected.double()).square().mean().sqrt())
        worst = worst or f"no cause found: {label} differs from the float layer by {error:.3g} rms, without a pattern"
    return worst or f"no cause found: {label} gave nothing to compare"


def _compared(output: Tensor, expected: Tensor, given: Tensor) -> str:
    """A pattern in a difference that rounding is a part of."""
    bad = ~output.isfinite() & expected.isfinite()
    if bool(bad.any()):
        kind = "NaN" if bool(output.isnan().any()) else "Inf"
        return f"{kind} in {int(bad.sum())} of {bad.numel()} values, the first at {bad.nonzero()[0].tolist()}"
    if not bool(output.any()):
        return "gives only zeros"
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


def _at_corners(twin: nn.Module, recipe: Recipe, calibration: Calibration | None, layer: str) -> str:
    """Grids that are wrong where no value of this text lies."""
    for name, said in wrong_corners(twin, recipe, calibration).items():
        if name.startswith(f"{layer}."):
            return f"site {name.partition('.mixer.')[2]}; {said}, though no value of this text shows it"
    return ""


def _calibrated(calibration: Calibration | None, recipe: Recipe, layer: str, lives: dict[str, list[Tensor]]) -> str:
    """All steps agree with the calibration: does the calibration itself look right?"""
    if calibration is None or recipe.format is None or not FORMATS[recipe.format].needs_calibration:
        return ""
    site = PERCENTILE_SITES[0]
    for name, tensors in lives.items():
        mixer = f"{layer}.{name}.mixer".replace("..", ".")
        amax, largest = calibration.amax.get(f"{mixer}.{site}"), calibration.amax.get(f"{mixer}.scan.u")
        live = torch.cat([tensor.reshape(-1).abs() for tensor in tensors])
        if amax is None or not live.numel():
            continue
        if largest == amax and calibration.percentile < 1:
            return f"calibration of {site}; amax {amax:.4g} is the largest value (minmax), not a percentile"
        alpha = calibration.percentile
        quantile = float(live.kthvalue(max(1, round(live.numel() * alpha))).values)
        if abs(amax / quantile - 1) > OTHER_TEXT:
            return f"calibration of {site}; amax {amax:.4g}, but the {alpha:g} quantile of this text is {quantile:.4g}"
    return ""
