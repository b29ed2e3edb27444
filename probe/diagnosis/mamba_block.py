"""A quantized Mamba block that ran, in one forward or in the several ones of a path: what its steps are read from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from probe.formats import Format
from probe.models.mamba import MAMBA, NORMS, Layout, SiteMixer
from probe.models.mamba2 import MAMBA2
from probe.models.mamba_blocks import MambaBlock
from probe.models.zamba import ZAMBA
from probe.running.calibration import Amax
from probe.running.modes import Mode


class NeverRanError(ValueError):
    """A part of the block that was not called."""


@dataclass(frozen=True, eq=False)
class Block:
    """A block that ran, with the tensors of its sites (`conv1d.output.given`, `conv1d.output.made`)."""

    #: What the mixer calls its weights, where that is not what Mamba-1 calls them; and where dt comes from.
    own_names: ClassVar[Mapping[str, str]] = {}
    step_name: ClassVar[str] = "dt_proj"

    tensors: Mapping[str, Tensor]
    twin: MambaBlock  # the quantized block
    stock: MambaBlock  # the float block
    mode: Mode
    format: Format
    amax: Amax  # calibrated, by site
    name: str = ""  # of the mixer, which says what a mode keeps float
    lengths: tuple[int, ...] = ()  # of a path with several forwards: the tokens of each
    states: tuple[tuple[Tensor, Tensor], ...] = ()  # given to the site of the carried state, and made of it, by forward
    padded: Mapping[str, Tensor] = field(default_factory=dict)  # `tensors` with padding, where there is some
    real: Tensor | None = None  # [sequence, token]: which tokens of `padded` are no padding

    @property
    def mixer(self) -> SiteMixer:
        """The quantized mixer."""
        mixer = self.twin.mixer
        if not isinstance(mixer, SiteMixer):
            raise ValueError(f"the mixer is a {type(mixer).__name__}, not a SiteMixer")
        return mixer

    @property
    def layout(self) -> Layout:
        """The kind of the mixer."""
        return self.stock.layout

    @property
    def width(self) -> int:
        """The channels of x, z and u."""
        return self.mixer.intermediate_size

    def given(self, site: str) -> Tensor:
        """The input of a site; a NeverRanError if it never ran."""
        return self._of(site, "given")

    def made(self, site: str) -> Tensor:
        """The output of a site; a NeverRanError if it never ran."""
        return self._of(site, "made")

    def _of(self, site: str, side: str) -> Tensor:
        if f"{site}.{side}" not in self.tensors:
            raise NeverRanError(f"{'site ' if site in self.layout.sites else ''}{site}; it never ran")
        return self.tensors[f"{site}.{side}"]

    def own(self, name: str) -> str:
        """What the mixer calls a weight of Mamba-1."""
        return self.own_names.get(name, name)

    def weight(self, name: str) -> Tensor:
        """A weight of the quantized mixer in float64, by its name in Mamba-1."""
        return self.mixer.get_parameter(self.own(name)).detach().double()

    def by_channel(self, name: str) -> Tensor:
        """A weight with one number a channel, or a head: [channel]."""
        found = self.weight(name).flatten()
        return found.repeat_interleave(self.width // found.numel())

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """What conv1d reads, and z, in an output of in_proj."""
        x, z = projected.chunk(2, dim=-1)
        return x, z

    def wrong_splits(self, projected: Tensor) -> dict[str, Tensor]:
        """What conv1d would read instead, by the mistake."""
        return {"x and z are swapped": self.split(projected)[1]}

    def scan_sources(self, of: Callable[[str], Tensor]) -> tuple[Tensor, ...]:
        """u, dt, its bias, A_log, B and C, of every channel and of every group in a row; `of` gives what a site made.

        u, dt: [..., channel]; bias: [channel]; A_log: [channel, state]; B, C: [..., group * state].
        """
        step, B, C = self.step_sources(of)
        A_log = self.weight("A_log").flatten()
        rates = A_log.repeat_interleave(self.width * self.mixer.state_size // A_log.numel())
        return of("scan.u"), step, self.by_channel("dt_proj.bias"), rates.reshape(self.width, -1), B, C

    def step_sources(self, of: Callable[[str], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """dt, B and C as the scan reads them."""
        _, B, C = self.scan_parameters(of("x_proj.output"))
        return of("dt_proj.output"), B, C

    def scan_parameters(self, x_proj_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt, B and C in an output of x_proj, each after the norm of the float mixer, if that has norms."""
        mixer, stock = self.mixer, self.stock.mixer
        dt, B, C = torch.split(x_proj_output, [mixer.time_step_rank, mixer.state_size, mixer.state_size], dim=-1)
        if not all(hasattr(stock, name) for name in NORMS):
            return dt, B, C
        with torch.no_grad():
            dt, B, C = (stock.get_submodule(name)(x) for name, x in zip(NORMS, (dt, B, C), strict=True))
        return dt, B, C

    @property
    def ends_with_mixer(self) -> bool:
        """Whether the output is that of the mixer plus the residual; other blocks go on with a feed-forward part."""
        parts = {self.stock.mixer, self.stock.norm}
        return all(child in parts or not list(child.parameters()) for child in self.stock.module.children())

    def without_padding(self, x: Tensor) -> Tensor:
        """The real tokens of a tensor [sequence, token, channel] that has padding."""
        assert self.real is not None
        return x[self.real].reshape(len(x), -1, x.shape[-1])


class ZambaBlock(Block):
    """A block of Zamba: x and z take turns, and every head has matrices, B and C of its own."""

    own_names: ClassVar[Mapping[str, str]] = {
        f"{name}_proj.{kind}": f"{name}_proj_{kind}" for name in ("x", "dt") for kind in ("weight", "bias")
    }

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """The even and the odd channels."""
        return projected[..., 0::2], projected[..., 1::2]

    def wrong_splits(self, projected: Tensor) -> dict[str, Tensor]:
        """What conv1d would read instead, by the mistake."""
        half = "x is the first half of the channels, not every other one"
        return {**super().wrong_splits(projected), half: projected.chunk(2, dim=-1)[0]}

    def scan_parameters(self, x_proj_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt, B and C of all heads in a row."""
        heads = x_proj_output.chunk(self.mixer.groups, dim=-1)
        parts = [super(ZambaBlock, self).scan_parameters(one) for one in heads]
        dt, B, C = (torch.cat(some, -1) for some in zip(*parts, strict=True))
        return dt, B, C


class Mamba2Block(Block):
    """A block of Mamba-2: dt comes from in_proj, B and C from conv1d."""

    own_names: ClassVar[Mapping[str, str]] = {"dt_proj.bias": "dt_bias"}
    step_name = "dt"

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """z comes first, then x, B and C, then dt."""
        heads = self.weight("D").numel()
        return projected[..., self.width : -heads], projected[..., : self.width]

    def wrong_splits(self, projected: Tensor) -> dict[str, Tensor]:
        """What conv1d would read instead, by the mistake."""
        convolved = projected.shape[-1] - self.width - self.weight("D").numel()
        return {
            "z is taken from behind x, B and C": projected[..., :convolved],
            "dt is taken from before x, B and C": projected[..., -convolved:],
        }

    def step_sources(self, of: Callable[[str], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """dt of every channel, B and C."""
        heads = self.weight("D").numel()
        dt = of("in_proj.output")[..., -heads:].repeat_interleave(self.width // heads, -1)
        B, C = of("scan.BC").chunk(2, dim=-1)
        return dt, B, C


BLOCKS: dict[Layout, type[Block]] = {MAMBA: Block, ZAMBA: ZambaBlock, MAMBA2: Mamba2Block}
