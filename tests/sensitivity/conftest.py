"""Two embedded models with a small calibration, shared by the tests of a file."""

import pytest

from probe.models.loading import Loaded, load_model
from probe.running.calibration import Calibration, calibrate_on


@pytest.fixture(scope="module")
def mamba() -> tuple[Loaded, Calibration]:
    loaded = load_model("tiny-mamba")
    return loaded, calibrate_on(loaded, "calibration", 2, 64)


@pytest.fixture(scope="module")
def llama() -> tuple[Loaded, Calibration]:
    loaded = load_model("tiny-llama")
    return loaded, calibrate_on(loaded, "calibration", 2, 64)
