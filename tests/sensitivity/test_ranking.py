"""The ranking of layers and sites: its definition, its notes and its mistakes."""

from typing import Any

import pytest
import torch
from torch import nn

from probe.engines.local import LocalEngine
from probe.metrics import LogitComparison
from probe.models.loading import Loaded
from probe.running.calibration import Calibration
from probe.running.declarations import DeclaredMode
from probe.running.measurement import NotAppliedError
from probe.running.modes import register_mode, unregister_mode
from probe.running.recipes import Recipe, apply
from probe.sensitivity import rank_layers, ranking
from tests.running.declared import declared
from tests.sensitivity.models import Hidden, Stack, batches_of, random_batch


def test_the_definition_is_a_model_with_one_block_of_the_other(mamba: tuple[Loaded, Calibration]) -> None:
    """Against blocks swapped by hand and the figures of a LogitComparison: nothing of ours but the twins."""
    loaded, calibration = mamba
    recipe, batches = Recipe("2-1", "int8"), batches_of(loaded)
    found = rank_layers(loaded.model, recipe, batches, calibration, advice=False)
    with torch.no_grad():
        for index in (0, 2):
            for side, (first, second) in {
                "alone": (Recipe("fp32"), recipe),
                "without": (recipe, Recipe("fp32")),
            }.items():
                shell: Any = apply(loaded.model, first, calibration if first.format else None)
                other: Any = apply(loaded.model, second, calibration if second.format else None)
                shell.backbone.layers[index] = other.backbone.layers[index]
                reference: Any = apply(loaded.model, Recipe("fp32"))
                compared, squares, count = LogitComparison(), 0.0, 0
                for batch in batches:
                    logits, expected = (m(batch, use_cache=False).logits[:, :-1] for m in (shell, reference))
                    compared.update(logits, expected, batch[:, 1:])
                    squares += float((logits - expected).double().square().sum())
                    count += logits.numel()
                figures = getattr(found.effects[index], side)
                assert figures.kl == pytest.approx(compared.metrics().kl, rel=1e-6)
                assert figures.mse == pytest.approx(squares / count, rel=1e-6), "at the same positions"


def test_the_model_is_left_as_it_was(mamba: tuple[Loaded, Calibration]) -> None:
    from probe.models.loading import weight_fingerprint

    loaded, calibration = mamba
    before = [name for name, _ in loaded.model.named_modules()]
    rank_layers(loaded.model, Recipe("2-1", "int8"), batches_of(loaded, 1, 16), calibration, advice=False)
    assert [name for name, _ in loaded.model.named_modules()] == before
    assert weight_fingerprint(loaded.model) == loaded.fingerprint
    assert not any("forward" in vars(module) for module in loaded.model.modules())


def test_layers_that_cannot_be_exchanged_are_an_error_and_not_a_ranking_of_zeros() -> None:
    batches = [torch.arange(12).reshape(2, 6)]
    assert rank_layers(Stack("named"), Recipe("linear_wa", "fp4_e2m1"), batches, advice=False).effects
    with pytest.raises(ValueError, match=r"quantized alone, none of these \d \(.*\) changes a bit of the output"):
        rank_layers(Hidden(), Recipe("linear_wa", "fp4_e2m1"), batches, advice=False)


def test_layers_that_the_recipe_does_not_change_are_an_error_and_not_a_ranking_of_zeros() -> None:
    batches = [torch.arange(12).reshape(2, 6)]
    for how in ("named", "twice"):  # layers that run twice cannot be restarted, but are checked all the same
        with pytest.raises(NotAppliedError, match=r"linear_wa-fp4_e2m1 was not applied to embedding: .*1 of 1 layers"):
            rank_layers(Stack(how), Recipe("linear_wa", "fp4_e2m1"), batches, layers=("embedding",), advice=False)
        assert rank_layers(Stack(how), Recipe("linear_wa", "fp4_e2m1"), batches, advice=False).effects


