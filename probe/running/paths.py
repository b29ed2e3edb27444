"""Paths: the same tokens through a model in other ways than the prefill of whole rows.

    decode    a prefill of a part, then token by token with the state or the keys and values that the model carries
    ragged    one sequence, longer than a row where the model allows it, of a length that no chunk or block divides
    batch_1   one row alone
    padded    two rows with padding, one to the left and one to the right, and the mask that says so

A path runs injected: every layer is fed the reference's inputs of its tokens, and large values where there is padding.
So a layer that breaks a path is found in one run, and the same layer's prefill of the same tokens is at hand.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from probe.data.calls import Batch
from probe.formats import FORMATS
from probe.models.mamba import Site
from probe.models.mamba_blocks import mamba_blocks
from probe.models.offload import device_of
from probe.models.positions import position_limit
from probe.running.capture import UncoveredError, first_tensor
from probe.running.modes import find_mode
from probe.running.recipes import Recipe, float_blocks, gridded_sites
from probe.running.reference import Reference, injecting, run_reference
from probe.words import PATHS, describe_error, first_few

#: Tokens of the paths: what is prefilled before decode and what is decoded, what ragged has more than a row, and so on.
PREFILLED, DECODED, BEYOND, ALONE, REAL, PADDING = 40, 8, 29, 40, 24, 5
#: A ragged length is no multiple of this: not of a chunk of the scan, nor of a block.
EVEN = 16
#: What layers are fed where there is padding, as a multiple of the largest value of their input.
GARBAGE = 16.0
#: The argument that carries what decode needs, as transformers calls it; and the one that says which tokens are real.
CACHES = ("cache_params", "past_key_values")
MASK = "attention_mask"


@dataclass(frozen=True, eq=False)
class Path:
    """One way through the model: of every forward, the places [batch, time] of its tokens in the text; -1 is padding.

    The text is the rows of the reference in one line, `seqlen` tokens each. `parts` says what the two halves of the
    path are: golden values are kept apart for them.
    """

    name: str
    seqlen: int
    calls: tuple[Tensor, ...]
    halves: tuple[Tensor, ...]  # as calls: 0 or 1
    parts: tuple[str, str]

    @property
    def rows(self) -> int:
        """How many rows of the text it needs."""
        return int(max(call.max() for call in self.calls)) // self.seqlen + 1

    @property
    def places(self) -> Tensor:
        """The places of all tokens that are no padding, in the order of `run_path`."""
        return torch.cat([call[call >= 0] for call in self.calls])

    @property
    def half(self) -> Tensor:
        """The half of the path, 0 or 1, of the same tokens."""
        return torch.cat([half[call >= 0] for call, half in zip(self.calls, self.halves, strict=True)])

    @property
    def is_related(self) -> Tensor:
        """Of the same tokens, whether the prefill has the same tokens before them, and none else."""
        before = torch.zeros(len(self.calls[0]), 1, dtype=torch.long)
        found = []
        for call in self.calls:
            seen = before + (call >= 0).cumsum(1)
            found.append((call % self.seqlen == seen - 1)[call >= 0])
            before = seen[:, -1:]
        return torch.cat(found)

    @property
    def has_whole_rows(self) -> bool:
        """Whether every forward has all tokens of its rows: then a scale per sequence is that of the prefill."""
        return all(len(row[row >= 0]) == self.seqlen for call in self.calls for row in call) and self.rows == len(
            self.calls[0]
        )


def paths_of(rows: int, seqlen: int, *, limit: int | None = None, whole_rows: bool = False) -> dict[str, Path]:
    """The paths for a text of so many rows; those that it is too short for are left out.

    `limit`: the positions of the model. `whole_rows`: batch_1 has a whole row, else the first tokens of one.
    """
    text = torch.arange(rows * seqlen).reshape(rows, seqlen)
    found = {}
    first, some = min(PREFILLED, seqlen // 2), text[:2]
    steps = min(DECODED, seqlen - first)
    if first and steps:
        calls = (some[:, :first], *(some[:, t : t + 1] for t in range(first, first + steps)))
        halves = tuple(torch.full_like(call, min(n, 1)) for n, call in enumerate(calls))
        parts = (f"the first {first} tokens", f"the {steps} decoded tokens")
        found["decode"] = Path("decode", seqlen, calls, halves, parts)
    length = min(seqlen + BEYOND, rows * seqlen, limit or seqlen + BEYOND)
    length -= 3 if length % EVEN == 0 else 0
    if length > 1:
        call = text.reshape(1, -1)[:, :length]
        split = seqlen if length > seqlen else length - length % EVEN
        parts = (f"its first {split} tokens", f"its last {length - split} tokens")
        found["ragged"] = Path("ragged", seqlen, (call,), ((call >= split).long(),), parts)
    call = text[:1] if whole_rows else text[:1, :ALONE]
    middle = call.shape[1] // 2
    parts = (f"its first {middle} tokens", f"its last {call.shape[1] - middle} tokens")
    found["batch_1"] = Path("batch_1", seqlen, (call,), ((call >= middle).long(),), parts)
    real = min(REAL, seqlen, (limit or seqlen + PADDING) - PADDING)
    if rows > 1 and real > 0:
        padding = torch.full((PADDING,), -1)
        call = torch.stack([torch.cat([padding, text[0, :real]]), torch.cat([text[1, :real], padding])])
        parts = ("the row with padding to the left", "that to the right")
        halves = (torch.arange(2)[:, None].expand_as(call),)
        found["padded"] = Path("padded", seqlen, (call,), halves, parts)
    return found


def arguments(model: nn.Module) -> frozenset[str]:
    """The names of the arguments of the model's forward."""
    return frozenset(inspect.signature(model.forward).parameters)


