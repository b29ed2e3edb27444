"""Golden values: they do not depend on batches, they see every element, and they measure how far values moved."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from probe.gate.golden_values import KEPT, MOVED, POINTS, Golden, flat, gap, parted, with_golden
from probe.numerics.sketches import SAMPLE, SKETCH, places_of

COUNT = 5000
G = torch.Generator().manual_seed(0)
X = torch.randn(COUNT, generator=G)


def golden(x: torch.Tensor, *cuts: int) -> Golden:
    made = Golden(x.numel())
    for part in torch.tensor_split(x, cuts):
        made.update(part, part)
    return made


@given(st.lists(st.integers(0, COUNT), max_size=4).map(sorted))
def test_values_do_not_depend_on_how_the_stream_was_cut(cuts: list[int]) -> None:
    whole, parts = golden(X), golden(X, *cuts)
    assert np.array_equal(whole.sample, parts.sample)
    assert np.allclose(whole.sketch, parts.sketch, rtol=0, atol=1e-9)
    assert whole.points() == parts.points()


@given(st.integers(0, COUNT - 1))
def test_no_element_escapes_the_sketch(place: int) -> None:
    other = X.clone()
    other[place] += 0.5
    between = gap(golden(other).values(), golden(X).values(), count=COUNT, rmse=1.0)
    assert between.distance == pytest.approx(0.5 / COUNT**0.5, rel=1e-3)


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0])
def test_the_distance_is_the_rms_of_the_difference_in_units_of_the_error(size: float) -> None:
    other = X + size * torch.randn(COUNT, generator=G)
    between = gap(golden(other).values(), golden(X).values(), count=COUNT, rmse=2.0)
    assert between.distance == pytest.approx(size / 2.0, rel=4 * (2 / SKETCH) ** 0.5)  # four standard deviations


def test_the_estimate_is_unbiased() -> None:
    estimates = []
    for seed in range(40):
        moved = torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))
        estimates.append(gap(golden(X + moved).values(), golden(X).values(), count=COUNT, rmse=1.0).distance ** 2)
    assert np.mean(estimates) == pytest.approx(1.0, abs=4 * (2 / SKETCH / 40) ** 0.5)


def test_an_element_has_moved_beyond_a_part_of_the_error() -> None:
    values = np.array(golden(X).values())
    for step, share in ((0.9 * MOVED, 0.0), (1.1 * MOVED, 1.0)):
        other = (*values[:SKETCH], *(values[SKETCH:] + step))
        assert gap(other, tuple(values), count=COUNT, rmse=1.0).moved == share


def test_the_sample_is_spread_over_the_stream() -> None:
    places = places_of(COUNT, SAMPLE)
    assert np.array_equal(places * SAMPLE // COUNT, np.arange(SAMPLE))
    assert places_of(3, 10).max() == 2


def test_a_row_is_parted_as_it_was_made_and_another_length_is_refused() -> None:
    groups = {name: tuple(range(length)) for name, length in KEPT.items() if name != "logits"}
    row = flat(groups)
    assert parted(row, set(groups)) == groups
    with pytest.raises(ValueError, match=f"{len(row) - 1} golden values, expected {len(row)}"):
        parted(row[1:], set(groups))


def test_more_elements_than_announced_are_refused() -> None:
    with pytest.raises(ValueError, match="more than the 3 elements"):
        Golden(3).update(torch.zeros(4), torch.zeros(4))


def test_points_are_elements_of_both_tensors_and_their_indices_say_which() -> None:
    output, reference = torch.randn(6, 10, 50, generator=G), torch.randn(6, 10, 50, generator=G)
    made = Golden(output.numel())
    for rows in (slice(0, 2), slice(2, 6)):
        made.update(output[rows], reference[rows])
    points = made.points()
    assert len(points.output) == POINTS + SAMPLE
    for number, (x, y) in enumerate(zip(points.reference, points.output, strict=True)):
        index = points.index(number)
        assert (x, y) == (reference[index].item(), output[index].item())
    assert len({points.index(number) for number in range(POINTS)}) == POINTS


def test_points_of_outputs_of_any_number_of_axes_have_an_index() -> None:
    flat_output, image = torch.randn(COUNT), torch.randn(8, 3, 5, 7)
    for output in (flat_output, image):
        made = Golden(output.numel())
        made.update(output, output)
        points = made.points()
        assert all(output[points.index(n)].item() == x for n, x in enumerate(points.output))


def test_the_golden_values_of_points_are_those_of_the_sample() -> None:
    made, before = golden(X), golden(X + 1)
    points = with_golden(made.points(), before.values())
    assert [now - then for now, then in zip(points.output[POINTS:], points.golden[POINTS:], strict=True)] == (
        pytest.approx([-1.0] * SAMPLE, rel=1e-5)
    )
    assert all(np.isnan(points.golden[:POINTS]))
    for nothing in (None, before.values()[:SKETCH]):
        assert len(with_golden(made.points(), nothing).golden) == 0
