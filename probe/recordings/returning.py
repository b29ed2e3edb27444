"""A model that returns its layer outputs itself: for compiled graphs, in which hooks may not fire."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from probe.recordings.taps import Points, points_of
from probe.running.reference import logits_of
from probe.words import LOGITS


class RecordedOutputs(nn.Module):
    """The wrapper that record_outputs makes: tokens in, a dict of tensors by name out, the logits among them.

    The hooks belong to the wrapped copy of the module tree and are traced with it, so that the outputs are results of
    the graph. They are kept until the forward ends: memory is that of all the layers that were asked for.
    """

    def __init__(self, model: nn.Module, points: Points) -> None:
        super().__init__()
        self.model = model
        self.points = points
        self.taken: dict[str, Tensor] = {}
        modules = dict(model.named_modules())
        for name, (module, side) in points.taken.items():
            modules[module].register_forward_hook(self._keep(name, side), with_kwargs=True)

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        """`layer_0.output` and so on, as they were given, and `logits`."""
        self.taken = {}
        logits = logits_of(self.model, batch)
        found = self.taken
        self.taken = {}
        return {**found, LOGITS: logits}

    def _keep(self, name: str, side: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            value = output if side == "output" else (*args, *kwargs.values())
            first: Tensor = value[0] if isinstance(value, tuple | list) else value
            self.taken[name] = first.clone()  # a later layer may add to it in place

        return keep


def record_outputs(
    model: nn.Module, layers: Sequence[str | int] | str | int = ("all",), *, taps: Sequence[str] = ()
) -> RecordedOutputs:
    """Wrap a model so that it returns its layer outputs beside its logits, compiled or not.

        compiled = torch.compile(probe.record_outputs(model, ["first", "last"]), fullgraph=True)
        probe.record("outputs", model=compiled, batches=batches)

    The hooks stay on `model`, which is the wrapper's from then on.
    """
    chosen = [layers] if isinstance(layers, str | int) else layers
    return RecordedOutputs(model, points_of(model, chosen, taps, model_name=type(model).__name__))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model under torch.compile and record_outputs, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    inner = inner.model if isinstance(inner, RecordedOutputs) else inner
    assert isinstance(inner, nn.Module)
    return inner


def returns_outputs(model: nn.Module) -> bool:
    """Whether the model was made by record_outputs, compiled or not."""
    return isinstance(getattr(model, "_orig_mod", model), RecordedOutputs)


def points_returned(model: nn.Module) -> Points:
    """What a model of record_outputs returns."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, RecordedOutputs)
    return replace(inner.points, logits=True)


def is_compiled(model: nn.Module) -> bool:
    """Whether the model is the result of torch.compile."""
    return hasattr(model, "_orig_mod")