def support(model: nn.Module, rows: int, seqlen: int, layers: Sequence[str | int]) -> dict[str, str]:
    """By path, why the model cannot run it on such a text; empty where it can.

    What a model of transformers takes, it can do. Any other is tried on a few tokens.
    """
    limit, taken, name = position_limit(model), arguments(model), type(model).__name__
    there = paths_of(rows, seqlen, limit=limit)
    found = {path: "" if path in there else f"{rows} x {seqlen} tokens are too few" for path in PATHS}
    if not (any(cache in taken for cache in CACHES) and "use_cache" in taken):
        found["decode"] = f"{name}.forward takes no cache"
    if MASK not in taken:
        found["padded"] = f"{name}.forward takes no {MASK}"
    if hasattr(model, "config") and hasattr(model, "generate") and list(layers) == ["all"]:
        return found
    length = min(2 * EVEN, limit or 2 * EVEN)
    tokens = torch.arange(2 * length).reshape(2, length) % 8
    try:
        short = run_reference(model, [tokens.to(device_of(model))], layers)
    except Exception as problem:
        return {path: reason or describe_error(problem) for path, reason in found.items()}
    for path, small in paths_of(2, length, limit=limit).items():
        if not found[path]:
            try:
                run_path(model, small, short)
            except Exception as problem:
                found[path] = describe_error(problem)
    return found


def path_layers(reference: Reference) -> list[str]:
    """The layers that a path can feed: not inside of another one, with inputs and outputs [batch, time, ...]."""
    modules = reference.modules
    found = []
    for label, name in modules.items():
        kinds = [reference.tensors[f"{label}.{kind}"] for kind in ("input", "injected")]
        shapes = all(
            one.is_floating_point() and one.dim() > 2 and one.shape[:2] == batch.shape
            for tensors in kinds
            for one, batch in zip(tensors, reference.batches, strict=True)
        )
        if shapes and not any(name.startswith(f"{other}.") for other in modules.values()):
            found.append(label)
    if not found:
        raise UncoveredError(f"no input and output of {first_few(list(modules))} is [batch, time, ...].")
    return found


def token_rows(batches: Iterable[Batch]) -> list[Tensor]:
    """The batches, which must be token ids."""
    found = [batch for batch in batches if isinstance(batch, Tensor)]
    if not found:
        raise UncoveredError("the model reads more than token ids, so that there are no paths.")
    return found


def joined_rows(tensors: Iterable[Tensor], rows: int) -> Tensor:
    """The first rows of [batch, time, ...] tensors, in one line: [rows * time, ...]."""
    parts, missing = [], rows
    for tensor in tensors:
        parts.append(tensor[:missing])
        missing -= len(parts[-1])
        if not missing:
            break
    return torch.cat(parts).flatten(0, 1)


