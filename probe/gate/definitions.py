"""The exact tensors of a layer by their readable definitions: its weights, and what its grids make of corner values.

A baseline keeps digests of these tensors, not the tensors. Where the definition still has the stored digest, it is the
golden tensor, and the values that changed can be named.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from probe.diagnosis.mamba_steps import ROTATED, rotated
from probe.diagnosis.plain_grids import PlainGrid
from probe.formats import FORMATS, Format
from probe.models.linear import linear_weights
from probe.models.mamba_blocks import mamba_blocks
from probe.models.offload import state_of
from probe.numerics.corners import corner_values
from probe.numerics.grids import activation_grid, sequence_grid, twins_of
from probe.running.corners import CornerAnswer
from probe.running.digests import digest_of
from probe.running.functions import function_errors
from probe.running.kept_float import keeps
from probe.running.recipes import SiteGrid, float_blocks, gridded_weights
from probe.running.traces import LayerTrace

#: Lines about one layer at most.
LINES = 3


@lru_cache(maxsize=512)
def defined_corners(grid: SiteGrid, width: int) -> tuple[Tensor, ...]:
    """What the grid must make of each tensor of its corner values."""
    given = corner_values(grid.format, width, amax=grid.amax, per_sequence=grid.per_sequence)
    plain = PlainGrid.at(grid)
    return tuple(_without_negative_zero(plain(one), grid.format) for one in given)


@lru_cache(maxsize=512)
def twin_corners(grid: SiteGrid, width: int) -> dict[str, tuple[Tensor, ...]]:
    """By implementation, what the twins of the grid that do not run in the gate make of its corner values."""
    given = corner_values(grid.format, width, amax=grid.amax, per_sequence=grid.per_sequence)
    name, amax = grid.format.name, grid.amax
    made = sequence_grid(name, amax) if grid.per_sequence else activation_grid(name, amax, rounding=grid.rounding)
    return {how: tuple(twin(one.clone()) for one in given) for how, twin in twins_of(made).items()}


def _without_negative_zero(x: Tensor, format: Format) -> Tensor:
    """Integers have one zero."""
    return x + 0.0 if format.is_integer else x


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the bit: zeros of either sign differ."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other)))


def differing_sites(answers: Sequence[CornerAnswer]) -> list[str]:
    """The sites whose grid gives other bits at corner values than its definition, or than one of its twins."""
    wrong = [
        one.site
        for one in answers
        if not same_bits(one.answer, defined_corners(one.grid, one.width)[one.part]) or _differing_twin(one)
    ]
    return list(dict.fromkeys(wrong))


def _differing_twin(one: CornerAnswer) -> str:
    """The implementation that gives other bits than the grid in the model; empty if none does."""
    twins = twin_corners(one.grid, one.width)
    return next((how for how, made in twins.items() if not same_bits(one.answer, made[one.part])), "")


def differing_twin(answers: Sequence[CornerAnswer]) -> str:
    """A line about the first twin that gives other bits than a grid which is as defined; empty if there is none."""
    for one in answers:
        how = _differing_twin(one)
        if how and same_bits(one.answer, defined_corners(one.grid, one.width)[one.part]):
            made = twin_corners(one.grid, one.width)[how][one.part]
            mask = _bits_differ(made, one.answer)
            given, wrong, right = (float(x[mask][0]) for x in (one.given, made, one.answer))
            site = ".".join(one.site.split(".")[-2:])
            return f"site {site}; implementation {how!r} makes {wrong:.6g} of {given:.6g}, the model {right:.6g}"
    return ""


@dataclass(frozen=True, eq=False)
class ExactLayer:
    """The exact tensors of one layer of a recipe: as they are, and as their definitions have them."""

    trace: LayerTrace

    @property
    def _format(self) -> Format | None:
        return FORMATS[self.trace.recipe.format] if self.trace.recipe.format else None

    @cached_property
    def _layer(self) -> nn.Module:
        return self.trace.twin.get_submodule(self.trace.module)

    @cached_property
    def _stock(self) -> dict[str, Tensor]:
        return dict(state_of(self.trace.model.get_submodule(self.trace.module)))

    def changes(self, changed: Mapping[str, Sequence[str]], stored: Mapping[str, str]) -> list[str]:
        """Lines that name the first value of each tensor that changed; `stored` has the digests of the baseline."""
        weights, corners = changed.get("weights", ()), changed.get("corners", ())
        lines = [self._weight_line(name, stored.get(f"weights.{name}")) for name in weights[:LINES]]
        lines += [self._corner_line(site, stored.get(f"corners.{site}")) for site in corners[:LINES]]
        return lines[:LINES]

    def worst_function(self) -> str:
        """The function on the way that is furthest from its formula; empty if there is none."""
        stock = self.trace.model.get_submodule(self.trace.module)
        found = function_errors(self._layer, stock)
        return str(max(found, key=lambda one: one.ulps)) if found else ""

    def _weight_line(self, name: str, stored: str | None) -> str:
        start, now = f"weight {name}", dict(state_of(self._layer)).get(name)
        if now is None or stored is None:
            return f"{start}: {'the copy has no such tensor' if now is None else 'the baseline has no such tensor'}"
        golden = self.defined_weight(name)
        if golden is None:
            return f"{start}: other bits than stored; the mode has no readable definition of it"
        if digest_of(golden) != stored:
            return _redefined(start, is_defined=same_bits(golden, now.detach().cpu()))
        return f"{start}{_first_difference(golden, now.detach().cpu(), self._codes(name))}"

    def _corner_line(self, site: str, stored: str | None) -> str:
        short = site.removeprefix("mixer.")
        answers = [one for one in self.trace.corners() if one.site == f"{self.trace.module}.{site}"]
        if not answers or stored is None:
            return f"{short}: {'no grid is asked' if not answers else 'the baseline has no such site'}"
        golden = [defined_corners(one.grid, one.width)[one.part] for one in answers]
        if digest_of(*golden) != stored:
            right = all(same_bits(one.answer, wanted) for one, wanted in zip(answers, golden, strict=True))
            return _redefined(short, is_defined=right)
        count = sum(one.given.numel() for one in answers)
        wrong = [_bits_differ(one.answer, wanted) for one, wanted in zip(answers, golden, strict=True)]
        total = sum(int(mask.sum()) for mask in wrong)
        for one, wanted, mask in zip(answers, golden, wrong, strict=True):
            if bool(mask.any()):
                given, old, new = (float(x[mask][0]) for x in (one.given, wanted, one.answer))
                values = f"at {given:.9g}: {old:.9g} -> {new:.9g}"
                return f"{short} {values} ({total} of {count} corner values)"
        return f"{short}: other bits than stored"

    def _codes(self, name: str) -> Format | None:
        """The integer format whose codes a weight has, if it has any."""
        is_integer = self._format is not None and self._format.scale == "float32"
        return self._format if is_integer and self.trace.mode.kind in ("ssm", "linear") else None

    def defined_weight(self, name: str) -> Tensor | None:
        """A weight of the layer as its definition has it; None if a mode has none."""
        trace = self.trace
        if trace.mode.kind == "user":
            return None
        if trace.mode.kind == "float":
            return self._stock[name].detach().to(trace.mode.dtype).cpu() if name in self._stock else None
        by_mode = self._ssm_weights() if trace.mode.kind == "ssm" else self._linear_weights()
        return dict(by_mode).get(name, self._stock.get(name))

    def _linear_weights(self) -> Iterator[tuple[str, Tensor]]:
        trace, kept = self.trace, keeps(self.trace.mode)
        for name, linear in linear_weights(trace.model, trace.recipe.include).items():
            owner = name.rpartition(".")[0]
            if name.startswith(f"{trace.module}.") and not kept(owner):
                short = name.removeprefix(f"{trace.module}.")
                plain = self._stock[short].detach()
                yield short, linear.joined([self._on_grid(one.contiguous()) for one in linear.matrices(plain)], plain)

    def _ssm_weights(self) -> Iterator[tuple[str, Tensor]]:
        """gamma and the rotations are folded into the projections, then all weights are put on the grid."""
        trace = self.trace
        layer = trace.model.get_submodule(trace.module)
        left = float_blocks(trace.model, trace.mode)
        for block in mamba_blocks(layer):
            path = f"{trace.module}.{block.name}" if block.name else trace.module
            if path in left:
                continue
            gamma, prefix = self._stock[f"{block.norm_name}.weight"].detach(), f"{block.mixer_name}."
            yield f"{block.norm_name}.weight", torch.ones_like(gamma)
            gridded = gridded_weights(trace.mode, block.layout, f"{trace.module}.{block.mixer_name}")
            for name, plain in self._stock.items():
                weight = name.removeprefix(prefix)
                if not name.startswith(prefix):
                    continue
                folded = plain.detach()
                if weight == "in_proj.weight":
                    folded = (folded.double() * gamma.double()).to(folded.dtype)
                if weight in ROTATED:
                    folded = rotated(folded).to(folded.dtype)
                yield name, self._on_grid(folded) if weight in gridded else folded

    def _on_grid(self, x: Tensor) -> Tensor:
        assert self._format is not None
        return _without_negative_zero(PlainGrid(self._format)(x), self._format)


def _redefined(what: str, *, is_defined: bool) -> str:
    """The line about a tensor whose definition no longer gives the stored bits."""
    now = "it is what its definition gives now" if is_defined else "and it is not what its definition gives now"
    return f"{what}: its definition changed too (format table, grid or float weights); {now}"


def _bits_differ(one: Tensor, other: Tensor) -> Tensor:
    whole = {4: torch.int32, 8: torch.int64, 2: torch.int16}[one.element_size()]
    return one.contiguous().view(whole) != other.contiguous().view(whole)


def _first_difference(golden: Tensor, now: Tensor, codes: Format | None) -> str:
    """[3, 5]: code 12 -> 13 (1 of 65536 values)."""
    if golden.shape != now.shape or golden.dtype != now.dtype:
        return f": {golden.dtype} {list(golden.shape)} -> {now.dtype} {list(now.shape)}"
    mask = _bits_differ(golden, now)
    place = [int(x) for x in mask.nonzero()[0]]
    old, new = (float(x[tuple(place)]) for x in (golden, now))
    count = f"({int(mask.sum())} of {mask.numel()} values)"
    if codes is not None:
        scale = float(golden.abs().max()) / codes.max  # of one scale for the tensor, whose largest value is `max`
        old, new = old / scale, new / scale
        return f"{place}: code {old:.4g} -> {new:.6g} {count}"
    return f"{place}: {old:.9g} -> {new:.9g} {count}"


def exact_changes(
    trace: LayerTrace, changed: Mapping[str, Sequence[str]], stored: Mapping[str, str], *, functions: bool = False
) -> list[str]:
    """What changed in a layer, a line each; with `functions` also the worst function on the way.

    Never raises: it must not hide the failure that it explains.
    """
    try:
        layer = ExactLayer(trace)
        return [*layer.changes(changed, stored), *([layer.worst_function()] if functions else [])]
    except Exception as problem:
        return [f"what changed cannot be named: {str(problem) or type(problem).__name__}"]
