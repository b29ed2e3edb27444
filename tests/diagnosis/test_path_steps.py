"""On a healthy path every step agrees with its definition and no module departs, so that nothing is said of it."""

import pytest
import torch
from torch import nn

from probe.data.samples import TextSamples
from probe.diagnosis.path_steps import diagnose_path
from probe.models.loading import load_model
from probe.models.positions import position_limit
from probe.running.calibration import Calibration, calibrate_on
from probe.running.modes import find_mode
from probe.running.paths import paths_of
from probe.running.recipes import Recipe
from probe.running.reference import Reference, run_reference
from probe.running.traces import LayerTrace
from probe.words import PATHS

ROWS, SEQLEN = 2, 24
RECIPES = [
    *(("tiny-mamba", "0", format) for format in ("int8", "fp4_e2m1")),
    *(("tiny-mamba", "2-1", format) for format in ("int8", "fp8_e4m3", "nvfp4", "mxint8")),
    *(("tiny-mamba", "3", format) for format in ("int8", "fp8_e4m3", "nvfp4")),
    *(("tiny-llama", "linear_wa", format) for format in ("int8", "fp8_e4m3", "nvfp4")),
    ("tiny-llama", "linear_w", "fp4_e2m1"),
]
Prepared = dict[str, tuple[nn.Module, Reference, Calibration]]


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    found = {}
    for model in ("tiny-mamba", "tiny-llama"):
        loaded = load_model(model)
        batches = TextSamples("evaluation", ROWS, SEQLEN, ROWS).batches(loaded.tokenizer)
        reference, calibration = run_reference(loaded.model, batches), calibrate_on(loaded, "calibration", 2, 64)
        found[model] = loaded.model, reference, calibration
    return found


@pytest.mark.parametrize(("model", "mode", "format"), RECIPES)
def test_nothing_is_said_of_a_healthy_path(prepared: Prepared, model: str, mode: str, format: str) -> None:
    loaded, reference, calibration = prepared[model]
    recipe = Recipe(mode, format)
    shares = find_mode(recipe.mode).conv_input == "dynamic"
    paths = paths_of(ROWS, SEQLEN, limit=position_limit(loaded), whole_rows=shares)
    own = calibration if recipe.needs_calibration else None
    assert set(paths) == set(PATHS)
    for path in paths.values():
        departed = None if model == "tiny-mamba" else path.places[path.places < SEQLEN]
        for label in ("layer_0", "layer_3"):
            trace = LayerTrace(loaded, recipe, reference, own, label)
            assert diagnose_path(trace, path, departed) == "", path.name


def test_a_diagnosis_of_a_path_never_raises(prepared: Prepared) -> None:
    _, reference, _ = prepared["tiny-llama"]
    path = paths_of(ROWS, SEQLEN)["decode"]
    broken = LayerTrace(nn.Linear(2, 2), Recipe("linear_w", "int8"), reference, None, "layer_0")
    assert diagnose_path(broken, path, torch.tensor([3])).startswith("no known cause: ")
