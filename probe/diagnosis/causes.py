"""The likely cause of a failure: the first step of a layer that disagrees with its definition, with an explanation.

`diagnose` compares the trace of a layer (running/traces.py) step by step with outputs that are computed another way
(`mamba_steps.py`, `linear_steps.py`) and explains the first disagreement (`explanations.py`). Where all steps agree,
or where the steps are not known, it names what differs from what is stored, and compares the output with the stored
one (`changed_layers.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from probe.data.calls import input_fingerprint, split_rows
from probe.diagnosis.changed_layers import changed_layer
from probe.diagnosis.explanations import (
    UNKNOWN,
    best_claim,
    explain,
    explain_together,
    explains_most,
    facts,
    not_finite,
)
from probe.diagnosis.inner_modules import other_settings
from probe.diagnosis.layer_steps import layer_steps
from probe.diagnosis.linear_steps import grid_of_weight, grid_step, kept_weights, other_tokens, outside_step
from probe.diagnosis.mamba_block import NeverRanError
from probe.diagnosis.plain_grids import PlainGrid
from probe.diagnosis.signatures import Step, rms
from probe.formats import FORMATS
from probe.models.linear import linear_weights
from probe.models.mamba_blocks import mamba_blocks
from probe.running.calibration import PERCENTILE_SITES
from probe.running.corners import CornerAnswer
from probe.running.measurement import NOISE
from probe.running.recipes import Recipe, gridded_modules
from probe.running.traces import BatchTrace, LayerTrace

#: The longest line that a diagnosis may be.
WIDTH = 110
#: Quantiles of two texts differ by less than this part: 5 % between those of tiny-mamba.
OTHER_TEXT = 0.1


@torch.no_grad()
def diagnose(trace: LayerTrace, sources: Sequence[str] = (), golden: tuple[float, ...] | None = None) -> str:
    """The likely cause of the layer's failure in one line: the step, then its explanation. Never raises.

    `sources` are sentences about what differs from what is stored: the reference, the weights, the format, the
    calibration, the tokens, the configuration. `golden` is the stored sketch, and perhaps sample, of the output.
    """
    try:
        cause = _cause(trace, sources, golden)
    except Exception as problem:  # a diagnosis must not hide the failure it explains
        cause = f"{UNKNOWN}: {str(problem) or type(problem).__name__}"
    return in_a_line(cause)


@torch.no_grad()
def corner_cause(trace: LayerTrace, sources: Sequence[str] = ()) -> str:
    """The cause in one line where only the answers at corner values have changed. Never raises."""
    try:
        wrong = _wrong_corner(trace)
    except Exception as problem:
        return in_a_line(f"{UNKNOWN}: {str(problem) or type(problem).__name__}")
    if row := _about(sources, "format"):
        return in_a_line(row)
    if wrong:
        return in_a_line(f"{wrong} (at corner values)")
    return in_a_line(next(iter(sources), f"{UNKNOWN}: corner values give other results, as their definition does"))


def in_a_line(cause: str) -> str:
    """A cause without line breaks, no longer than WIDTH."""
    line = " ".join(cause.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _about(sources: Sequence[str], subject: str) -> str:
    """The first of the sentences that is about a subject."""
    return next((one for one in sources if subject in one.partition(" ")[0].lower()), "")


def wrong_corners(answers: Iterable[CornerAnswer]) -> dict[str, str]:
    """The sites whose grid is not that of the recipe, with an explanation each."""
    steps: dict[str, list[Step]] = {}
    for one in answers:  # a site has several
        steps.setdefault(one.site, []).append(grid_step(one.site, PlainGrid.at(one.grid), one.given, one.answer))
    found = {site: explain_together(own) or _zero_signs(own) for site, own in steps.items()}
    return {site: explanation for site, explanation in found.items() if explanation}


def _zero_signs(steps: Sequence[Step]) -> str:
    """Says so if zeros have lost, or got, a sign."""
    if steps[0].block is None:  # integers have no -0
        return ""
    zeros = [(step.actual == 0) & (step.expected == 0) for step in steps]
    unlike = [step.actual.signbit() != step.expected.signbit() for step in steps]
    count = sum(int((zero & other).sum()) for zero, other in zip(zeros, unlike, strict=True))
    return f"the sign of zeros is wrong, {count} of {sum(int(zero.sum()) for zero in zeros)}" if count else ""


def _wrong_corner(trace: LayerTrace) -> str:
    """The first site whose grid is wrong at corner values, with its explanation; empty if there is none."""
    for site, explanation in wrong_corners(trace.corners()).items():
        return f"site {site.removeprefix(f'{trace.module}.').removeprefix('mixer.')}; {explanation}"
    return ""


def _by_corners(trace: LayerTrace, step: Step, explanation: str) -> str:
    """The explanation; of a site whose values fit several replays equally well, the one that its corners fit too."""
    if step.given is None or not (", or " in explanation or UNKNOWN in explanation):
        return explanation
    site = step.name.removeprefix("site ")
    wrong = wrong_corners(one for one in trace.corners() if one.site.endswith(f".{site}"))
    found = next(iter(wrong.values()), "")
    return found if explains_most(step, found) else explanation


def _cause(trace: LayerTrace, sources: Sequence[str], golden: tuple[float, ...] | None) -> str:
    mode, label = trace.mode, trace.label
    outside = _changed_outside(trace)
    if label in trace.reference.outside:
        return (
            _outside_cause(trace) or outside or _told(sources) or f"{label}; {UNKNOWN}: it differs by less than sums do"
        )
    if label not in trace.reference.modules:
        return outside or _told(sources) or f"{UNKNOWN}: embedding, norm and head are those of the float model"
    examined = 0
    conv_outputs: dict[str, list[Tensor]] = {}
    for number, batch in enumerate(trace.batches()):
        if batch.output is None:
            return f"{label} is never called as a module, so its hooks do not fire: compiled, fused or skipped"
        if obvious := _obvious(batch, label, batch.output):
            return _float_reference(trace) or _told(sources) or obvious if "not applied" in obvious else obvious
        if number == 0 and (carried := _second_run(trace, batch.output)):
            return carried
        for name, tensors in batch.parts.items():
            conv_outputs.setdefault(name, []).append(tensors.get("conv1d.output.given", torch.zeros(0)))
        try:
            for step in layer_steps(trace, batch.parts):
                examined += 1
                if explanation := explain(step):
                    return f"{step.name}; {_by_corners(trace, step, explanation)}"
        except NeverRanError as problem:
            return str(problem)
    if outside:
        return outside
    if mode.kind in ("user", "float") or not examined:
        whole = _as_a_whole(trace, golden)
        return (UNKNOWN in whole and _told(sources)) or whole
    corner = _wrong_corner(trace)
    return (
        _about(sources, "format")
        or (corner and f"{corner}, though no value of this text shows it")
        or _odd_calibration(trace, conv_outputs, sources)
        or _told(sources)
        or _float_reference(trace)
        or _repeated_sample(trace)
        or changed_layer(trace, golden)
        or f"{UNKNOWN}: all {examined} steps of {label} agree with their definitions, and nothing stored differs"
    )


def _told(sources: Sequence[str]) -> str:
    """The first source that differs; with more of them, how many."""
    more = f" (and {len(sources) - 1} more)" if len(sources) > 1 else ""
    return f"{sources[0]}{more}" if sources else ""


def _changed_outside(trace: LayerTrace) -> str:
    """A parameter outside all layers that differs from the float model's; modes of users may change any."""
    mode = trace.mode
    if mode.kind == "user":
        return ""
    inside = tuple(f"{layer}." for layer in trace.reference.modules.values())
    on_grid = set(linear_weights(trace.model, trace.recipe.include)) if mode.kind == "linear" else set()
    blocks = list(mamba_blocks(trace.model))
    of_blocks = tuple(f"{name}." for block in blocks for name in (block.mixer_name, block.norm_name))
    for step in kept_weights(trace.model, trace.twin, mode.dtype if mode.kind == "float" else None):
        name = step.name.removeprefix("weight ")
        if name in on_grid or name.startswith((*inside, *of_blocks)):  # a block may not be selected
            continue
        if explanation := explain(step):
            return f"{step.name}; {explanation}"
    return ""


