"""Activations and the plain grid that a format should put them on."""

from probe.diagnosis.plain_grids import PlainGrid
from probe.formats import FORMATS

AMAX = 3.7


def expected_grid(format: str) -> PlainGrid:
    return PlainGrid(FORMATS[format], AMAX if FORMATS[format].needs_calibration else None)