def test_a_users_mode_is_ranked_if_it_declares_what_it_leaves_float() -> None:
    def first_only(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
        from probe.numerics.quantize import fake_quantize

        changed: Any = model
        changed.layers[0].up.weight.data = fake_quantize(changed.layers[0].up.weight.data, format)
        return model

    batches, model = [random_batch()], Stack("plain").eval()
    register_mode("first_only", first_only)
    try:
        with pytest.raises(NotAppliedError, match=r"first_only-fp4_e2m1 was not applied to layer_1, layer_2: "):
            rank_layers(model, Recipe("first_only", "fp4_e2m1"), batches)
        unregister_mode("first_only")
        register_mode("first_only", first_only, keep_float=["layers.[12]"])
        found = rank_layers(model, Recipe("first_only", "fp4_e2m1"), batches)
        assert found.notes == ("2 of 3 change no bit of the output when quantized alone: layer_1, layer_2.",)
        assert found.by_loss()[0].name == "layer_0"
        assert found.advice.keep == ("layer_0",)
        assert found.advice.declared == DeclaredMode("first_only", ("layers.[12]", "layers.0"))
        with pytest.raises(ValueError, match="builds its model by itself, so its sites are not known"):
            rank_layers(model, Recipe("first_only", "fp4_e2m1"), batches, sites="across")
    finally:
        unregister_mode("first_only")


@pytest.mark.parametrize("sites", [None, "across", "within"])
@pytest.mark.parametrize("which", ["mamba", "llama"])
def test_the_declared_mode_has_the_kl_that_the_advice_measured(
    which: str, sites: Any, request: pytest.FixtureRequest
) -> None:
    """The advice as a mode of its own, run from the start: nothing of it is lost on the way."""
    loaded, calibration = request.getfixturevalue(which)
    batches = batches_of(loaded, 2, 24)
    recipe = Recipe("2-1" if which == "mamba" else "linear_wa", "fp4_e2m1")
    advice = rank_layers(loaded.model, recipe, batches, calibration, sites=sites).advice
    assert advice.declared is not None
    with declared(advice.declared.base, *advice.declared.keep_float) as name:
        twins = apply(loaded.model, Recipe("fp32")), apply(loaded.model, Recipe(name, "fp4_e2m1"), calibration)
        kept = LogitComparison()
        with torch.no_grad():
            for batch in batches:
                expected, found = (model(batch, use_cache=False).logits[:, :-1] for model in twins)
                kept.update(found, expected, batch[:, 1:])
    assert kept.metrics().kl == pytest.approx(advice.loss_kept, rel=1e-6)


def test_progress_ends_at_the_whole_of_the_work(llama: tuple[Loaded, Calibration]) -> None:
    loaded, calibration = llama
    reports: list[tuple[int, int, str]] = []
    rank_layers(
        loaded.model,
        Recipe("linear_w", "int8"),
        batches_of(loaded),
        calibration,
        progress=lambda *one: reports.append(one),
        advice=False,
    )
    assert [done for done, _, _ in reports] == sorted(done for done, _, _ in reports)
    assert reports[-1] == (2 * 28, 2 * 28, "layer_3 without")


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"recipe": Recipe("bf16")}, "mode bf16 is a float mode: no layer of it is on a grid"),
    ({"batches": []}, "there is nothing to run: not one batch was given"),
    ({"batches": [torch.zeros(1, 1, dtype=torch.int64)]}, "a batch has sequences of one token"),
    ({"sites": "all"}, "sites is 'all'. Give 'across', 'within'"),
    ({"together": 0}, "together is 0; expected 1 or more"),
    ({"threads": 0}, "threads is 0; expected 1 or more"),
    ({"layers": [9]}, "layer 9 matches none"),
    ({"sites": "within", "layers": ["norm_f"]}, "there is no site in backbone.norm_f"),
    ({"recipe": Recipe("2-1", "int8"), "calibration": None}, "needs calibrated scales"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[message[:30] for _, message in MISTAKES])
def test_mistakes_are_one_message(mamba: tuple[Loaded, Calibration], change: dict[str, Any], message: str) -> None:
    loaded, calibration = mamba
    given: dict[str, Any] = {
        "recipe": Recipe("2-1", "fp8_e4m3"),
        "batches": batches_of(loaded, 1, 8),
        "calibration": calibration,
    }
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        rank_layers(loaded.model, **(given | change))


def test_workers_use_the_device_by_the_name_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that was named cuda is cuda:0 here, and on a node perhaps another one."""
    jobs: list[Any] = []

    class Listening(LocalEngine):
        def run(self, job: Any, *arguments: Any, **options: Any) -> Any:
            jobs.append(job)
            return super().run(job, *arguments, **options)

    monkeypatch.setattr(ranking, "device_of", lambda model: "cuda:0")
    few: dict[str, Any] = {"data": ("evaluation", 1, 16, 1), "advice": False, "engine": Listening()}
    ranking.rank_model("tiny-llama", format="fp8_e4m3", **few)
    assert {job.device for job in jobs} == {"cpu"}
