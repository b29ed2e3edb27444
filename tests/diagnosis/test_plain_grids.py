"""Plain grids equal the real ones, and every fault that they can replay is recognized."""

import pytest
import torch
from torch import Tensor

from probe.diagnosis.explanations import explain
from probe.diagnosis.linear_steps import grid_step
from probe.diagnosis.plain_grids import PlainGrid, suspects
from probe.formats import FORMATS, GATE_FORMATS
from probe.numerics.corners import corner_values
from probe.numerics.grids import activation_grid, sequence_grid, weight_on_grid
from tests.diagnosis.grids import AMAX, expected_grid

FORMAT = pytest.mark.parametrize("format", GATE_FORMATS)


@FORMAT
def test_a_plain_grid_is_the_grid_of_an_activation(activation: Tensor, format: str) -> None:
    assert torch.equal(expected_grid(format)(activation), activation_grid(format, AMAX)(activation))


@FORMAT
def test_a_plain_grid_is_the_grid_of_a_weight(activation: Tensor, format: str) -> None:
    assert torch.equal(PlainGrid(FORMATS[format])(activation[0]), weight_on_grid(activation[0], format))


@FORMAT
def test_a_tensor_of_zeros_stays_one(format: str) -> None:
    assert torch.equal(PlainGrid(FORMATS[format])(torch.zeros(2, 40)), weight_on_grid(torch.zeros(2, 40), format))


@FORMAT
def test_a_plain_grid_is_the_grid_of_a_sequence(activation: Tensor, format: str) -> None:
    plain = PlainGrid(FORMATS[format], AMAX if format == "nvfp4" else None, per_sequence=True)
    assert torch.equal(plain(activation), sequence_grid(format, AMAX)(activation))


@FORMAT
def test_a_plain_grid_is_right_at_the_corners(format: str) -> None:
    for given in corner_values(FORMATS[format], 72, amax=expected_grid(format).amax):
        assert torch.equal(expected_grid(format)(given), activation_grid(format, AMAX)(given))


@FORMAT
def test_a_nan_spoils_as_much_in_a_plain_grid_as_in_a_real_one(activation: Tensor, format: str) -> None:
    x = activation.clone()
    x[0, 3, 40] = torch.nan
    assert torch.equal(expected_grid(format)(x).isnan(), activation_grid(format, AMAX)(x).isnan())


@FORMAT
def test_every_fault_that_can_be_replayed_is_recognized(activation: Tensor, format: str) -> None:
    """Two faults that give the very same values are told both; where more do, nothing is."""
    grid = expected_grid(format)
    replays = dict(suspects(grid, activation, largest=5.0))
    assert len(replays) >= 15
    values = {sentence: faulty(activation) for sentence, faulty in replays.items()}
    recognized = set()
    for sentence, made in values.items():
        if torch.equal(made, grid(activation)):
            continue
        alike = [other for other, same in values.items() if torch.equal(same, made)]
        explanation = explain(grid_step("site", grid, activation, made, largest=5.0)).partition(" (mean")[0]
        if len(alike) > 2:
            assert "no known cause" in explanation, (sentence, explanation)
        else:
            assert set(explanation.split(", or ")) <= set(alike), (sentence, explanation)
            recognized.add(sentence)
    assert "rounding looks like floor, not nearest" in recognized
