"""The two sides of the question, and the runs that each takes.

alone     runs that differ from the float model in one unit
without   runs that differ from the quantized model in one unit
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from probe.running.reference import logits_of
from probe.sensitivity.restart import Passage, Rehearsal, Run, passage, restarted
from probe.sensitivity.threads import at_once
from probe.sensitivity.units import Unit, by_block, mixed, structure

#: Tokens in a forward over several runs: beyond, larger batches are no faster and take more memory.
TOKENS_TOGETHER = 512


@dataclass(frozen=True, eq=False)
class Side:
    """Runs that differ from one whole run, that of `shell`, in a unit at a time."""

    name: str
    shell: nn.Module
    base: nn.Module  # where the rest of a layer that differs is taken from
    donor: nn.Module  # where the unit is taken from
    stack: tuple[str, ...]  # the layers, by name
    rehearsal: Rehearsal | None = None  # None: every run is a whole run
    together: int | None = None  # runs in a forward; None chooses by TOKENS_TOGETHER
    threads: int | None = None  # forwards at a time; None: as many as torch has threads

    @property
    def is_whole(self) -> bool:
        """Whether every run starts at the beginning."""
        return self.rehearsal is None

    def passage(self, batch: Tensor, units: Sequence[Unit]) -> Passage:
        """The whole run, with the inputs of the layers that the runs of these units start at."""
        order = () if self.rehearsal is None else self.rehearsal.order
        wanted = {start for start in self._starts(units) if start >= 0}
        return passage(self.shell, batch, [order[start] for start in sorted(wanted)])

    def work(self, units: Sequence[Unit]) -> int:
        """How many layers all these runs go through, with the whole run that they share."""
        return len(self.stack) + sum(len(self.stack) - max(0, start) for start in self._starts(units))

    def logits(self, known: Passage, units: Sequence[Unit]) -> Iterator[tuple[Unit, Tensor, int]]:
        """(unit, its logits, layers that the run went through) of every unit, those that start first first."""
        starts = self._starts(units)
        early = [unit for unit, start in zip(units, starts, strict=True) if start < 0]
        for unit in early:
            yield unit, logits_of(self.whole(unit.paths), known.batch), len(self.stack)
        rest = sorted((start, index) for index, start in enumerate(starts) if start >= 0)
        size = self._runs_together(known.batch)
        groups = [rest[first : first + size] for first in range(0, len(rest), size)]

        def work(group: Sequence[tuple[int, int]]) -> list[Tensor]:
            assert self.rehearsal is not None
            runs = [self._run(units[index]) for _, index in group]
            return restarted(structure(self.shell), known, self.rehearsal, runs)

        for group, found in at_once(work, groups, self._threads(known.batch)):
            for (start, index), logits in zip(group, found, strict=True):
                yield units[index], logits, len(self.stack) - start

    @torch.no_grad()
    def whole(self, paths: Sequence[str]) -> nn.Module:
        """The model in which these units differ: the definition of what `logits` runs from the middle."""
        blocks = by_block(paths, self.stack)
        if blocks is None:  # outside of the layers
            return mixed(self.shell, self.donor, paths)
        model = structure(self.shell)
        for name, inner in blocks.items():
            parent, _, child = name.rpartition(".")
            model.get_submodule(parent)._modules[child] = mixed(self.base, self.donor, inner, at=name)
        return model

    def _starts(self, units: Sequence[Unit]) -> list[int]:
        """The place in the order of layers where the run of each unit starts; -1 for a whole run."""
        if self.rehearsal is None:
            return [-1] * len(units)
        order = self.rehearsal.order
        blocks = [by_block(unit.paths, self.stack) for unit in units]
        return [-1 if one is None else min(order.index(name) for name in one) for one in blocks]

    def _run(self, unit: Unit) -> Run:
        blocks = by_block(unit.paths, self.stack)
        assert blocks is not None
        return Run(unit.name, {at: mixed(self.base, self.donor, inner, at=at) for at, inner in blocks.items()})

    def _threads(self, batch: Tensor) -> int:
        wanted = self.threads or torch.get_num_threads()
        return wanted if batch.device.type == "cpu" else 1

    def _runs_together(self, batch: Tensor) -> int:
        if self.rehearsal is None or not self.rehearsal.stackable:
            return 1
        return self.together or max(1, TOKENS_TOGETHER // batch.numel())
