"""The float reference: the inputs and outputs of the model's layers without quantization, and their replay."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from probe.data.calls import Batch, shortened
from probe.models.forward import output_of
from probe.models.layers import select
from probe.models.loading import weight_fingerprint
from probe.models.offload import device_of
from probe.models.outputs import FEW, OutputKind, output_kind
from probe.running.capture import UncoveredError, capture, with_first_tensor
from probe.running.noise import Anchors, jittered, narrowed, near_ties, refined
from probe.running.recipes import Recipe, apply
from probe.words import WHOLE

#: The module outside the layers that is not fed: its input are the tokens, so that a run on others shows.
UNFED = "embedding"
#: Called with a label, the output of that layer (or of the whole model), and what the reference has for it.
Take = Callable[[str, Tensor, Tensor], None]
Inputs = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class Reference:
    """The float model over some batches: inputs and outputs of the chosen layers and its own, batch by batch.

    `layer_0.input` is rounded to bfloat16, so that every machine feeds the same bits; `layer_0.injected` is what
    the float layer makes of that, `layer_0.output` what it gave in the run of the whole model. Modules outside the
    layers have `norm.input` (see `noise.refined`) and `norm.injected`; the embedding is not fed and has no input.
    """

    model: str  # fingerprint of the weights
    batches: tuple[Batch, ...]
    layers: tuple[str, ...]  # labels, in model order
    wanted: tuple[str | int, ...]  # the layers as the caller named them
    modules: dict[str, str]  # label -> module name
    tensors: dict[str, list[Tensor]]  # one entry a batch
    outputs: tuple[Tensor, ...]  # of the whole model: the logits, where there are any
    kind: OutputKind  # what they mean
    ties: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # places and values, as in Anchors
    outside: dict[str, str] = field(default_factory=dict)  # label -> module name, of words.OUTSIDE

    def count(self, label: str) -> int:
        """How many elements the output of a layer has, over all batches."""
        return sum(tensor.numel() for tensor in self.tensors[f"{label}.injected"])


def float_copy(model: nn.Module) -> nn.Module:
    """The copy of the model that the reference is a run of."""
    return apply(model, Recipe("fp32"))


@torch.no_grad()
def run_reference(
    model: nn.Module,
    batches: Sequence[Batch],
    layers: Sequence[str | int] = ("all",),
    *,
    outside: Mapping[str, str] | None = None,
    anchors: Anchors | None = None,
    jitter: int = 0,
    once: bool = True,
    kind: OutputKind | None = None,
) -> Reference:
    """Run the float model (mode fp32) and keep the inputs and outputs of `layers`: two forwards.

    `outside` has modules outside the layers by label, of `models.outside`, which are kept too. With `anchors`, inputs
    that noise could round either way are rounded as they say. `jitter` is the seed of a one-ulp change of what layers
    are fed. `once` refuses a module that runs several times in a forward. `kind` is that of the output; None: it is
    found out by two more short forwards.
    """
    if not batches:
        raise ValueError("there is nothing to run: not one batch was given. Pass at least one.")
    twin, beyond = float_copy(model), dict(outside or {})
    with capture(twin, layers, inputs=True) as captured, _inputs_of(twin, beyond) as fed:
        outputs_whole = tuple(output_of(twin, batch) for batch in batches)
    modules = captured.selected
    given = {label: captured.tensors[f"{label}.input"] for label in modules}
    outputs = {label: captured.tensors[f"{label}.output"] for label in modules}
    for label, tensors in {**outputs, **fed}.items():
        if once and len(tensors) != len(batches):
            raise ValueError(
                f"{label} ran {len(tensors)} times in {len(batches)} forwards. Only modules that run once in a forward "
                "can be compared: choose the one around it (layers, --layers)."
            )
    every = {**given, **{label: tensors for label, tensors in fed.items() if label != UNFED}}
    ties = {label: near_ties(tensors) for label, tensors in every.items() if tensors[0].is_floating_point()}
    inputs = {label: narrowed(label, tensors, anchors) for label, tensors in every.items()}
    inputs |= {label: refined(inputs[label]) for label in beyond if label in ties}
    if jitter:
        inputs |= {label: [jittered(tensor.float(), jitter) for tensor in inputs[label]] for label in ties}
    injected: dict[str, list[Tensor]] = {label: [] for label in (*modules, *beyond)}

    def keep(label: str, output: Tensor) -> None:
        if label not in WHOLE:
            injected[label].append(output.float().clone())

    kind = kind or output_kind(twin, batches[0])
    _run_injected(twin, batches, {**modules, **beyond}, inputs, keep, whole=kind.label)
    sides = {"input": inputs, "output": outputs, "injected": injected}
    return Reference(
        model=weight_fingerprint(model),
        batches=tuple(batches),
        layers=tuple(modules),
        wanted=tuple(layers),
        modules=modules,
        tensors={f"{label}.{side}": stored for side, tensors in sides.items() for label, stored in tensors.items()},
        outputs=outputs_whole,
        kind=kind,
        ties=ties,
        outside=beyond,
    )


@contextmanager
def _inputs_of(twin: nn.Module, modules: Mapping[str, str]) -> Iterator[dict[str, list[Tensor]]]:
    """While the block runs, gather the inputs of these modules by label."""
    found: dict[str, list[Tensor]] = {label: [] for label in modules}
    labels = {name: label for label, name in modules.items()}
    with ExitStack() as hooks:
        if modules:
            patterns = [f"^{re.escape(name)}$" for name in labels]
            captured = hooks.enter_context(capture(twin, patterns, inputs=True, outputs=False))
        yield found
    if modules:
        for name, module in captured.selected.items():
            found[labels[module]] += captured.tensors[f"{name}.input"]


def check_reference(model: nn.Module, reference: Reference) -> None:
    """Refuse the reference of another model."""
    found = weight_fingerprint(model)
    if reference.model != found:
        raise ValueError(
            f"the reference is of a model with fingerprint {reference.model}, this one has {found}. "
            "Make it again with probe.run_reference on this model."
        )


@torch.no_grad()
def replay(twin: nn.Module, reference: Reference, take: Take, *, injected: bool = False) -> None:
    """Run a copy of the model over the reference's batches; `take(label, output, expected)` of every layer and batch.

    propagated (the default): the run of the whole model, and `take` of its output too, by the label of its kind.
    injected: every layer is fed the reference's input, and expected to give what the float layer made of it; the
    modules outside the layers likewise.
    A layer that did not run is an UncoveredError, after all others were taken.
    """
    there = dict(twin.named_modules())
    _check_present(reference.modules, there)
    every = {**reference.modules, **{label: name for label, name in reference.outside.items() if name in there}}
    calls: Counter[str] = Counter()
    whole = reference.kind.label

    def compare(label: str, output: Tensor) -> None:
        if label == whole and injected:
            return
        kind = "injected" if injected else "output"
        expected = reference.outputs if label == whole else reference.tensors[f"{label}.{kind}"]
        take(label, output.float(), expected[calls[label]].float())
        calls[label] += 1

    if injected:
        found = {label: reference.tensors.get(f"{label}.input") for label in every}
        inputs = {label: tensors for label, tensors in found.items() if tensors is not None}
        _run_injected(twin, reference.batches, every, inputs, compare, whole=whole)
        _check_present(reference.outside, there)
    else:
        _run(twin, reference.batches, reference.modules, compare, whole=whole)


def _check_present(modules: Mapping[str, str], there: Collection[str]) -> None:
    missing = [name for name in modules.values() if name not in there]
    if missing:
        raise UncoveredError(
            f"the quantized model has no module {missing[0]}, which the reference has: a layer that exists on one "
            "side only cannot be compared."
        )


def _run_injected(
    twin: nn.Module,
    batches: Sequence[Batch],
    modules: Mapping[str, str],
    inputs: Inputs,
    take: Callable[[str, Tensor], None],
    *,
    whole: str,
) -> None:
    """Run with every module fed from `inputs`; one without inputs there gets what the model gives it.

    Modules that lie inside one another are fed in runs of their own: otherwise the injection of the inner module
    would mask the error of the outer one. So is a module that has two labels.
    """
    runs: list[dict[str, str]] = []
    for label, name in sorted(modules.items(), key=lambda pair: pair[1].count(".")):
        free = (run for run in runs if not any(_overlap(name, other) for other in run.values()))
        run = next(free, None)
        if run is None:
            runs.append(run := {})
        run[label] = name
    for run in runs:
        with injecting(twin, run, inputs):
            _run(twin, batches, run, take, whole=whole)


def _overlap(one: str, other: str) -> bool:
    """Whether two modules are the same or one lies inside the other, by their names."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _run(
    twin: nn.Module,
    batches: Sequence[Batch],
    modules: Mapping[str, str],
    take: Callable[[str, Tensor], None],
    *,
    whole: str,
) -> None:
    """Run every batch; `take` the output of each of the modules by its label, then that of the model, on the CPU."""
    device = device_of(twin)
    patterns = [f"^{re.escape(name)}$" for name in modules.values()]
    labels = {name: label for label, name in modules.items()}
    selected = {f"{label}.output": labels[name] for label, name in select(twin, patterns).items()}
    with capture(twin, patterns, consumer=lambda name, tensor: take(selected[name], tensor)):
        for batch in batches:
            take(whole, output_of(twin, batch.to(device)).cpu())


