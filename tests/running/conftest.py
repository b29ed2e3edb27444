"""The two embedded models with a little text and a calibration each, shared by the tests of running."""

import pytest
from torch import Tensor

from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.models.loading import Loaded, load_model
from probe.running.calibration import Calibration, calibrate_on


@pytest.fixture(scope="session")
def loaded() -> Loaded:
    return load_model("tiny-mamba")


@pytest.fixture(scope="session")
def tokens(loaded: Loaded) -> Tensor:
    return token_batches(text_of("evaluation"), loaded.tokenizer, samples=2, seqlen=64, batch_size=2)[0]


@pytest.fixture(scope="session")
def calibration(loaded: Loaded) -> Calibration:
    return calibrate_on(loaded, "calibration", 4, 128)


@pytest.fixture(scope="session")
def llama() -> Loaded:
    return load_model("tiny-llama")
