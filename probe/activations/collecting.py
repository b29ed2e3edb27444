"""Hooks that take statistics while the model runs, and keep nothing else."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from probe.activations.bands import ChannelBands, measure_bands
from probe.activations.heat import HeatGrid, heat_of
from probe.activations.outliers import LayerOutliers, find_outliers
from probe.activations.plan import Plan, Side
from probe.activations.statistics import LayerStatistics, measure
from probe.activations.tokens import token_rows
from probe.data.samples import Batch
from probe.running.capture import UncoveredError, first_tensor

Key = tuple[str, str]
Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


class Collector:
    """Gathers what a plan asks for, batch after batch. What cannot be gathered is told in `gaps`, once a tensor."""

    def __init__(self, plan: Plan, *, threshold: float, heat_sample: int) -> None:
        self.plan = plan
        self.statistics: dict[Key, LayerStatistics] = {}
        self.outliers: dict[str, LayerOutliers] = {}
        self.bands: dict[str, ChannelBands] = {}
        self.heat: dict[str, HeatGrid] = {}
        self.gaps: dict[Key, str] = {}
        self.ran: set[str] = set()
        self._threshold = threshold
        self._heat_sample = heat_sample
        self._batch: Batch | None = None
        self._last: tuple[Any, Any, LayerStatistics, npt.NDArray[np.float32]] | None = None
        self._wanted = {side: set(plan.measured(side)) for side in ("input", "output")}

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator["Collector"]:
        """Collect while the block runs; set the batch with `begin` before each forward."""
        with ExitStack() as hooks:
            for name in self.plan.hooked():
                handle = model.get_submodule(name).register_forward_hook(self._hook(name), with_kwargs=True)
                hooks.callback(handle.remove)
            yield self

    def begin(self, batch: Batch) -> None:
        """The batch that runs next."""
        self._batch = batch
        self._last = None

    def _hook(self, name: str) -> Hook:
        sides: tuple[Side, Side] = ("input", "output")
        here = [side for side in sides if name in self._wanted[side] or self._is_banded(name, side)]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.ran.add(name)
            for side in here:
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
        rows = token_rows(tensor, shape, module)
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
    ) -> tuple[LayerStatistics, npt.NDArray[np.float32]]:
        """The tensor that was measured last (the input of q, k and v, say) is not measured again."""
        layout = tensor._version, values.shape, values.stride()  # the rows of a convolution's input are others
        if self._last is not None:
            known, its, found, amax = self._last
            if known() is tensor and its == layout:
                return replace(found, module=name, kind=side), amax
        found, amax = measure(values, module=name, kind=side, keep=keep)
        self._last = weakref.ref(tensor), layout, found, amax
        return found, amax

    def _take_tokens(self, name: str, side: Side, values: Tensor, amax: npt.NDArray[np.float32], batch: Batch) -> None:
        if side == "output" and name in self.plan.outliers:
            for row in range(len(batch.tokens)):
                kept = batch.mask[row].numpy()  # on the right there may be padding, so places are positions
                found = find_outliers(
                    name,
                    amax[row][kept],
                    batch.tokens[row].numpy()[kept],
                    threshold=self._threshold,
                    sample=batch.first + row,
                )
                self.outliers[name] = self.outliers[name].merge(found) if name in self.outliers else found
        row = self._heat_sample - batch.first
        if self.plan.heat[0] == side and name in self.plan.heat[1] and 0 <= row < len(batch.tokens):
            here = values[row][batch.mask[row].to(values.device)]
            self.heat[name] = heat_of(here, module=name, kind=side, sample=self._heat_sample)
