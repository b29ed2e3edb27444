"""Noise in the last bits of a run: variations that show how far it moves figures, and anchors that remove it.

Two machines sum in different orders, so their float references differ in the last bits, and so do the inputs of the
layers and the scales that calibration finds. Rounding inputs to bfloat16 removes nearly all of that noise, except at
the few elements so near a tie that the noise decides. The anchors of a model are the golden values of these elements
and of every calibrated amax. A value within the noise of its golden value is replaced by it; a value further away is
left alone, because it is a real change, which must be seen.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor, nn

from probe.running.calibration import Calibration


@dataclass(frozen=True)
class Variation:
    """One way to run the same arithmetic in another order, or from inputs that differ in the last bit."""

    name: str
    threads: int = 1
    batch_size: int | None = None  # None: as configured
    jitter: int = 0  # seed of a one-ulp jitter of the embedding and of what layers are fed; 0: none
    onednn: bool = True


#: The run whose figures are stored; always on one thread, so that serial and parallel updates give the same bits.
BASE = Variation("base")


def variations() -> tuple[Variation, ...]:
    """The runs whose distance from the base is the spread."""
    return (
        Variation("all threads, other batch size, oneDNN off", os.cpu_count() or 1, batch_size=3, onednn=False),
        Variation("jitter 1", jitter=1),
        Variation("jitter 2", jitter=2),
    )


@contextmanager
def under(variation: Variation, model: nn.Module) -> Iterator[None]:
    """While the block runs, torch and every copy made of `model` behave as the variation says."""
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    with ExitStack() as undo:
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.callback(torch.backends.mkldnn.set_flags, bool(torch.backends.mkldnn.enabled))
        if variation.jitter and embedding is not None:
            handle = embedding.register_forward_hook(lambda module, args, output: jittered(output, variation.jitter))
            undo.callback(handle.remove)
        torch.set_num_threads(variation.threads)
        torch.backends.mkldnn.set_flags(variation.onednn)  # type: ignore[no-untyped-call]
        yield


def jittered(x: Tensor, seed: int) -> Tensor:
    """Every element moved by one ulp of float32, up or down by chance; narrower floats would not notice."""
    generator = torch.Generator().manual_seed(seed)
    up = torch.rand(x.shape, generator=generator).to(x.device) < 0.5
    limit = torch.full(x.shape, torch.inf, device=x.device)
    return torch.nextafter(x.float(), torch.where(up, limit, -limit)).to(x.dtype)


#: An element is near a tie if it is closer to it than this part of the rms of the layer's input. Instruction sets,
#: oneDNN and one-ulp jitter were seen to move inputs by up to 2^-17.1 of it.
NEAR = 2.0**-17
#: An amax within this part of the golden one is the golden one; the same changes moved it by up to 1.2e-6.
SAME_SCALE = 2e-5


@dataclass(frozen=True, eq=False)
class Anchors:
    """By layer, places in the stream of its input and the golden bfloat16 values there; by site, the golden amax.

    Beside them, what else is stored once for a model: the golden reference and the model's configuration.
    """

    places: dict[str, Tensor] = field(default_factory=dict)  # int32, ascending
    values: dict[str, Tensor] = field(default_factory=dict)  # bfloat16
    amax: dict[str, float] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)  # float32, by tensor of the reference: golden_reference.py
    config: dict[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The content of a safetensors file; the same anchors always give the same bytes."""
        tensors: dict[str, np.ndarray] = {}
        for label, places in sorted(self.places.items()):
            gaps = np.diff(places.numpy(), prepend=0)
            small = gaps.size == 0 or int(gaps.max()) < 2**16
            tensors[f"gaps/{label}"] = gaps.astype(np.uint16 if small else np.uint32)
            tensors[f"bits/{label}"] = self.values[label].view(torch.int16).numpy()
        names = sorted(self.amax)
        tensors["amax"] = np.array([self.amax[name] for name in names], dtype=np.float64)
        facts = {"sites": names, "rows": sorted(self.rows), "config": self.config}
        if self.rows:
            tensors["rows"] = torch.stack([self.rows[name] for name in sorted(self.rows)]).numpy()
        return bytes(save(tensors, {"facts": json.dumps(facts, sort_keys=True)}))  # one key: several come in any order

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of to_bytes; other content is a ValueError."""
        try:
            tensors = load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            given = header["__metadata__"]  # older ones have nothing but the sites
            facts = json.loads(given["facts"]) if "facts" in given else {"sites": json.loads(given["sites"])}
            rows = dict(zip(facts.get("rows", ()), tensors.get("rows", ()), strict=True))
            labels = [key.removeprefix("gaps/") for key in tensors if key.startswith("gaps/")]
            places = {label: np.cumsum(tensors[f"gaps/{label}"].astype(np.int64)) for label in labels}
            bits = {label: torch.from_numpy(tensors[f"bits/{label}"].copy()) for label in labels}
            amax = dict(zip(facts["sites"], (float(x) for x in tensors["amax"]), strict=True))
        except (SafetensorError, LookupError, TypeError, ValueError) as problem:
            raise ValueError(f"is not a file of anchors ({problem})") from None
        return cls(
            {label: torch.from_numpy(places[label]).int() for label in labels},
            {label: bits[label].view(torch.bfloat16) for label in labels},
            amax,
            {name: torch.from_numpy(row.copy()) for name, row in rows.items()},
            facts.get("config", {}),
        )

    @classmethod
    def united(cls, several: Iterable[Self]) -> Self:
        """The anchors of all of them; where two have the same layer or site, those of the first."""
        whole = cls()
        for one in several:
            whole = cls(*({**getattr(one, part.name), **getattr(whole, part.name)} for part in fields(cls)))
        return whole


def near_ties(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Places and bfloat16 values of the elements so near a tie of two bfloat16 values that noise could decide."""
    flat = torch.cat([tensor.reshape(-1) for tensor in inputs]).float()
    rounded = flat.bfloat16().float()
    outward = torch.where(flat.abs() > rounded.abs(), 1 << 16, -(1 << 16)).int()  # the next bfloat16 on the other side
    neighbour = (rounded.view(torch.int32) + outward).view(torch.float32)
    tie = (rounded + neighbour) / 2
    rms = flat.double().square().mean().sqrt().float()
    places = ((flat - tie).abs() <= NEAR * rms).nonzero().reshape(-1)
    return places.int(), rounded[places].bfloat16()


