"""The steps of a layer, whatever kind of mode it is in: in one batch, or on a path."""

from collections.abc import Iterator
from dataclasses import replace

from probe.diagnosis.linear_steps import kept_weights, linear_steps
from probe.diagnosis.mamba_block import Block
from probe.diagnosis.mamba_steps import mamba_steps
from probe.diagnosis.signatures import Step
from probe.formats import FORMATS
from probe.running.calibration import amax_lookup
from probe.running.traces import LayerTrace, Parts, PathTrace


def layer_steps(trace: LayerTrace, parts: Parts, on_path: PathTrace | None = None) -> Iterator[Step]:
    """The steps of the layer from the tensors of its parts; none where the mode is a user's own."""
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
            block = Block(tensors, *blocks, mode, FORMATS[trace.recipe.format], amax, f"{path}.mixer")
            if on_path is not None:
                block = replace(
                    block,
                    lengths=on_path.lengths,
                    states=on_path.states[name],
                    padded=on_path.padded.get(name, {}),
                    real=on_path.real,
                )
            yield from mamba_steps(block)
