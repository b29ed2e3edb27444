import math
from pathlib import Path

import numpy as np
import pytest
import torch

from probe.comparisons import samples, selection as sides
from probe.comparisons.selection import Side
from tests.comparisons.recorded import recorded


def pair(tmp_path: Path, output: torch.Tensor, reference: torch.Tensor) -> tuple[Side, Side]:
    ids = [torch.zeros(output.shape[:2], dtype=torch.int64)]
    tensors = {"0-int8": {"layer_0.output": output}, "fp32": {"layer_0.output": reference}}
    recording = recorded(tmp_path / "r", tensors, batches=ids)
    return Side(recording, "mode_0-int8"), Side(recording, "fp32")


def test_a_sample_is_of_the_same_places_on_both_sides_and_of_all_features(tmp_path: Path) -> None:
    x = torch.arange(4 * 50 * 16, dtype=torch.float32).reshape(4, 50, 16)
    found = samples.sample_pairs("layer_0", *pair(tmp_path, x + 0.5, x), most=300)
    assert (found.difference == 0.5).all()
    assert 150 <= len(found.output) <= 300
    assert {int(value) % 16 for value in found.reference} == set(range(16))


def test_what_is_not_finite_is_left_out_of_a_sample_and_counted(tmp_path: Path) -> None:
    x = torch.ones(1, 4, 4)
    y = x.clone()
    y[0, 1, 2], x[0, 3, 3] = math.nan, math.inf
    found = samples.sample_pairs("layer_0", *pair(tmp_path, y, x))
    assert (len(found.output), found.left_out) == (14, 2)


@pytest.mark.parametrize(("rows", "columns"), [(6, 8), (3, 4), (4, 3), (100, 100)])
def test_a_map_is_the_mean_over_samples_and_neighbours(tmp_path: Path, rows: int, columns: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 6, 8, generator=g) for _ in range(2))
    found = samples.error_map("layer_0", *pair(tmp_path, y, x), rows=rows, columns=columns)
    error = (y.double() - x.double()).abs().mean(0).numpy()
    tokens, features = (np.array_split(np.arange(n), min(n, m)) for n, m in ((6, rows), (8, columns)))
    assert found.shape == (len(tokens), len(features))
    assert found.mean() == pytest.approx(error.mean(), rel=0.1)
    if (6 % rows, 8 % columns) == (0, 0):
        wanted = [[error[np.ix_(t, f)].mean() for f in features] for t in tokens]
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_cell_that_is_not_finite_is_nan(tmp_path: Path) -> None:
    y = torch.zeros(2, 6, 8)
    y[1, 2, 3] = math.inf
    found = samples.error_map("layer_0", *pair(tmp_path, y, torch.zeros(2, 6, 8)))
    assert np.argwhere(np.isnan(found)).tolist() == [[2, 3]]


def test_a_histogram_is_numpys_over_all_bands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "BAND", 11)
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0] = math.nan
    side, _ = pair(tmp_path, x, x)
    good = x[x.isfinite()].double().numpy()
    counts, edges = samples.histogram("layer_0", side, float(good.min()), float(good.max()), bins=9)
    wanted, wanted_edges = np.histogram(good, bins=9)
    assert counts.tolist() == wanted.tolist()
    np.testing.assert_allclose(edges, wanted_edges)


def test_first_values_and_features_are_those_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "VALUES", 5)
    monkeypatch.setattr(samples, "FEATURES", 3)
    x = torch.arange(2 * 6 * 8, dtype=torch.float32).reshape(2, 6, 8)
    side, _ = pair(tmp_path, x, x)
    drawn = samples.drawn_layer("layer_0", side, 0.0, 95.0)
    assert drawn.first_values.tolist() == [0, 1, 2, 3, 4]
    assert drawn.features.tolist() == x[0, :, :3].tolist()


def test_modes_share_the_axis_of_their_histograms_unless_one_is_far_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 40, 16)
    noise = torch.randn(2, 40, 16)
    sides = {name: pair(tmp_path / name, x + size * noise, x) for name, size in (("a", 0.1), ("b", 0.2), ("c", 0.3))}
    shared = samples.drawn_tensors("layer_0", sides)
    assert len({float(one.differences.edges[-1]) for one in shared.values() if one.differences}) == 1
    sides["d"] = pair(tmp_path / "d", x + 1000 * noise, x)
    apart = samples.drawn_tensors("layer_0", sides)
    assert len({float(one.differences.edges[-1]) for one in apart.values() if one.differences}) == 4
    for one in apart.values():
        assert one.differences is not None
        assert one.differences.counts.sum() + one.differences.beyond == len(one.pairs.output)
        assert one.differences.mean == pytest.approx(one.pairs.difference.mean())
        assert one.scale is not None
        assert one.scale[0] < one.scale[1]


def test_of_equal_tensors_there_is_neither_a_histogram_nor_a_scale(tmp_path: Path) -> None:
    x = torch.randn(2, 6, 8)
    drawn = samples.drawn_tensors("layer_0", {"a": pair(tmp_path, x, x.clone())})["a"]
    assert (drawn.differences, drawn.scale) == (None, None)
    assert (drawn.errors == 0).all()


def test_a_layer_is_drawn_without_the_values_that_are_not_finite(tmp_path: Path) -> None:
    x = torch.arange(48, dtype=torch.float32).reshape(1, 6, 8)
    x[0, 0, 1] = math.nan
    drawn = samples.drawn_layer("layer_0", pair(tmp_path, x, x)[0], 0.0, 47.0)
    assert drawn.counts.sum() == 47
    assert drawn.feature_scale is not None
    assert 0 <= drawn.feature_scale[0] < drawn.feature_scale[1] <= 47
    lost = torch.full((1, 6, 8), math.nan)
    assert samples.drawn_layer("layer_0", pair(tmp_path / "b", lost, lost)[0], None, None).feature_scale is None
