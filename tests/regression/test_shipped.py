"""The baselines that come with the project: small, complete, and of the models that come with it."""

from pathlib import Path

import pytest

from probe.gate.baselines.store import Store
from probe.models.loading import load_model
from tests.gate.baselines.examples import MAX_BYTES_PER_CASE, size_per_case

ROOT = Path(__file__).parents[2] / "baselines"
MODELS = ("tiny-mamba", "tiny-llama")


def test_the_default_set_is_below_one_and_a_half_megabytes() -> None:
    """Anchors in each of the eleven modes instead of one file for a model would take 1 MB more."""
    assert sum(file.stat().st_size for file in ROOT.rglob("*") if file.is_file()) < 1_500_000


@pytest.mark.parametrize("model", MODELS)
def test_a_case_takes_at_most_2_kb(model: str) -> None:
    sizes = size_per_case(Store(ROOT), model)
    assert max(sizes.values()) <= MAX_BYTES_PER_CASE


@pytest.mark.parametrize("model", MODELS)
def test_they_are_of_the_models_that_come_with_it(model: str) -> None:
    facts = Store(ROOT).environment(model)
    assert facts is not None
    assert facts["input.model"] == load_model(model).fingerprint


def test_no_other_model_has_baselines() -> None:
    assert Store(ROOT).models() == sorted(MODELS)
