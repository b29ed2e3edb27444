"""Gathering the figures of a tensor, or of a model's logits, against a reference, batch after batch."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Self, cast

import torch
from torch import Tensor

from probe.files.checked_json import finite
from probe.metrics import reference as readable
from probe.metrics.figures import QUANTILES, Measured, Metrics
from probe.metrics.reference import CHUNK, double_copy, first_true
from probe.metrics.tally import KEPT, Magnitudes, Tally, first_index
from probe.numerics.native import numba_twin

_Measure = Callable[[Tensor, Tensor, Magnitudes | None], Tally]


class Comparison:
    """Gathers the `Metrics` of a tensor against its reference.

    Percentiles are exact, equal to numpy's (`linear`), as long as at most `keep` elements were compared: that many
    |d| are kept as float64. With more elements they are read from counts in 2^8 buckets per octave, with a relative
    error of at most PERCENTILE_ERROR = 2^-9 (an absolute one of 2^-1031 for percentiles below 2^-1022).
    `percentiles=False` saves the memory and the time.
    """

    def __init__(self, *, percentiles: bool = True, keep: int = KEPT) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
            raise ValueError(f"keep is {keep!r}. Give how many values to keep exactly: 0 or more, e.g. 2**22.")
        self.percentiles = percentiles
        self.keep = keep
        self._tally = Tally()
        self._magnitudes = Magnitudes(keep)

    def update(self, output: Tensor, reference: Tensor) -> None:
        """Append a batch: tensors of one shape, of any float dtypes, on any devices. An empty one changes nothing."""
        check_pair(output, reference, names=("output", "reference"))
        measure: _Measure = (numba_twin("probe.metrics.fast", "figures") or readable).measure
        flat, plain = (x.detach().reshape(-1) for x in (output, reference))
        self._tally = self._tally.then(measure(flat, plain, self._magnitudes if self.percentiles else None))

    def merge(self, other: "Comparison") -> Self:
        """Append the whole stream of `other`, which stays as it is; returns itself."""
        check_kind(self, other)
        if (other.percentiles, other.keep) != (self.percentiles, self.keep):
            raise ValueError(
                f"cannot merge {other!r} into {self!r}: what they have kept is not comparable. "
                "Make both with the same percentiles and keep."
            )
        self._tally = self._tally.then(other._tally)
        self._magnitudes.take_from(other._magnitudes)
        return self

    def expect(self, times: Fraction) -> None:
        """The whole stream is `times` as long as this part of it, so that values that cannot be kept are not sent."""
        self._magnitudes.expect(self._tally.count * times)

    def metrics(self) -> Metrics:
        """The figures of the whole stream so far."""
        tally = self._tally
        check_seen(self, tally.seen)
        quantiles: dict[float, float] = {}
        if self.percentiles and tally.count:
            values = self._magnitudes.quantiles(QUANTILES, largest=tally.difference.largest)
            quantiles = dict(zip(QUANTILES, values, strict=True))
        return Metrics.of(Measured(tally, quantiles, self._magnitudes.exact if quantiles else None))

    def __repr__(self) -> str:
        return f"Comparison(percentiles={self.percentiles}, keep={self.keep}, count={self._tally.seen})"


@dataclass(frozen=True, kw_only=True)
class LogitMetrics:
    """The figures of a LogitComparison, means over the positions whose logits are finite on both sides.

        kl                    sum over the vocabulary of p_ref * (log p_ref - log p_out), in nats
        top1_agreement        share of positions with the same largest logit (the first of equals)
        bits_per_token        -log2 p_out[target];  reference_bits_per_token = -log2 p_ref[target]
        change_in_bits        bits_per_token - reference_bits_per_token

    They are None when no position is finite on both sides, or when the figure is beyond the range of float64; the
    bits also when there are no targets.
    A masked vocabulary, -Inf on both sides, counts as not finite: cut it off first.
    """

    positions: int  # all positions seen
    compared: int  # those whose logits are finite on both sides
    finite: bool  # no NaN and no Inf in any logit
    nonfinite_output: int  # positions with a NaN or Inf among the output's logits
    nonfinite_reference: int
    first_nonfinite: int | None
    """The first position, over the whole stream, not finite in the output but finite in the reference."""
    kl: float | None
    top1_agreement: float | None
    bits_per_token: float | None
    reference_bits_per_token: float | None
    change_in_bits: float | None

    def as_dict(self) -> dict[str, Any]:
        """Name -> figure, in the order above."""
        return asdict(self)


class LogitComparison:
    """Gathers the `LogitMetrics` of a model's logits against those of the reference model."""

    def __init__(self) -> None:
        self._positions = self._compared = self._agreed = self._nonfinite_output = self._nonfinite_reference = 0
        self._first_nonfinite: int | None = None
        self._kl = self._nats = self._reference_nats = self._change = 0.0
        self._has_targets = True

    def update(self, logits: Tensor, reference_logits: Tensor, targets: Tensor | None = None) -> None:
        """Append a batch: logits [..., vocabulary], and the tokens that followed, as integers [...].

        Without targets, here and in every other batch: what is scored are classes of which the true one is not known.
        """
        check_pair(logits, reference_logits, names=("logits", "reference_logits"))
        if targets is None:
            if logits.ndim == 0:
                raise ValueError("the logits are a single number. Expected [..., classes].")
            self._has_targets = False
            targets = torch.zeros(logits.shape[:-1], dtype=torch.int64)
        if targets.shape != logits.shape[:-1] or logits.ndim == 0:
            raise ValueError(
                f"targets have shape {list(targets.shape)} and logits {list(logits.shape)}. "
                "Give one target per position: the shape of the logits without its last axis."
            )
        if targets.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
            raise ValueError(f"targets are {targets.dtype}. Give token numbers as integers, e.g. torch.int64.")
        vocabulary = logits.shape[-1]
        targets = targets.detach().reshape(-1).cpu().long()
        if not targets.numel():
            return
        low, high = (int(end) for end in torch.aminmax(targets))
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"targets run from {low} to {high}, but the logits have a vocabulary of {vocabulary}. "
                "Drop padded positions, and check that the tokenizer is that of the model."
            )
        rows = max(1, CHUNK // vocabulary)
        sides = (torch.split(x.detach().reshape(-1, vocabulary), rows) for x in (logits, reference_logits))
        for output, reference, tokens in zip(*sides, torch.split(targets, rows), strict=True):
            self._update_chunk(double_copy(output), double_copy(reference), tokens)

    def merge(self, other: "LogitComparison") -> Self:
        """Append the whole stream of `other`, which stays as it is; returns itself."""
        check_kind(self, other)
        self._first_nonfinite = first_index(self._first_nonfinite, self._positions, other._first_nonfinite)
        self._has_targets &= other._has_targets
        for name in vars(self).keys() - {"_first_nonfinite", "_has_targets"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def metrics(self) -> LogitMetrics:
        """The figures of the whole stream so far."""
        check_seen(self, self._positions)

        def mean(total: float) -> float | None:
            return cast(float | None, finite(total / self._compared)) if self._compared else None

        def bits(nats: float) -> float | None:
            return mean(nats / math.log(2)) if self._has_targets else None

        return LogitMetrics(
            positions=self._positions,
            compared=self._compared,
            finite=not (self._nonfinite_output or self._nonfinite_reference),
            nonfinite_output=self._nonfinite_output,
            nonfinite_reference=self._nonfinite_reference,
            first_nonfinite=self._first_nonfinite,
            kl=mean(0.0 if self._kl < 0 else self._kl),  # rounding may leave it slightly below 0; NaN stays
            top1_agreement=mean(self._agreed),
            bits_per_token=bits(self._nats),
            reference_bits_per_token=bits(self._reference_nats),
            change_in_bits=bits(self._change),
        )

    def __repr__(self) -> str:
        return f"LogitComparison(positions={self._positions})"

    def _update_chunk(self, output: Tensor, reference: Tensor, targets: Tensor) -> None:
        good_output, good_reference = output.isfinite().all(1), reference.isfinite().all(1)
        good = good_output & good_reference
        lost = first_true(~good_output & good_reference)
        self._first_nonfinite = first_index(self._first_nonfinite, self._positions, lost)
        self._positions += len(good)
        self._compared += int(good.sum())
        self._nonfinite_output += int((~good_output).sum())
        self._nonfinite_reference += int((~good_reference).sum())
        if not good.all():
            output, reference, targets = output[good], reference[good], targets[good]
        self._agreed += int((output.argmax(1) == reference.argmax(1)).sum())
        output, reference = output.log_softmax(1), reference.log_softmax(1)
        self._kl += float((reference.exp() * (reference - output)).sum())
        nats, reference_nats = (-x.gather(1, targets[:, None]) for x in (output, reference))
        self._nats += float(nats.sum())
        self._reference_nats += float(reference_nats.sum())
        self._change += float((nats - reference_nats).sum())


def check_pair(output: Tensor, reference: Tensor, *, names: tuple[str, str]) -> None:
    """Refuse tensors that are not floats or that differ in shape."""
    for name, x in zip(names, (output, reference), strict=True):
        if not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}. Only floats are compared. Convert first, e.g. {name}.float().")
    if output.shape != reference.shape:
        raise ValueError(
            f"{names[0]} has shape {list(output.shape)} and {names[1]} {list(reference.shape)}. "
            "They are compared element by element and never broadcast or cropped: give tensors of one shape."
        )


def check_kind(into: object, other: object) -> None:
    """Refuse an accumulator of another kind."""
    if type(other) is not type(into):
        raise ValueError(f"cannot merge {other!r} into {into!r}. Merge accumulators of one kind.")


def check_seen(accumulator: object, seen: int) -> None:
    """Refuse an accumulator without data."""
    if not seen:
        raise ValueError(f"{accumulator!r} has seen nothing, so it has no metrics. Call update(...) with data first.")