def _outside_cause(trace: LayerTrace) -> str:
    """The embedding, the norm or the head beside that of the float model: its weights, then what it computes."""
    label = trace.label
    stock, twin = (side.get_submodule(trace.module) for side in (trace.model, trace.twin))
    if gridded_modules(trace.model, trace.recipe, {label: trace.module}):
        return _gridded_cause(trace)
    dtype = trace.mode.dtype if trace.mode.kind == "float" else None
    for step in kept_weights(stock, twin, dtype):
        if explanation := explain(step):
            grid = grid_of_weight(step) if UNKNOWN in explanation else ""
            return f"{label}; weight: {f'put on the grid of {grid}' if grid else explanation}"
    for batch in trace.batches():
        if batch.output is None:
            return f"{label} is never called as a module, so its hooks do not fire: compiled, fused or skipped"
        if explanation := explain(outside_step(label, stock, batch.given, batch.output, batch.expected)):
            is_table = label == "embedding" and isinstance(stock, nn.Embedding)
            table = stock.get_parameter("weight") if is_table else None
            tokens = "" if table is None else other_tokens(table, batch.given, batch.output)
            return f"{label}; {tokens or explanation}"
    return next((f"{label}; {sentence}" for sentence, _ in other_settings(twin, stock)), "")


def _gridded_cause(trace: LayerTrace) -> str:
    """An embedding or a head that is on a grid: its weight, its input and its product."""
    for batch in trace.batches():
        for step in layer_steps(trace, batch.parts):
            if explanation := explain(step):
                return f"{trace.label}; {step.name}; {_by_corners(trace, step, explanation)}"
    return ""


