"""The Mamba blocks of a model, and copies of it in which their mixers have sites."""

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from probe.models.layers import blocks_of
from probe.models.mamba import Layout, SiteMixer
from probe.models.mamba2 import Mamba2SiteMixer
from probe.models.scans import REFERENCE_SCAN
from probe.models.zamba import ZambaSiteMixer

#: By the class of a mixer of transformers, what stands in for it.
SITE_MIXERS: dict[str, type[SiteMixer]] = {
    name: kind for kind in (SiteMixer, ZambaSiteMixer, Mamba2SiteMixer) for name in kind.layout.mixers
}
#: What a block calls its mixer and the norm before it.
NAMES = (("mixer", "norm"), ("mamba", "input_layernorm"))


@dataclass(frozen=True, eq=False)
class MambaBlock:
    """A module of a model that has a Mamba mixer and the norm before it, with the names of the three."""

    name: str
    module: nn.Module
    mixer_name: str  # in the model: backbone.layers.0.mixer
    norm_name: str

    @property
    def mixer(self) -> nn.Module:
        """The mixer: that of transformers, or the SiteMixer in its place."""
        return self.module.get_submodule(self.mixer_name.rpartition(".")[2])

    @property
    def layout(self) -> Layout:
        """The kind of the mixer."""
        mixer = self.mixer
        return mixer.layout if isinstance(mixer, SiteMixer) else SITE_MIXERS[type(mixer).__name__].layout

    @property
    def sites(self) -> SiteMixer:
        """The mixer of a copy with sites."""
        mixer = self.mixer
        assert isinstance(mixer, SiteMixer)
        return mixer

    @property
    def norm(self) -> nn.Module:
        """The norm before the mixer."""
        return self.module.get_submodule(self.norm_name.rpartition(".")[2])

    @property
    def gamma(self) -> nn.Parameter:
        """The gain of that norm."""
        return self.norm.get_parameter("weight")


def mamba_blocks(model: nn.Module) -> Iterator[MambaBlock]:
    """Every Mamba block of a transformers model, in order, but those of `why_not`."""
    for name, module in model.named_modules():
        start = f"{name}." if name else ""
        for mixer_name, norm_name in NAMES:
            mixer = getattr(module, mixer_name, None)
            kind = SITE_MIXERS.get(type(mixer).__name__)
            is_known = isinstance(mixer, SiteMixer) or (kind is not None and not kind.refusal(mixer))
            if is_known and hasattr(module, norm_name):
                yield MambaBlock(name, module, f"{start}{mixer_name}", f"{start}{norm_name}")


def why_not(model: nn.Module) -> str:
    """Why a model has no Mamba blocks that the modes 0 to 3 can quantize."""
    for name, module in model.named_modules():
        kind = SITE_MIXERS.get(type(module).__name__)
        if kind is not None and (reason := kind.refusal(module)):
            return f"{name}: {reason}"
    return f"mixers that it knows: {', '.join(SITE_MIXERS)}"


def is_mamba(model: nn.Module) -> bool:
    """Whether the model has Mamba blocks, so that the modes 0 to 3 can be applied to it."""
    return any(True for _ in mamba_blocks(model))


def is_all_mamba(model: nn.Module) -> bool:
    """Whether every layer is a Mamba block, or has no weights beside one: not so in a hybrid with attention."""
    blocks = [block.name for block in mamba_blocks(model)]
    inside = tuple(f"{name}." if name else "" for name in blocks)

    def has_nothing_else(layer: str) -> bool:
        names = [f"{layer}.{name}" for name, _ in model.get_submodule(layer).named_parameters()]
        return layer in blocks or (bool(names) and all(name.startswith(inside) for name in names))

    return bool(blocks) and all(map(has_nothing_else, blocks_of(model)))


def with_sites(model: nn.Module, *, scan: str = REFERENCE_SCAN) -> nn.Module:
    """A copy of `model` in which every Mamba mixer is a SiteMixer over the same weights."""
    if any(isinstance(module, SiteMixer) for module in model.modules()):
        raise ValueError("this model is already a copy made by a mode. Pass the float model that it was made from.")
    blocks = list(mamba_blocks(model))
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no Mamba blocks, which the modes 0 to 3 quantize ({why_not(model)}). "
            "For other models use the modes linear_w or linear_wa."
        )
    # with these in place of their mixers, no weight is copied twice
    made: dict[int, Any] = {
        id(block.mixer): SITE_MIXERS[type(block.mixer).__name__](block.mixer, scan=scan) for block in blocks
    }
    return copy.deepcopy(model, made).eval()


def rotated_twin(model: nn.Module, *, scan: str, unrotated: Collection[str] = ()) -> nn.Module:
    """A float copy with sites, gamma folded and the Hadamard rotations in place: what the modes quantize.

    The blocks of the names in `unrotated` stay as `with_sites` makes them: they give the bits of the reference.
    """
    twin = with_sites(model, scan=scan)
    for block in mamba_blocks(twin):
        if block.name in unrotated:
            block.sites.scan_name = REFERENCE_SCAN
            continue
        block.sites.fold(block.gamma, rotate=True)
        with torch.no_grad():
            block.gamma.fill_(1.0)
    return twin
