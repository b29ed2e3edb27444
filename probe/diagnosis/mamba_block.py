"""A quantized Mamba block that ran, in one forward or in the several ones of a path: what its steps are read from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from probe.formats import Format
from probe.models.mamba import NORMS, SITES, MambaBlock, SiteMixer
from probe.running.calibration import Amax
from probe.running.modes import Mode


class NeverRanError(ValueError):
    """A part of the block that was not called."""


@dataclass(frozen=True, eq=False)
class Block:
    """A block that ran, with the tensors of its sites (`conv1d.output.given`, `conv1d.output.made`)."""

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

    def given(self, site: str) -> Tensor:
        """The input of a site; a NeverRanError if it never ran."""
        return self._of(site, "given")

    def made(self, site: str) -> Tensor:
        """The output of a site; a NeverRanError if it never ran."""
        return self._of(site, "made")

    def _of(self, site: str, side: str) -> Tensor:
        if f"{site}.{side}" not in self.tensors:
            raise NeverRanError(f"{'site ' if site in SITES else ''}{site}; it never ran")
        return self.tensors[f"{site}.{side}"]

    def weight(self, name: str) -> Tensor:
        """A weight of the quantized mixer in float64."""
        return self.mixer.get_parameter(name).detach().double()

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
