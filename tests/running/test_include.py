"""`include`: routers, embedding and head on a grid if asked for; names that cannot be are one message."""

import re
from typing import Any

import pytest
import torch

from probe.data.library_logs import quietly
from probe.models.linear import linear_key
from probe.models.loading import Loaded, load_model, weight_fingerprint
from probe.running.calibration import Calibration, calibrate
from probe.running.measurement_job import measure_all
from probe.running.recipes import Recipe, apply, check_recipes, recipes_of
from probe.running.weights import Count, count_weights
from tests.models.random_models import make_gpt2, make_mixtral
from tests.running.declared import declared

TOKENS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))
TINY: dict[str, Any] = {"data": ("evaluation", 2, 16, 2), "calibration_data": ("calibration", 2, 16, 2)}


def scales_of(model: Any) -> Calibration:
    with quietly():
        return calibrate(model, [TOKENS], model_fingerprint=weight_fingerprint(model), data_fingerprint="-")


@pytest.mark.parametrize("format", ["int8", "fp4_e2m1", "nvfp4"])
def test_a_tied_head_on_the_grid_leaves_the_embedding_as_it_is(format: str) -> None:
    model: Any = make_gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    scales = scales_of(model)
    twins: dict[tuple[str, ...], Any] = {
        include: apply(model, Recipe("linear_wa", format, include=include), scales)
        for include in ((), ("head",), ("embedding",), ("embedding", "head"))
    }
    for include, twin in twins.items():
        tables = {"embedding": twin.transformer.wte.weight, "head": twin.lm_head.weight}
        for part, table in tables.items():
            assert torch.equal(table, model.lm_head.weight) == (part not in include), (include, part)
    both = twins["embedding", "head"]
    assert torch.equal(both.lm_head.weight, both.transformer.wte.weight)
    with torch.no_grad():
        outputs = [twin(TOKENS).logits for twin in twins.values()]
    assert all(not torch.equal(one, other) for place, one in enumerate(outputs) for other in outputs[:place])


@pytest.mark.parametrize(
    ("include", "line"),
    [
        ((), "embedding 16,384 float, norms 160 float, biases 736 float, head tied to the embedding"),
        (("head",), "embedding 16,384 float, norms 160 float, biases 736 float, untied head 8,192 on a grid"),
        (
            ("embedding",),
            "embedding 8,192 on a grid and 8,192 float, norms 160 float, biases 736 float, untied head 8,192",
        ),
    ],
)
def test_the_line_says_that_a_tied_head_was_untied(include: tuple[str, ...], line: str) -> None:
    model, recipe = make_gpt2(), Recipe("linear_w", "fp8_e4m3", include=include)
    found = count_weights(model, apply(model, recipe), recipe)
    assert line in found.line
    assert found.tied == (not include)


def test_the_input_of_a_router_is_calibrated_and_on_the_grid() -> None:
    model: Any = make_mixtral()
    scales = scales_of(model)
    recipe = Recipe("linear_wa", "int8", include=("router", "head"))
    twin: Any = apply(model, recipe, scales)
    name, seen = "model.layers.1.mlp.gate", []
    twin.get_submodule(f"{name}.input").register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad(), quietly():
        assert not torch.equal(twin(TOKENS).logits, apply(model, Recipe("linear_wa", "int8"), scales)(TOKENS).logits)
    codes = seen[0].double() / (scales.amax_of(linear_key(name)) / 127)
    assert float((codes - codes.round()).abs().max()) < 1e-3
    assert scales.amax_of("linear lm_head.input") > 0
    found = count_weights(model, twin, recipe)
    assert found.floating == 0
    assert found.apart["head"] == Count(8192, 0)
    assert found.apart["embedding"] == Count(0, 8192)


def test_a_part_that_is_included_and_kept_float_stays_float() -> None:
    model: Any = make_mixtral()
    with declared("linear_w", "layers.1.mlp.gate") as name:
        recipe = Recipe(name, "fp4_e2m1", include=("router",))
        twin: Any = apply(model, recipe)
        line = count_weights(model, twin, recipe).line
    assert "96 in model.layers.1.mlp.gate.weight (routers, kept float)" in line
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    same = [torch.equal(*(side.get_submodule(one).weight for side in (model, twin))) for one in routers]
    assert same == [False, True]


def test_a_recipe_has_its_include_in_one_order() -> None:
    one, other = (
        Recipe("linear_w", "int8", include=parts) for parts in (("head", "router"), ("router", "head", "head"))
    )
    assert one == other
    assert one.include == ("router", "head")
    assert one != Recipe("linear_w", "int8")
    assert [str(one.include) for one in recipes_of(["fp16", "linear_w"], ["int8"], ["head"])] == ["()", "('head',)"]


@pytest.mark.parametrize(
    ("modes", "include", "message"),
    [
        (["linear_w"], ["heads"], "unknown part for include 'heads'. Did you mean 'head'?"),
        (["2-1", "fp16"], ["head"], "include is head, and none of the modes 2-1, fp16 takes it: it is for linear_w"),
        (["linear_w"], ["router"], "include has 'router', and tiny-llama has no router. Of router, embedding, head it"),
        (["linear_w"], ["router"], " it has: embedding, head."),
    ],
)
def test_an_include_that_cannot_be_is_one_message(modes: list[str], include: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        measure_all("tiny-llama", modes=modes, formats=["int8"], include=include, **TINY)


def test_the_default_modes_of_a_mamba_take_no_include() -> None:
    with pytest.raises(ValueError, match=r"none of the modes 0, 2-0, .* takes it"):
        measure_all("tiny-mamba", formats=["int8"], include=["head"], **TINY)


def test_a_head_that_no_linear_mode_knows_is_refused(llama: Loaded) -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.ones(256, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.table.T

    odd: Any = load_model("tiny-llama")
    odd.model.lm_head = Head()
    message = (
        "include has 'head', and lm_head, the head of tiny-llama, is a Head, whose weight linear modes do not know."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check_recipes(odd, [Recipe("linear_w", "int8", include=("head",))])


def test_the_figures_have_the_include_with_them() -> None:
    plain, with_head = (
        measure_all("tiny-llama", modes=["linear_w"], formats=["fp4_e2m1"], include=include, **TINY)[0]
        for include in ([], ["head"])
    )
    assert (plain.as_dict()["include"], with_head.as_dict()["include"]) == ([], ["head"])
    assert plain.layers == with_head.layers, "the head comes after all layers"
    assert plain.output != with_head.output