@contextmanager
def injecting(twin: nn.Module, modules: Mapping[str, str], inputs: Inputs) -> Iterator[None]:
    """While the block runs, each of these modules gets the next of its inputs as the first tensor of its call."""
    found = dict(twin.named_modules())

    def feed(label: str, stored: Iterator[Tensor], module: nn.Module, args: Any, kwargs: Any) -> Any:
        return with_first_tensor(label, args, kwargs, next(stored))

    with ExitStack() as hooks:
        for label, name in modules.items():
            if label not in inputs:
                continue
            hook = partial(feed, label, iter(inputs[label]))
            hooks.callback(found[name].register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


@torch.no_grad()
def running_once(model: nn.Module, modules: Mapping[str, str], batch: Batch) -> dict[str, str]:
    """Those of the modules, by label, that run exactly once in a forward; a short one of the first tokens shows it.

    A model that reads the weights of its head without calling it, or calls its embedding twice, lacks that one. A model
    that does not take a few tokens is given the whole batch. All of them where it does not run at all: whoever runs it
    says why.
    """
    calls: Counter[str] = Counter()
    found = dict(model.named_modules())
    with ExitStack() as hooks:
        for label, name in modules.items():
            hook = found[name].register_forward_hook(lambda *_, label=label: calls.update([label]))
            hooks.callback(hook.remove)
        for tokens in (shortened(batch, samples=1, tokens=FEW), batch):
            calls.clear()
            try:
                output_of(model, tokens.to(device_of(model)))
                break
            except Exception:
                continue
        else:
            return dict(modules)
    return {label: name for label, name in modules.items() if calls[label] == 1}
