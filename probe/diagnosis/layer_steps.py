"""The steps of a layer, whatever kind of mode it is in: in one batch, or on a path."""

from collections.abc import Iterator
from dataclasses import replace

from probe.diagnosis.linear_steps import kept_weights, linear_steps
from probe.diagnosis.mamba_block import BLOCKS
from probe.diagnosis.mamba_steps import mamba_steps
from probe.diagnosis.signatures import Step
from probe.formats import FORMATS
from probe.models.mamba_blocks import mamba_blocks
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
        quantized, floating = (
            {block.name: block for block in mamba_blocks(side.get_submodule(layer))} for side in (twin, model)
        )
        for name, tensors in parts.items():
            mixer = f"{layer}.{floating[name].mixer_name}"
            amax, format = amax_lookup(trace.calibration, f"{mixer}."), FORMATS[trace.recipe.format]
            kind = BLOCKS[floating[name].layout]
            block = kind(tensors, quantized[name], floating[name], mode, format, amax, mixer)
            if on_path is not None:
                block = replace(
                    block,
                    lengths=on_path.lengths,
                    states=on_path.states[name],
                    padded=on_path.padded.get(name, {}),
                    real=on_path.real,
                )
            yield from mamba_steps(block)
