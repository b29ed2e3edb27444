"""The likely cause of a change against the stored output of a layer: from its outputs, then from runs in other ways."""

import math
from collections.abc import Callable

import torch

from probe.diagnosis.changed_outputs import ChangedOutput, alikeness, left_by
from probe.diagnosis.explanations import EXPLAINED, UNKNOWN
from probe.diagnosis.golden_outputs import explain_change
from probe.diagnosis.inner_modules import in_float32, other_settings, outputs_inside, scaled_output
from probe.running.traces import LayerTrace

#: The factors from 1/4 to 4 that are tried first, and the steps of the search between them.
FACTORS, SEARCHES = (-2.0, -1.0, -0.5, -0.02, 0.02, 0.5, 1.0, 2.0), 12
#: The factors by which a module is tried at all: a search follows for so many of the modules that change the output
#: most nearly in the direction of the stored one, and by at least this part of a straight line to it.
TRIED, SEARCHED, ALIKE = (2**-0.5, 2**0.5), 2, 0.25


@torch.no_grad()
def changed_layer(trace: LayerTrace, golden: tuple[float, ...] | None) -> str:
    """What has become of the stored output; empty without one."""
    if golden is None:
        return ""
    with outputs_inside(trace.twin.get_submodule(trace.module)) as parts:
        batches = [batch for batch in trace.batches() if batch.output is not None]
    outputs = [batch.output for batch in batches if batch.output is not None]
    given, expected = [one.given for one in batches], [one.expected for one in batches]
    found = ChangedOutput.of(outputs, given, expected, golden, parts) if outputs else None
    if found is None:
        return ""
    sentence = explain_change(found)
    if UNKNOWN in sentence:
        others = (_other_setting, _narrow_arithmetic, _scaled_inside)
        sentence = next((cause for one in others if (cause := one(trace, found))), sentence)
    return f"{trace.label}; {sentence}"


def _other_setting(trace: LayerTrace, found: ChangedOutput) -> str:
    """A setting of a module inside that is not the float layer's, if with that one the stored output is given again."""
    layers = (side.get_submodule(trace.module) for side in (trace.twin, trace.model))
    for sentence, restored in other_settings(*layers):
        with restored:
            outputs = trace.outputs()
        if left_by(found, outputs) <= 1 - EXPLAINED:
            return sentence
    return ""


def _narrow_arithmetic(trace: LayerTrace, found: ChangedOutput) -> str:
    """Says so if the layer gives its stored output again once nothing in it is cast to a narrower float."""
    try:
        with in_float32() as narrowed:
            outputs = trace.outputs()
    except Exception:  # code that checks its dtypes
        return ""
    if not narrowed or left_by(found, outputs) > 1 - EXPLAINED:
        return ""
    return f"computed in {str(next(iter(narrowed))).removeprefix('torch.')}"


def _scaled_inside(trace: LayerTrace, found: ChangedOutput) -> str:
    """A module inside whose output, times one number, makes the layer give its stored output."""
    layer = trace.twin.get_submodule(trace.module)
    scores: dict[str, float] = {}
    for name in found.parts:
        for factor in TRIED:
            with scaled_output(layer.get_submodule(name), factor):
                scores[name] = max(scores.get(name, 0.0), alikeness(found, trace.outputs()))
    best = sorted(scores, key=lambda name: -scores[name])[:SEARCHED]
    for name in (name for name in best if scores[name] >= ALIKE):

        def run(factor: float, name: str = name) -> float:
            with scaled_output(layer.get_submodule(name), factor):
                return math.sqrt(left_by(found, trace.outputs()))

        number = _best_factor(run)
        if number is not None and run(number) ** 2 <= 1 - EXPLAINED:
            return f"as if the output of {name} were {1 / number:.3g} times that of the stored run"
    return ""


def _best_factor(run: Callable[[float], float]) -> float | None:
    """The factor from 1/4 to 4 with the smallest distance: a coarse look, then a search by the golden section.

    None where the coarse look shows that no factor is better than none.
    """
    tried = {2.0**power: run(2.0**power) for power in FACTORS}
    best = min(tried, key=tried.__getitem__)
    if tried[best] > 0.97:  # of the distance without a factor
        return None
    low, high, ratio = math.log2(best) - 1, math.log2(best) + 1, (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = run(2**a), run(2**b)
    for _ in range(SEARCHES):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = run(2**a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = run(2**b)
    return float(2 ** ((low + high) / 2))
