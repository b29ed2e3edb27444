"""The float reference: what the model gives without quantization, kept by layer, and replayed against a copy."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from probe.models.loading import fingerprint
from probe.running.anchors import Anchors, narrowed, near_ties
from probe.running.capture import UncoveredError, capture
from probe.running.recipes import Recipe, apply
from probe.running.variations import jittered
from probe.words import LOGITS

Take = Callable[[str, Tensor, Tensor], None]


@dataclass(frozen=True, eq=False)
class Reference:
    """What the float model gave: inputs and outputs of the chosen layers and the logits, batch by batch.

    `layer_0.input` is rounded to bfloat16, so that every machine feeds the same bits; `layer_0.injected` is what
    the float layer makes of that, `layer_0.output` what it gave in the run of the whole model.
    """

    model: str  # fingerprint of the weights
    batches: tuple[Tensor, ...]
    layers: tuple[str, ...]  # labels, in model order
    wanted: tuple[str | int, ...]  # as they were asked for
    modules: dict[str, str]  # label -> module name
    tensors: dict[str, list[Tensor]]  # one entry a batch
    logits: tuple[Tensor, ...]
    ties: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # places and values, as in Anchors

    def count(self, label: str) -> int:
        """How many elements the output of a layer has, over all batches."""
        return sum(tensor.numel() for tensor in self.tensors[f"{label}.output"])


@torch.no_grad()
def run_reference(
    model: nn.Module,
    batches: Sequence[Tensor],
    layers: Sequence[str | int] = ("all",),
    *,
    anchors: Anchors | None = None,
    jitter: int = 0,
) -> Reference:
    """Run the float model (mode fp32) and keep the inputs and outputs of `layers`: two forwards.

    With `anchors`, inputs that noise could round either way are rounded as they say. `jitter` is the seed of a
    one-ulp change of what layers are fed.
    """
    if not batches:
        raise ValueError("there is nothing to run: not one batch was given. Pass at least one.")
    twin = apply(model, Recipe("fp32"))
    logits = []
    with capture(twin, layers, inputs=True) as captured:
        for batch in batches:
            logits.append(logits_of(twin, batch))
    selected, tensors = captured.selected, captured.tensors
    for label in selected:
        _check_calls(label, len(tensors[f"{label}.output"]), len(batches))
    raw = {label: tensors[f"{label}.input"] for label in selected}
    ties = {label: near_ties(given) for label, given in raw.items() if given[0].is_floating_point()}
    tensors.update({f"{label}.input": narrowed(label, given, anchors) for label, given in raw.items()})
    if jitter:
        for label in ties:
            tensors[f"{label}.input"] = [jittered(tensor.float(), jitter) for tensor in tensors[f"{label}.input"]]
    reference = Reference(
        fingerprint(model), tuple(batches), tuple(selected), tuple(layers), selected, tensors, tuple(logits), ties
    )

    fed: dict[str, list[Tensor]] = {f"{label}.injected": [] for label in selected}
    replay(twin, reference, lambda label, output, _: fed[f"{label}.injected"].append(output.clone()), injected=True)
    tensors.update(fed)
    return reference


def _check_calls(label: str, calls: int, batches: int) -> None:
    if calls != batches:
        raise ValueError(
            f"{label} ran {calls} times in {batches} forwards. Only modules that run once in a forward can be "
            "compared: choose the one around it."
        )


@torch.no_grad()
def replay(twin: nn.Module, reference: Reference, take: Take, *, injected: bool = False) -> None:
    """Run a copy of the model over the reference's batches; `take(label, output, expected)` of every layer and batch.

    propagated (the default): the run of the whole model, and `take` of the `logits` too.
    injected: every layer is fed the reference's input, and expected to give what the float layer made of it.
    Selected modules that lie inside one another are fed in runs of their own, or the inner would mend the outer.
    A layer that did not run is an UncoveredError, after all others were taken.
    """
    device = next((parameter.device for parameter in twin.parameters()), torch.device("cpu"))
    missing = [name for name in reference.modules.values() if name not in dict(twin.named_modules())]
    if missing:
        raise UncoveredError(
            f"the quantized model has no module {missing[0]}, which the reference has: a layer that exists on one "
            "side only cannot be compared."
        )
    kind = "injected" if injected else "output"
    for labels in _levels(reference.modules) if injected else [list(reference.layers)]:
        seen = dict.fromkeys(labels, 0)

        def compare(name: str, tensor: Tensor, seen: dict[str, int] = seen) -> None:
            label = name.removesuffix(".output")
            expected = reference.tensors.get(f"{label}.{kind}")
            take(label, tensor.float(), tensor.float() if expected is None else expected[seen[label]].float())
            seen[label] += 1

        with ExitStack() as hooks:
            if injected:
                hooks.enter_context(_injecting(twin, reference, labels))
            names = [f"^{re.escape(reference.modules[label])}$" for label in labels]
            hooks.enter_context(capture(twin, names, consumer=compare))
            for batch, expected in zip(reference.batches, reference.logits, strict=True):
                logits = logits_of(twin, batch.to(device)).cpu().float()
                if not injected:
                    take(LOGITS, logits, expected.float())


def _levels(modules: dict[str, str]) -> list[list[str]]:
    """Labels in groups in which no module lies inside another."""
    levels: dict[int, list[str]] = {}
    for label, name in modules.items():
        depth = sum(name.startswith(f"{other}.") for other in modules.values())
        levels.setdefault(depth, []).append(label)
    return [levels[depth] for depth in sorted(levels)]


def check_reference(model: nn.Module, reference: Reference) -> None:
    """Refuse the reference of another model."""
    if reference.model != fingerprint(model):
        raise ValueError(
            f"the reference is of a model with fingerprint {reference.model}, this one has {fingerprint(model)}. "
            "Make it again with probe.run_reference on this model."
        )


@contextmanager
def _injecting(twin: nn.Module, reference: Reference, labels: Sequence[str]) -> Iterator[None]:
    """While it lasts, the first tensor given to each of these layers is the reference's input of that layer."""
    modules = dict(twin.named_modules())
    with ExitStack() as hooks:
        for label in labels:
            stored = iter(reference.tensors[f"{label}.input"])

            def replace(
                module: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                label: str = label,
                stored: Iterator[Tensor] = stored,
            ) -> tuple[tuple[Any, ...], dict[str, Any]]:
                for place, value in enumerate(args):
                    if isinstance(value, Tensor):
                        return (*args[:place], next(stored).to(value), *args[place + 1 :]), kwargs
                for name, value in kwargs.items():
                    if isinstance(value, Tensor):
                        return args, {**kwargs, name: next(stored).to(value)}
                raise UncoveredError(f"{label} was called without a tensor, so there is nothing to feed it.")

            module = modules[reference.modules[label]]
            hooks.callback(module.register_forward_pre_hook(replace, with_kwargs=True).remove)
        yield


def logits_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The logits, whether the model gives them alone or in an output of transformers."""
    output = model(batch, use_cache=False) if hasattr(model, "config") else model(batch)
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise ValueError(
            f"{type(model).__name__} returned a {type(output).__name__} without logits; "
            "expected a causal language model."
        )
    return found