def narrowed(label: str, inputs: Sequence[Tensor], anchors: Anchors | None) -> list[Tensor]:
    """The inputs of a layer in bfloat16; elements near a tie are rounded as the anchors say."""
    if not all(tensor.is_floating_point() for tensor in inputs):
        return list(inputs)
    rounded = [tensor.bfloat16() for tensor in inputs]
    if anchors is None or label not in anchors.places:
        return rounded
    places, golden = anchors.places[label].long(), anchors.values[label]
    flat = torch.cat([tensor.reshape(-1) for tensor in rounded])
    places, golden = places[places < flat.numel()], golden[places < flat.numel()]
    here = flat[places]
    steps = (here.view(torch.int16).int() - golden.view(torch.int16).int()).abs()
    noise = 2 * NEAR * flat.double().square().mean().sqrt().float()  # near zero it spans many steps
    same = (steps <= 1) | ((here.float() - golden.float()).abs() <= noise)
    flat[places] = torch.where(same, golden, here)
    parts = torch.split(flat, [tensor.numel() for tensor in rounded])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, rounded, strict=True)]


def refined(inputs: Sequence[Tensor]) -> list[Tensor]:
    """bfloat16 inputs as float32 with more significant bits, so that a module which rounds its input is seen.

    The 15 bits of the significand below the half of a bfloat16 step are filled from the element's place in the stream,

        fill(i) = floor(i * 2654435761 / 2^17) mod 2^15            2654435761 is 2^32 over the golden ratio

    which is the same on every machine and in batches of every size. Zeros and infinities stay as they are, and every
    value still rounds to the bfloat16 value it was made from.
    """
    start, found = 0, []
    for tensor in inputs:
        places = torch.arange(start, start + tensor.numel()).reshape(tensor.shape)
        fill = ((places * 2654435761) >> 17 & 0x7FFF).int()
        plain = tensor.float()
        kept = (plain == 0) | ~plain.isfinite()
        found.append(torch.where(kept, plain, (plain.view(torch.int32) | fill).view(torch.float32)))
        start += tensor.numel()
    return found


def anchored(calibration: Calibration, amax: Mapping[str, float]) -> Calibration:
    """The calibration with every amax that is within the noise of its golden value replaced by that value."""
    kept = {
        name: amax[name] if name in amax and abs(value - amax[name]) <= SAME_SCALE * abs(amax[name]) else value
        for name, value in calibration.amax.items()
    }
    return replace(calibration, amax=kept)
