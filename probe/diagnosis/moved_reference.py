"""Why the float reference is not the golden one, where weights, tokens and configuration are those that are stored."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from probe.data.calls import as_call
from probe.diagnosis.explanations import UNKNOWN
from probe.diagnosis.linear_steps import other_tokens
from probe.diagnosis.plain_grids import PlainGrid
from probe.formats import FORMATS
from probe.models.offload import state_of
from probe.running.golden_reference import MovedTensor
from probe.running.reference import UNFED, Reference, float_copy

#: Weights with fewer values may lie on a grid by chance.
FEWEST = 1024
#: A weight lies on a grid if that moves none of its values by more than this part of the largest.
ON_GRID = 1e-6


@torch.no_grad()
def why_moved(model: nn.Module, reference: Reference, moved: Sequence[MovedTensor]) -> str:
    """What is wrong with the first part of the reference that moved. Never raises."""
    try:
        return _why(model, reference, moved)
    except Exception as problem:  # a diagnosis must not hide the failure it explains
        return f"{UNKNOWN}: {str(problem) or type(problem).__name__}"


def _why(model: nn.Module, reference: Reference, moved: Sequence[MovedTensor]) -> str:
    if not moved:
        return f"{UNKNOWN}: the baselines have no golden values of it"
    label = moved[0].label
    kinds = {one.kind for one in moved if one.label == label}
    module = {**reference.outside, **reference.modules}.get(label)
    if module is not None:
        twin = float_copy(model)
        weights = [dict(state_of(side.get_submodule(module))) for side in (twin, model)]
        if found := _other_weights(*weights):
            return found
    if label == UNFED and (tokens := _other_tokens(model, reference, module)):
        return tokens
    if "input" in kinds:
        return "its input moved, what comes before did not: the capture, or what lies between"
    if kinds == {"output"}:
        return "run again it gives its stored output: a stale capture, or a random run"
    return "weights, configuration and its input are the stored ones: look at its code"


def _other_weights(actual: dict[str, Tensor], plain: dict[str, Tensor]) -> str:
    """A weight of the reference's copy that is not the float model's: in another dtype, or on a grid."""
    for name, weight in actual.items():
        if name in plain and weight.dtype != plain[name].dtype:
            own, wanted = (str(x.dtype).removeprefix("torch.") for x in (weight, plain[name]))
            return f"its {name} is {own}, not {wanted}"
    other = [name for name, weight in actual.items() if name not in plain or not torch.equal(weight, plain[name])]
    for name in other:
        weight = actual[name]
        if weight.dim() > 1 and weight.numel() >= FEWEST and (grid := grid_of(weight)):
            return f"its {name} lies on the grid of {grid}: the reference is quantized"
    return f"its {other[0]} is not that of the float model" if other else ""


def grid_of(weight: Tensor) -> str:
    """The format of fewest bits on whose grid all values of the weight lie; empty if there is none."""
    largest = float(weight.abs().max())
    for fmt in sorted(FORMATS.values(), key=lambda fmt: fmt.bits):
        if fmt.scale in ("e8m0", "float32") and largest > 0:
            off = (PlainGrid(fmt)(weight) - weight).abs().max()
            if float(off) <= ON_GRID * largest:
                return fmt.name
    return ""


def _other_tokens(model: nn.Module, reference: Reference, module: str | None) -> str:
    """The tokens that the embedding was given instead of those of the text; empty if they are these."""
    stock = model.get_submodule(module) if module is not None else None
    if not isinstance(stock, nn.Embedding):
        return ""
    for batch, made in zip(reference.batches, reference.tensors[f"{UNFED}.injected"], strict=True):
        if found := other_tokens(stock.weight, as_call(batch).main, made):
            return found
    return ""
