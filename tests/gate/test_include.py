"""The gate with a head and an embedding on the grid: judged as such, and never compared with figures without them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from probe.gate.baselines.format import BaselineError
from probe.gate.bench import Bench
from probe.gate.configuration import Settings, settings_of
from probe.recordings.recorder import record
from probe.running.recipes import Recipe, apply
from probe.settings import ConfigurationError
from tests.faults.bench import SmallGate, settings_of as small

MODEL, RECIPE = "tiny-llama", "linear_wa-fp8_e4m3"
PARTS = ("embedding", "head")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> SmallGate:
    settings = replace(small(MODEL, [RECIPE]), include=PARTS)
    made = SmallGate(tmp_path_factory.mktemp("include"), {MODEL: settings})
    made.make_baselines(MODEL, [RECIPE])
    return made


@contextmanager
def damaged(damage: Any) -> Iterator[None]:
    def apply_badly(model: nn.Module, recipe: Recipe, *rest: Any) -> nn.Module:
        twin = apply(model, recipe, *rest)
        with torch.no_grad():
            damage(model, twin)
        return twin

    with (
        mock.patch("probe.gate.observations.apply", apply_badly),
        mock.patch("probe.running.traces.apply", apply_badly),
    ):
        yield


def test_a_healthy_run_passes_and_the_figures_say_what_was_included(gate: SmallGate) -> None:
    outcomes = gate.judge_healthy(MODEL, RECIPE)
    assert not [label for label, outcome in outcomes.items() if outcome.verdict]
    bench = Bench(gate.settings[MODEL], root=gate.root)
    assert bench.stored("cpu")[0].environment["input.include"] == "embedding, head"
    assert {"weights.weight", "corners.input"} <= set(bench.stored("cpu")[0].entries[outcomes["head"].case].digests)


def float_head(model: Any, twin: Any) -> None:
    twin.lm_head = model.lm_head


def float_embedding(model: Any, twin: Any) -> None:
    twin.model.embed_tokens = model.model.embed_tokens


@pytest.mark.parametrize(("part", "damage"), [("head", float_head), ("embedding", float_embedding)])
def test_a_part_that_is_left_float_is_not_applied(gate: SmallGate, part: str, damage: Any) -> None:
    with damaged(damage):
        outcome = gate.judge(MODEL, RECIPE)[part]
    assert outcome.verdict == "not applied"
    assert f"was not applied to the {part}" in outcome.message


def one_code(model: Any, twin: Any) -> None:
    twin.lm_head.weight[3, 5] *= 2


def transposed_blocks(model: Any, twin: Any) -> None:
    from probe.numerics.quantize import fake_quantize

    plain = model.lm_head.weight
    twin.lm_head.weight.copy_(fake_quantize(plain, "fp8_e4m3", axis=0))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (one_code, "head; weight weight; one value, at [3, 5]"),
        (transposed_blocks, "head; weight weight; "),
    ],
)
def test_a_wrong_weight_of_the_head_is_found_and_named(gate: SmallGate, damage: Any, cause: str) -> None:
    with damaged(damage):
        outcomes = gate.judge(MODEL, RECIPE)
    assert outcomes["head"].verdict
    assert outcomes["head"].cause.startswith(cause)
    assert not outcomes["layer_0"].verdict


@pytest.mark.parametrize(
    ("include", "told"),
    [((), "input.include embedding, head -> none"), (("head",), "input.include embedding, head -> head")],
)
def test_another_include_is_another_input(gate: SmallGate, include: tuple[str, ...], told: str) -> None:
    settings = gate.settings[MODEL]
    gate.settings[MODEL] = replace(settings, include=include)
    try:
        with pytest.raises(BaselineError, match=re.escape(f"made with another input: {told}. Restore the old input")):
            gate.judge(MODEL, RECIPE, shared=False)
    finally:
        gate.settings[MODEL] = settings


def test_an_include_is_another_input_than_baselines_without_one_know() -> None:
    settings = Settings(model=MODEL, modes=("linear_w", "fp16"), formats=("int8",), include=("head",))
    bench = Bench(settings)
    stored = {name: fact for name, fact in bench.input_facts.items() if name != "input.include"}
    with mock.patch.object(Bench, "environment", return_value=stored):
        told = {case.mode: bench.other_input(case) for case in bench.cases}
    assert told == {"linear_w": "input.include none -> head", "fp16": ""}, "float modes do not depend on it"


def test_a_recording_with_another_include_is_refused(gate: SmallGate, tmp_path: Path) -> None:
    bench = Bench(gate.settings[MODEL], root=gate.root)
    mine: dict[str, Any] = {"model": MODEL, "batches": bench.inputs.batches, "layers": ["all"], "taps": ["logits"]}
    mine |= {"modes": ["linear_wa"], "formats": ["fp8_e4m3"]}
    found = {include: record(tmp_path / str(len(include)), **mine, include=include) for include in ((), PARTS)}
    assert [one.manifest.recipes[RECIPE].include for one in found.values()] == [(), PARTS]
    observed = bench.observe(bench.recipe("linear_wa", "fp8_e4m3"), f"recorded:{found[PARTS].folder}")
    assert not any(one.flaws for one in observed.values())
    message = f"{RECIPE} was recorded with include nothing, and the settings include embedding, head"
    with pytest.raises(ValueError, match=re.escape(message)):
        bench.observe(bench.recipe("linear_wa", "fp8_e4m3"), f"recorded:{found[()].folder}")


def test_settings_with_an_unknown_part_are_refused() -> None:
    assert settings_of({"include": "head"}, where="here").include == ("head",)
    with pytest.raises(ConfigurationError, match=r"include: unknown part of a model 'heads'\. Did you mean 'head'"):
        settings_of({"include": ["heads"]}, where="here")


def test_modes_that_take_no_include_and_a_model_without_the_part_are_refused() -> None:
    with pytest.raises(ValueError, match=r"include is head, and none of the modes fp16 takes it"):
        _ = Bench(Settings(model=MODEL, modes=("fp16",), include=("head",))).recipes
    with pytest.raises(ValueError, match=r"include has 'router', and tiny-llama has no router"):
        _ = Bench(Settings(model=MODEL, modes=("linear_w",), include=("router",))).recipes