def _obvious(batch: BatchTrace, label: str, output: Tensor) -> str:
    """A layer whose output alone shows that it is skipped, or that the mode was not applied."""
    given, expected = batch.given, batch.expected
    if output.shape == given.shape and bool((output == given).all()) and bool((expected != given).any()):
        return f"{label}; it returns its input: the layer is skipped"
    if _is_same(output, expected):
        return f"{label}; its output is the float layer's: the mode was not applied to it"
    return ""


def _is_same(output: Tensor, expected: Tensor) -> bool:
    """Whether two outputs differ by the order of sums at most."""
    if output.shape != expected.shape:
        return False
    error = (output - expected).double().square().mean() / expected.double().square().mean().clamp(min=1e-30)
    return bool(error < NOISE)


def _second_run(trace: LayerTrace, output: Tensor) -> str:
    """Says so if the layer gives another output when it is run again on the same input."""
    again = next(trace.batches()).output
    if again is None or _is_same(again, output) or not bool(output.isfinite().all()):
        return ""
    part = float((again - output).double().square().mean().sqrt()) / max(rms(output), 1e-30)
    what = f"its second run differs by {part:.2g} (a carried state, or chance)"
    return f"{trace.label} is not a function of its input: {what}"


def _float_reference(trace: LayerTrace) -> str:
    """Says so if the reference is not what the float layer makes of its input, or if its weights are on a grid."""
    plain = replace(trace, recipe=Recipe("fp32"), calibration=None)
    for batch in plain.batches():
        if batch.output is not None and not _is_same(batch.output, batch.expected):
            off = Step("", batch.output, batch.expected.to(batch.output.dtype))
            return f"the reference of {trace.label} is not what the float layer gives: {facts(off)}"
    for name, weight in trace.model.get_submodule(trace.module).named_parameters():
        if weight.dim() > 1 and weight.numel() >= 2048:
            levels = torch.unique(weight.detach()).numel()
            if levels <= 256:
                return f"the reference of {trace.label} is quantized: its {name} has only {levels} distinct values"
    return ""


def _repeated_sample(trace: LayerTrace) -> str:
    """A sample of the text that is there twice."""
    seen: dict[str, int] = {}
    for index, sample in enumerate(split_rows(trace.reference.batches, 1)):
        earlier = seen.setdefault(input_fingerprint([sample]), index)
        if earlier != index:
            return f"input; sample {index} is sample {earlier}, evaluated twice"
    return ""


def _as_a_whole(trace: LayerTrace, golden: tuple[float, ...] | None) -> str:
    """For a layer whose steps are not known: its output beside the stored one, or beside the float layer's."""
    label, unexplained = trace.label, ""
    for batch in trace.batches():
        output, expected, given = batch.output, batch.expected, batch.given
        if output is None or output.shape != expected.shape:
            continue
        if lost := not_finite(Step("", output, expected)):
            return f"{label}; {lost}"
    if changed := changed_layer(trace, golden):
        return changed
    for batch in trace.batches():
        output, expected, given = batch.output, batch.expected, batch.given
        if output is None or output.shape != expected.shape:
            continue
        best = best_claim(Step("", output, expected))
        if given.shape == expected.shape:
            added = best_claim(Step("", output - given, expected - given))
            if added.sentence and added.left < best.left:
                best = replace(added, sentence=f"what it adds: {added.sentence}")
        if best.sentence:
            return f"{label}, beside the float layer; {best.sentence}"
        unexplained = unexplained or f"{label}, beside the float layer; {facts(Step('', output, expected))}"
    return unexplained or f"{UNKNOWN}: {label} gave nothing to compare"


def _odd_calibration(trace: LayerTrace, conv_outputs: dict[str, list[Tensor]], sources: Sequence[str]) -> str:
    """A scale of the calibration that does not fit this text; empty if all do, or if it is the stored one."""
    if sources and not _about(sources, "calibration"):
        return ""
    calibration, format = trace.calibration, trace.recipe.format
    if calibration is None or format is None or not FORMATS[format].needs_calibration:
        return ""
    site = PERCENTILE_SITES[0]
    blocks = {block.name: block for block in mamba_blocks(trace.model.get_submodule(trace.module))}
    for name, tensors in conv_outputs.items():
        mixer = f"{trace.module}.{blocks[name].mixer_name}" if name in blocks else name
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
