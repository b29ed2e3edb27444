"""Paths in the gate: the relation of every recipe to its prefill, golden values, verdicts and causes."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from probe.data.samples import TextSamples
from probe.data.tokenizers import ByteTokenizer
from probe.formats import GATE_FORMATS
from probe.gate.cases import Case, Figure, Outcome
from probe.gate.golden_values import HALF, flat, parted, sketch_of
from probe.gate.measured_layers import Observation
from probe.gate.observations import observe
from probe.gate.path_causes import token_profile
from probe.gate.path_figures import CLOSE, PrefillRows, path_figures
from probe.gate.tolerances import RULES, is_of_values, rule_of
from probe.models.loading import Loaded, load_model, weight_fingerprint
from probe.models.positions import position_limit
from probe.running.calibration import Calibration, calibrate_on
from probe.running.kept_float import float_layers
from probe.running.modes import find_mode, register_mode, unregister_mode
from probe.running.paths import Path, keeps_prefill, paths_of
from probe.running.recipes import Recipe, recipes_of
from probe.running.reference import Reference, run_reference
from probe.words import PATHS
from tests.models.random_models import make_bamba, make_mamba2, make_zamba

ROWS, SEQLEN = 2, 24
FAMILIES: dict[str, Callable[[], nn.Module]] = {"mamba2": make_mamba2, "bamba": make_bamba, "zamba": make_zamba}
RECIPES = [
    *(("tiny-mamba", str(recipe)) for recipe in recipes_of(["all", "fp16", "bf16"], GATE_FORMATS)),
    *(("tiny-llama", str(recipe)) for recipe in recipes_of(["linear_w", "linear_wa"], GATE_FORMATS)),
    *((family, str(recipe)) for family in FAMILIES for recipe in recipes_of(["2-1", "3"], ["int8", "nvfp4"])),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prepared() -> dict[str, tuple[nn.Module, Reference, Calibration]]:
    found = {}
    for model in ("tiny-mamba", "tiny-llama", *FAMILIES):
        loaded = _random(model) if model in FAMILIES else load_model(model)
        batches = TextSamples("evaluation", ROWS, SEQLEN, ROWS).batches(loaded.tokenizer)
        found[model] = loaded.model, run_reference(loaded.model, batches), calibrate_on(loaded, "calibration", 2, 64)
    return found


def _random(family: str) -> Loaded:
    model = FAMILIES[family]().requires_grad_(False)
    return Loaded(family, model, ByteTokenizer(), weight_fingerprint(model))


@pytest.mark.parametrize(("model", "name"), RECIPES, ids=[f"{model}-{name}" for model, name in RECIPES])
def test_every_path_keeps_to_the_prefill_as_the_recipe_must(
    prepared: dict[str, tuple[nn.Module, Reference, Calibration]], model: str, name: str
) -> None:
    mode, _, format = name.partition("-")
    recipe, (loaded, reference, calibration) = Recipe(mode, format or None), prepared[model]
    left = float_layers(loaded, find_mode(recipe.mode), reference.modules)
    shares = find_mode(recipe.mode).conv_input == "dynamic"
    paths = paths_of(ROWS, SEQLEN, limit=position_limit(loaded), whole_rows=shares)
    found = observe(
        loaded, recipe, reference, calibration if recipe.needs_calibration else None, paths=list(paths.values())
    )
    assert set(paths) == set(PATHS)
    for path in PATHS:
        assert found[path].flaws == ()
        keeps = keeps_prefill(loaded, recipe, paths[path], reference.modules)
        for label in reference.layers:
            relation = found[path].figures[f"relation.{label}"]
            assert relation is not None
            if format and keeps[label]:
                assert relation <= CLOSE[0] / 5
            if format == "int8" and mode.startswith("mode") and path == "decode" and label not in left:
                assert relation > CLOSE[0]  # the grid of the state shows, so the figure sees differences


def test_a_users_mode_has_no_bound() -> None:
    register_mode("own", lambda model, format, calibration: model)
    try:
        found = keeps_prefill(
            load_model("tiny-mamba").model, Recipe("own", "int8"), paths_of(2, 24)["decode"], {"a": "b"}
        )
    finally:
        unregister_mode("own")
    assert found == {"a": None}


def judged(path: Path, change: Tensor) -> list[str]:
    """What is wrong with a path whose typical error is 1, after `change` was added by token."""
    _, seen = failed(path, change)
    assert seen.path is not None
    return [text for _, text in seen.path.wrong]


def failed(path: Path, change: Tensor) -> tuple[Outcome, Observation]:
    torch.manual_seed(0)
    prefill = PrefillRows(["layer_0"], path.rows)
    whole = torch.randn(path.rows, path.seqlen, 16)
    prefill.take("layer_0", whole)
    output = whole.flatten(0, 1)[path.places] + change[:, None]
    found = path_figures(path, {"layer_0": output}, prefill, {"layer_0": 1.0}, {"layer_0": CLOSE}, {})
    seen = Observation(dict(found.figures), found.values, found.counts, units=found.units, path=found)
    case = Case("mode_0", path.name, "cpu", "int8")
    figures = {name: Figure(value, moved=True) for name, value in found.figures.items()}
    return Outcome("tiny-mamba", case, "failed", "drift", figures=figures), seen


def decoded(path: Path, sizes: list[float]) -> Tensor:
    """A change of the decoded tokens, step by step, in both rows."""
    change = torch.zeros(len(path.places))
    change[path.half == 1] = torch.tensor(sizes).repeat_interleave(2)
    return change


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([0.8] * 8, "from token 32 on: 0.3"),
        ([0.0] + [0.5] * 7, "from token 33 on: 0."),
        ([0.0, 0.0, 3.0, 0.0, 0.0, 3.0, 0.0, 0.0], "in 4 tokens from 34 to 37: 0."),
        ([0.0] * 7 + [4.0], "at token 39 alone: 0."),
    ],
)
def test_the_message_names_layer_tokens_and_size(sizes: list[float], words: str) -> None:
    path = paths_of(2, 64)["decode"]
    (wrong,) = judged(path, decoded(path, sizes))
    assert wrong.startswith(f"decode of layer_0 differs from the prefill {words}")


def test_the_profile_has_the_worst_row_of_every_token_counted_as_in_the_message() -> None:
    path = paths_of(2, 64)["decode"]
    change = decoded(path, [0.1 * n for n in range(8)])
    change[-1] *= 3  # the second row of the last token
    outcome, seen = failed(path, change)
    profile = token_profile(outcome, seen)
    assert list(profile.tokens) == list(range(40))
    expected = [0.0] * 33 + [0.1 * n for n in range(1, 7)] + [2.1]
    assert list(profile.relations) == ["layer_0"]
    assert list(profile.relations["layer_0"]) == pytest.approx(expected, rel=1e-5)


def test_a_path_of_one_long_row_has_a_profile_of_the_tokens_that_the_prefill_has() -> None:
    path = paths_of(2, 64)["ragged"]
    outcome, seen = failed(path, torch.full((len(path.places),), 0.5))
    profile = token_profile(outcome, seen)
    assert list(profile.tokens) == list(range(64)), "beyond its first row there is no prefill of the same tokens"
    assert token_profile(outcome, Observation({}, {}, {})).tokens == ()


def test_a_few_codes_that_sums_flip_are_no_difference() -> None:
    path = paths_of(2, 64)["batch_1"]
    change = torch.zeros(len(path.places))
    change[[3, 30]] = 0.5
    assert judged(path, change) == []


def test_nan_is_not_finite_and_names_its_token() -> None:
    path = paths_of(2, 64)["batch_1"]
    change = torch.zeros(len(path.places))
    change[7] = torch.nan
    assert judged(path, change) == ["batch_1 of layer_0 has NaN or Inf, first at token 7."]


def test_golden_values_keep_the_halves_of_a_path_apart() -> None:
    rows, half = torch.randn(40, 16), (torch.arange(40) >= 30).long()
    changed = rows.clone()
    changed[35] += 1
    old, new = sketch_of(rows, half), sketch_of(changed, half)
    assert old[:HALF] == new[:HALF]
    assert old[HALF:] != new[HALF:]


def test_the_values_of_deep_models_come_in_the_order_of_their_layers() -> None:
    values = {f"distance.layer_{n}": tuple(float(n) for _ in range(2 * HALF)) for n in (10, 2, 0)}
    row = flat(values)
    assert row[0] == 0.0
    assert row[-1] == 10.0
    assert parted(row, values) == values


def test_figures_of_layers_have_the_rule_of_their_group() -> None:
    assert rule_of("relation.layer_7", RULES) is RULES["relation.*"]
    assert is_of_values("distance.layer_7")
    assert not is_of_values("relation.layer_7")