@torch.no_grad()
def run_path(twin: nn.Module, path: Path, reference: Reference) -> dict[str, Tensor]:
    """By layer, what a copy of the model gives for the tokens of `path.places`: [token, ...], float32, on the CPU.

    A layer that did not run as often as the model is an UncoveredError.
    """
    labels, rows = path_layers(reference), path.rows
    tokens = joined_rows(token_rows(reference.batches), rows)
    inputs = {label: _fed(joined_rows(reference.tensors[f"{label}.input"], rows), path) for label in labels}
    outputs: dict[str, list[Tensor]] = {label: [] for label in labels}
    modules = dict(twin.named_modules())
    missing = [reference.modules[label] for label in labels if reference.modules[label] not in modules]
    if missing:
        raise UncoveredError(f"the quantized model has no module {missing[0]}, which the reference has.")
    handles = []
    try:
        for label in labels:
            keep = outputs[label]
            hook = _keeping(label, keep)
            handles.append(modules[reference.modules[label]].register_forward_hook(hook))
        with injecting(twin, {label: reference.modules[label] for label in labels}, inputs):
            _forward(twin, path, tokens)
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for label, kept in outputs.items():
        if len(kept) != len(path.calls):
            raise UncoveredError(f"{label} ran {len(kept)} times in the {len(path.calls)} forwards of {path.name}.")
        real = [one.cpu()[call >= 0] for one, call in zip(kept, path.calls, strict=True)]
        found[label] = torch.cat(real).float()
    return found


@contextmanager
def stray_sites(twin: nn.Module) -> Iterator[list[str]]:
    """The sites that gave other values in the block than their grid gives for the same input alone, by name.

    The grids themselves are checked at corner values; this shows a path that does not use them as they are.
    """
    calls: list[tuple[str, Tensor, Tensor]] = []
    found: list[str] = []

    def keep(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((name, args[0].clone(), output.clone()))

    sites = {name: one for name, one in twin.named_modules() if isinstance(one, Site) and one.grid is not None}
    with ExitStack() as hooks:
        for name, site in sites.items():
            hooks.callback(site.register_forward_hook(partial(keep, name)).remove)
        yield found
    for name, given, made in calls:
        if name not in found:
            alone = sites[name].forward(given)
            if alone.shape != made.shape or not bool(((alone == made) | (alone.isnan() & made.isnan())).all()):
                found.append(name)


def _keeping(label: str, kept: list[Tensor]) -> Any:
    return lambda module, args, output: kept.append(first_tensor(label, "output", output).detach())


def _fed(stream: Tensor, path: Path) -> list[Tensor]:
    """The inputs of a layer, forward by forward."""
    signs = 1 - 2 * (torch.arange(stream.shape[-1]) % 2)
    garbage = (GARBAGE * stream.abs().max().clamp(max=1e3) * signs).to(stream.dtype)
    return [torch.where((call < 0)[(..., *[None] * (stream.dim() - 1))], garbage, stream[call]) for call in path.calls]


def _forward(twin: nn.Module, path: Path, tokens: Tensor) -> None:
    taken, device = arguments(twin), device_of(twin)
    carried = next((name for name in CACHES if name in taken), "")
    is_decode = len(path.calls) > 1
    given: dict[str, Any] = {"use_cache": is_decode} if "use_cache" in taken else {}
    before = 0
    for call in path.calls:
        real = call >= 0
        if before and "position_ids" in taken:  # Bamba counts the tokens of a call from 0
            given["position_ids"] = torch.arange(before, before + call.shape[1], device=device).expand_as(call)
        before += call.shape[1]
        if not bool(real.all()):
            given[MASK] = real.long().to(device)
            if "position_ids" in taken:
                given["position_ids"] = (real.cumsum(1) - 1).clamp(min=0).to(device)
        output = twin(tokens[call.clamp(min=0)].to(device), **given)
        if is_decode:
            given[carried] = getattr(output, carried)


def keeps_prefill(model: nn.Module, recipe: Recipe, path: Path, modules: Mapping[str, str]) -> dict[str, bool | None]:
    """By layer, whether the path must give what the prefill gives, up to the order of sums; None: it is not known.

    It need not where the state that decode carries has a grid of its own, nor where one scale is shared by the tokens
    of a sequence and the path has not all of them. Of a user's own mode nothing is known.
    """
    mode = find_mode(recipe.mode)
    if mode.kind == "user" and not mode.library:
        return dict.fromkeys(modules)
    if mode.kind != "ssm":
        return dict.fromkeys(modules, True)
    assert recipe.format is not None
    left, format = float_blocks(model, mode), FORMATS[recipe.format]
    gridded = [
        (block.name, gridded_sites(mode, format, block.layout, block.mixer_name))
        for block in mamba_blocks(model)
        if block.name not in left
    ]
    found: dict[str, bool | None] = {}
    for label, module in modules.items():
        related = [own for name, own in gridded if f"{name}.".startswith(f"{module}.") or module.startswith(f"{name}.")]
        sites = {site for own in related for site in own}
        has_state = len(path.calls) > 1 and "scan.state" in sites
        found[label] = not has_state and ("conv1d.input" not in sites or path.has_whole_rows)
    return found
