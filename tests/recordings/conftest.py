"""Fixtures of the tests of recordings."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.models.loading import Loaded, load_model
from probe.running.calibration import Calibration, calibrate_on
from probe.running.recipes import Recipe
from probe.running.reference import Reference, run_reference
from tests.recordings.examples import RECIPES, Parts, run, write, write_small


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """No waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model("tiny-mamba")


@pytest.fixture(scope="module")
def calibration(loaded: Loaded) -> Calibration:
    return calibrate_on(loaded, "calibration", 2, 32)


@pytest.fixture(scope="module")
def batches(loaded: Loaded) -> list[Tensor]:
    return token_batches(text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=2)


@pytest.fixture(scope="module")
def reference(loaded: Loaded, batches: list[Tensor]) -> Reference:
    return run_reference(loaded.model, batches)


@pytest.fixture(scope="module")
def parts(loaded: Loaded, batches: list[Tensor], calibration: Calibration) -> dict[Recipe, Parts]:
    return {recipe: run(loaded, recipe, batches, calibration) for recipe in RECIPES}


@pytest.fixture(scope="module")
def stored(
    tmp_path_factory: pytest.TempPathFactory, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts]
) -> Path:
    """A recording of all recipes, not to be changed."""
    return write(tmp_path_factory.mktemp("stored") / "trn1", loaded, batches, parts).folder


@pytest.fixture
def folder(tmp_path: Path, tiny: Path) -> Path:
    """A copy of the small recording, to be changed."""
    return Path(shutil.copytree(tiny, tmp_path / "small"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recipes of made-up numbers: 3 samples of 4 tokens."""
    return write_small(tmp_path_factory.mktemp("tiny") / "small").folder


@pytest.fixture(scope="module")
def ids() -> list[Tensor]:
    return [torch.arange(12).view(2, 6), torch.arange(6).view(1, 6)]
