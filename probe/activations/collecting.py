"""Hooks that gather statistics while the model runs: of whole tensors, by token (outliers, heat maps), by channel."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from probe.activations.plan import SIDES, Plan, Side
from probe.activations.statistics import ChannelBands, LayerStatistics, measure, measure_bands
from probe.data.samples import TokenBatch
from probe.models.offload import return_free_memory
from probe.running.capture import UncoveredError, first_tensor

#: The worst tokens of a layer that are listed one by one.
WORST = 20
#: A heat map has at most so many cells down and across.
TOKENS, CHANNELS = 128, 256

#: After so many measured bytes freed memory goes back to the system. The small tables of each tensor lie between the
#: large blocks of the forward, so that freed blocks do not join: without this the peak grows by a quarter.
RETURN_AFTER = 1 << 27

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

Key = tuple[str, str]
Floats = npt.NDArray[np.float32]
Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


class Collector:
    """Gathers what a plan needs, batch after batch; `gaps` has the reason for each tensor that was not measured."""

    def __init__(self, plan: Plan, *, threshold: float, heat_sample: int) -> None:
        self.plan = plan
        self.statistics: dict[Key, LayerStatistics] = {}
        self.outliers: dict[str, LayerOutliers] = {}
        self.bands: dict[str, ChannelBands] = {}
        self.heat: dict[str, HeatGrid] = {}
        self.gaps: dict[Key, str] = {}
        self.ran: set[str] = set()
        self._threshold, self._heat_sample = threshold, heat_sample
        self._batch: TokenBatch | None = None
        self._measured_bytes = 0
        self._last: tuple[Any, Any, LayerStatistics, Floats] | None = None
        self._wanted = {side: set(plan.measured(side)) for side in SIDES}

    def collected(self) -> "Collected":
        """What was gathered."""
        return Collected(self.statistics, self.outliers, self.bands, self.heat, self.gaps, self.ran)

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator["Collector"]:
        """Collect while the block runs; set the batch with `begin` before each forward."""
        with ExitStack() as hooks:
            for name in self.plan.hooked():
                handle = model.get_submodule(name).register_forward_hook(self._hook(name), with_kwargs=True)
                hooks.callback(handle.remove)
            yield self

    def begin(self, batch: TokenBatch) -> None:
        """Set the batch that runs next."""
        self._batch, self._last = batch, None

    def _hook(self, name: str) -> Hook:
        sides = [side for side in SIDES if name in self._wanted[side] or self._is_banded(name, side)]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.ran.add(name)
            for side in sides:
                try:
                    value = (*args, *kwargs.values()) if side == "input" else output
                    self._take(name, side, module, first_tensor(name, side, value))
                except (ValueError, UncoveredError) as problem:
                    self.gaps.setdefault((name, side), str(problem))

        return hook

    def _is_banded(self, name: str, side: Side) -> bool:
        return self.plan.bands[0] == side and name in self.plan.bands[1]

    def _take(self, name: str, side: Side, module: nn.Module, tensor: Tensor) -> None:
        batch = self._batch
        assert batch is not None, "begin(batch) was not called"
        shape = (batch.tokens.shape[0], batch.tokens.shape[1])
        rows = token_rows(tensor, shape, module, reads_tokens=batch.reads_tokens)
        if not rows.are_tokens and batch.padded:
            raise UncoveredError(
                f"the {side} of {name} is {list(tensor.shape)}: no axis is the {shape[1]} tokens, so padding cannot be "
                "told from activation. Run samples one by one (data.batch_size 1), or choose the module around it."
            )
        keep = batch.mask if rows.are_tokens and batch.padded else None
        if name in self._wanted[side]:
            found, amax = self._measure(name, side, tensor, rows.values, keep)
            before = self.statistics.get((name, side))
            self.statistics[name, side] = found if before is None else before.merge(found)
            if rows.are_tokens:
                self._take_tokens(name, side, rows.values, amax, batch)
            elif side == "output" and name in self.plan.outliers:
                self.gaps[name, "outliers"] = f"the output of {name} is {list(tensor.shape)}: no axis is the tokens"
        if self._is_banded(name, side):
            bands = measure_bands(rows.values, keep, module=name, kind=side)
            self.bands[name] = self.bands[name].merge(bands) if name in self.bands else bands

    def _measure(
        self, name: str, side: Side, tensor: Tensor, values: Tensor, keep: Tensor | None
    ) -> tuple[LayerStatistics, Floats]:
        """Statistics and max |x| of rows; an input that q, k and v share is measured once."""
        layout = tensor._version, values.shape, values.stride()  # a convolution has other rows than a linear layer
        if self._last is not None:
            last_tensor, last_layout, found, amax = self._last
            if last_tensor() is tensor and last_layout == layout:
                return replace(found, module=name, kind=side), amax
        found, amax = measure(values, module=name, kind=side, keep=keep)
        self._measured_bytes += values.nbytes
        if self._measured_bytes >= RETURN_AFTER:
            self._measured_bytes = 0
            return_free_memory()
        self._last = weakref.ref(tensor), layout, found, amax
        return found, amax

    def _take_tokens(self, name: str, side: Side, values: Tensor, amax: Floats, batch: TokenBatch) -> None:
        if side == "output" and name in self.plan.outliers:
            for row, (tokens, mask) in enumerate(zip(batch.tokens.numpy(), batch.mask.numpy(), strict=True)):
                sample = batch.first + row  # padding is on the right, so indices are positions also without it
                found = find_outliers(name, amax[row][mask], tokens[mask], threshold=self._threshold, sample=sample)
                self.outliers[name] = self.outliers[name].merge(found) if name in self.outliers else found
        row = self._heat_sample - batch.first
        if self.plan.heat[0] == side and name in self.plan.heat[1] and 0 <= row < len(batch.tokens):
            tokens = values[row][batch.mask[row].to(values.device)]
            self.heat[name] = heat_of(tokens, module=name, kind=side, sample=self._heat_sample)


@dataclass(frozen=True, eq=False)
class Collected:
    """What a Collector gathered from some batches; that of the next batches merges into it."""

    statistics: dict[Key, LayerStatistics] = field(default_factory=dict)
    outliers: dict[str, "LayerOutliers"] = field(default_factory=dict)
    bands: dict[str, ChannelBands] = field(default_factory=dict)
    heat: dict[str, "HeatGrid"] = field(default_factory=dict)
    gaps: dict[Key, str] = field(default_factory=dict)
    """The reason for each tensor that was not measured."""
    ran: set[str] = field(default_factory=set)

    def merge(self, other: "Collected") -> None:
        """Append what the next batches gave."""
        _merge(self.statistics, other.statistics)
        _merge(self.outliers, other.outliers)
        _merge(self.bands, other.bands)
        self.heat.update(other.heat)
        for key, why in other.gaps.items():
            self.gaps.setdefault(key, why)
        self.ran.update(other.ran)


class _Merging(Protocol):
    def merge(self, other: Self, /) -> Self: ...


_Name = TypeVar("_Name")
_Merged = TypeVar("_Merged", bound=_Merging)


def _merge(mine: dict[_Name, _Merged], found: dict[_Name, _Merged]) -> None:
    for key, value in found.items():
        mine[key] = mine[key].merge(value) if key in mine else value


@dataclass(frozen=True, eq=False)
class TokenRows:
    """A tensor as rows of channels: [samples, tokens, channels] if `are_tokens`, else rows of unknown meaning."""

    values: Tensor
    are_tokens: bool


def token_rows(x: Tensor, shape: tuple[int, int], module: nn.Module, *, reads_tokens: bool = True) -> TokenRows:
    """The rows of `x`, of a batch of `shape` samples and tokens. The first rule that fits:

        [samples, channels, tokens or more]      of a convolution; anything after the last token is padding
        [samples, tokens, ...]                   the rest are channels
        [samples * tokens, channels]
        [samples, heads, tokens, channels]       heads and channels are channels
        [samples, channels, tokens]

    Anything else (the tokens of one expert, a state) is rows of its last axis, of a convolution of its second one.
    Of a model that does not read tokens, or not only, only the second rule tells tokens for sure.
    """
    samples, tokens = shape
    if not reads_tokens and not (x.dim() >= 3 and x.shape[:2] == shape):
        of_channels = x.movedim(1, -1) if isinstance(module, CONVOLUTIONS) and x.dim() > 2 else x
        return TokenRows(of_channels.reshape(1, -1, of_channels.shape[-1]) if x.dim() else x.reshape(1, 1, 1), False)
    if isinstance(module, nn.Conv1d) and x.dim() == 3 and x.shape[0] == samples and x.shape[2] >= tokens:
        return TokenRows(x[..., :tokens].transpose(1, 2), True)
    if x.dim() >= 3 and x.shape[:2] == shape:
        return TokenRows(x.flatten(2), True)
    if x.dim() == 2 and x.shape[0] == samples * tokens:
        return TokenRows(x.reshape(samples, tokens, -1), True)
    if x.dim() == 4 and (x.shape[0], x.shape[2]) == shape:
        return TokenRows(x.transpose(1, 2).flatten(2), True)
    if x.dim() == 3 and (x.shape[0], x.shape[2]) == shape:
        return TokenRows(x.transpose(1, 2), True)
    return TokenRows(x.reshape(1, -1, x.shape[-1]) if x.dim() else x.reshape(1, 1, 1), False)


@dataclass(frozen=True, order=True)
class OutlierToken:
    """One token of one sample; `ratio` is its max |x| over the median of its sample."""

    ratio: float
    value: float
    sample: int
    position: int
    token: int


@dataclass(frozen=True)
class LayerOutliers:
    """The tokens of a layer whose max |x| > threshold x the median of max |x| over the tokens of their sample."""

    module: str
    threshold: float
    tokens: int = 0
    count: int = 0
    samples: int = 0
    """How many samples have an outlier."""
    largest_ratio: float = 0.0
    """The largest max |x| / median, outlier or not; inf where a median is 0."""
    positions: Counter[int] = field(default_factory=Counter)
    token_ids: Counter[int] = field(default_factory=Counter)
    worst: tuple[OutlierToken, ...] = ()

    def merge(self, other: "LayerOutliers") -> "LayerOutliers":
        """The outliers of both sets of samples."""
        names = ("tokens", "count", "samples", "positions", "token_ids")
        added = {name: getattr(self, name) + getattr(other, name) for name in names}
        largest = max(self.largest_ratio, other.largest_ratio)
        worst = sorted(self.worst + other.worst, key=lambda token: (-token.ratio, token.sample, token.position))
        return replace(self, **added, largest_ratio=largest, worst=tuple(worst[:WORST]))

    def figures(self) -> dict[str, Any]:
        """Every fact that is one number, by name."""
        return {
            "module": self.module,
            "outliers": self.count,
            "tokens": self.tokens,
            "share": self.count / self.tokens if self.tokens else 0.0,
            "samples": self.samples,
            "largest_ratio": self.largest_ratio,
        }


def find_outliers(
    module: str, amax: Floats, tokens: npt.NDArray[np.int64], *, threshold: float, sample: int
) -> LayerOutliers:
    """The outliers of one sample, from max |x| and the id of each of its tokens, without padding."""
    if not amax.size:
        return LayerOutliers(module, threshold)
    wide = amax.astype(np.float64)
    median = float(np.median(wide))
    ratios = wide / median if median else np.where(wide > 0, np.inf, 0.0)
    places = np.flatnonzero(wide > threshold * median)
    worst = [
        OutlierToken(float(ratios[place]), float(wide[place]), sample, int(place), int(tokens[place]))
        for place in places[np.argsort(-ratios[places], kind="stable")][:WORST]
    ]
    count, positions, token_ids = len(places), Counter(places.tolist()), Counter(tokens[places].tolist())
    counted = (amax.size, count, int(count > 0), float(ratios.max()))
    return LayerOutliers(module, threshold, *counted, positions, token_ids, tuple(worst))


@dataclass(frozen=True, eq=False)
class HeatGrid:
    """max |x| in cells of a grid, [rows of cells, columns of cells], for one sample of `tokens` x `channels` values."""

    module: str
    kind: str
    sample: int
    tokens: int
    channels: int
    values: Floats


def heat_of(x: Tensor, *, module: str, kind: str, sample: int) -> HeatGrid:
    """The heat map of one sample, [tokens, channels]; NaN and Inf count as 0."""
    sizes = x.detach().to("cpu", torch.float32).abs().nan_to_num(0.0, 0.0, 0.0).numpy()
    tokens, channels = sizes.shape
    return HeatGrid(module, kind, sample, tokens, channels, pooled(sizes, TOKENS, CHANNELS))


def pooled(values: Floats, most_rows: int, most_columns: int) -> Floats:
    """The largest value of every cell, with at most `most_rows` x `most_columns` cells."""
    for axis, most in ((0, most_rows), (1, most_columns)):
        size = values.shape[axis]
        if size > most:
            values = np.maximum.reduceat(values, np.arange(most) * size // most, axis=axis)
    return values
