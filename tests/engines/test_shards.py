"""Shards merge in their order: any cut, pickled on the way, gives the figures of the whole up to the order of sums."""

import pickle
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import TypeVar

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from probe.activations.collecting import Collected, find_outliers
from probe.activations.statistics import measure, measure_bands
from probe.metrics import Comparison
from probe.models.outputs import OUTPUT_KINDS, OutputKind
from probe.running.measurement import Measured, Measuring
from probe.running.measurement_job import measure_all
from probe.running.recipes import Recipe
from probe.running.weights import Weights

BATCHES = 12
Part = TypeVar("Part", Measuring, Comparison, Collected)
SHARDS = st.lists(st.integers(1, BATCHES - 1), max_size=5, unique=True).map(sorted)
#: Which two neighbours are merged first, which next, and so on.
BRACKETS = st.lists(st.integers(0, BATCHES), min_size=5, max_size=5)


def cut(places: list[int]) -> list[range]:
    ends = [0, *places, BATCHES]
    return [range(first, last) for first, last in pairwise(ends)]


def bracketed(parts: Iterable[Part], brackets: list[int]) -> Part:
    """The parts in their order, but merged two neighbours at a time, whichever they are."""
    left = list(parts)
    for place in brackets[: len(left) - 1]:
        first = place % (len(left) - 1)
        left[first].merge(left.pop(first + 1))
    (whole,) = left
    return whole


def sides(batch: int, kind: OutputKind) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(batch)
    shape = (2, 8) if kind.has_embeddings else (2, 5, 8)
    reference = torch.randn(shape, generator=random) * 10.0 ** (batch % 4)
    return reference + torch.randn(shape, generator=random) / 16, reference


def measured(batches: range, kind: OutputKind) -> Measuring:
    made = Measuring(Recipe("2-1", "int8"), ["layer_0"], kind, WEIGHTS)
    for batch in batches:
        output, reference = sides(batch, kind)
        made.layers["layer_0"].update(output, reference)
        made.output.update(output, reference, torch.arange(10).reshape(2, 5) % 8)
    return made


WEIGHTS = Weights(1, 1, [], {}, False, [])


def flat(found: Measured) -> dict[str, object]:
    layers = {f"layer {name}": value for name, value in found.layers["layer_0"].as_dict().items()}
    return {**layers, **{f"output {name}": value for name, value in found.output.as_dict().items()}}


def check_same(found: Mapping[str, object], whole: Mapping[str, object]) -> None:
    """Up to the order of sums."""
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert found[name] == (pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value), name


@pytest.mark.parametrize("kind", OUTPUT_KINDS.values(), ids=str)
@given(places=SHARDS, brackets=BRACKETS)
def test_measured_shards_are_the_whole(kind: OutputKind, places: list[int], brackets: list[int]) -> None:
    whole = flat(measured(range(BATCHES), kind).measured())
    parts = [pickle.loads(pickle.dumps(measured(part, kind))) for part in cut(places)]
    check_same(flat(bracketed(parts, brackets).measured()), whole)


@pytest.mark.parametrize("kind", OUTPUT_KINDS.values(), ids=str)
def test_shards_of_a_batch_each_are_the_whole_to_the_bit(kind: OutputKind) -> None:
    parts = [measured(range(batch, batch + 1), kind) for batch in range(BATCHES)]
    assert flat(reduce(Measuring.merge, parts).measured()) == flat(measured(range(BATCHES), kind).measured())


@given(places=SHARDS, brackets=BRACKETS)
@pytest.mark.parametrize("keep", [0, 500, 960, 10**6])
def test_parts_that_know_the_length_of_the_stream_are_the_whole_to_the_bit(
    keep: int, places: list[int], brackets: list[int]
) -> None:
    """960 values in all: those that cannot be kept in the end are counted before they are sent."""
    values = OUTPUT_KINDS["values"]

    def compared(batches: range) -> Comparison:
        found = Comparison(keep=keep)
        for batch in batches:
            found.update(*sides(batch, values))
        return found

    whole, parts = compared(range(BATCHES)), [compared(part) for part in cut(places)]
    for part, batches in zip(parts, cut(places), strict=True):
        part.expect(Fraction(BATCHES, len(batches)))
    sent = [pickle.dumps(part) for part in parts]
    assert all(part.metrics().percentiles_exact == (keep >= 960) for part in parts)
    assert max(map(len, sent)) < 20_000  # not half a million buckets
    merged, expected = bracketed(map(pickle.loads, sent), brackets).metrics(), whole.metrics()
    assert merged.percentiles_exact == (keep >= 960)
    assert [merged.p50, merged.p90, merged.p99] == [expected.p50, expected.p90, expected.p99]
    check_same(merged.as_dict(), expected.as_dict())


def test_every_shard_knows_how_much_longer_the_stream_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Fraction] = []
    monkeypatch.setattr(Measuring, "expect", lambda measuring, times: told.append(times))
    few = ("calibration", 1, 16, 1)
    measure_all("tiny-mamba", modes=["fp16"], data=("evaluation", 6, 16, 2), calibration_data=few, shard_size=4)
    assert told == [Fraction(6, 4), Fraction(6, 2)]


def collected(batches: range) -> Collected:
    found = Collected()
    for batch in batches:
        x = sides(batch, OUTPUT_KINDS["values"])[1]
        statistics, amax = measure(x, module="m")
        outliers = find_outliers("m", amax[0], torch.arange(5).numpy(), threshold=2.0, sample=batch)
        bands = measure_bands(x, module="m")
        gaps = {("m", "input"): f"batch {batch}"}
        found.merge(Collected({("m", "output"): statistics}, {"m": outliers}, {"m": bands}, {}, gaps, {"m"}))
    return found


@given(places=SHARDS, brackets=BRACKETS)
def test_collected_shards_are_the_whole(places: list[int], brackets: list[int]) -> None:
    whole = collected(range(BATCHES))
    found = bracketed((pickle.loads(pickle.dumps(collected(part))) for part in cut(places)), brackets)
    mine, all_of_it = (one.statistics["m", "output"] for one in (found, whole))
    check_same(mine.figures(), all_of_it.figures())
    for table in ("buckets", "row_buckets", "block_buckets", "depths", "median_depths"):
        assert (getattr(mine, table).whole() == getattr(all_of_it, table).whole()).all()
    assert found.outliers == whole.outliers
    assert (found.bands["m"].counts == whole.bands["m"].counts).all()
    assert found.gaps == whole.gaps == {("m", "input"): "batch 0"}
