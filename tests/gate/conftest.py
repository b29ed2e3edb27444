"""Fixtures of the tests of the gate: a recorded model, as in the tests of recordings."""

from tests.recordings.conftest import batches, calibration, loaded, parts, reference, stored

__all__ = ["batches", "calibration", "loaded", "parts", "reference", "stored"]
