"""Embedding, final norm and head: cases of their own, in which any change of the quantized copy is seen."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from probe.gate.bench import Bench
from probe.gate.cases import Outcome
from probe.gate.configuration import Settings
from probe.models.loading import load_model
from probe.models.outside import outside_modules
from probe.running.noise import refined
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference, replay, run_reference, running_once
from probe.words import LOGITS, OUTSIDE, PATHS, flow_key
from tests.faults.bench import SmallGate, settings_of

LLAMA, MAMBA = ("tiny-llama", "linear_wa-int8"), ("tiny-mamba", "mode_2_1-fp8_e4m3")
BOTH = pytest.mark.parametrize("run", [LLAMA, MAMBA], ids=lambda run: run[0])
Damage = Callable[[Any, str], None]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> SmallGate:
    made = SmallGate(
        tmp_path_factory.mktemp("outside"), {model: settings_of(model, [one]) for model, one in (LLAMA, MAMBA)}
    )
    for model, recipe in (LLAMA, MAMBA):
        made.make_baselines(model, [recipe])
    return made


@contextmanager
def damaged(damage: Damage, label: str) -> Iterator[None]:
    """While the block runs, the module of a label is damaged in every quantized copy."""

    def apply_badly(model: nn.Module, recipe: Recipe, *rest: Any) -> nn.Module:
        twin = apply(model, recipe, *rest)
        damage(twin, outside_modules(model)[label])
        return twin

    with (
        mock.patch("probe.gate.observations.apply", apply_badly),
        mock.patch("probe.running.traces.apply", apply_badly),
    ):
        yield


def forward_with(change: Callable[[nn.Module, Callable[..., Tensor], Tensor], Tensor]) -> Damage:
    def damage(twin: Any, name: str) -> None:
        module = twin.get_submodule(name)
        plain = module.forward
        module.forward = lambda x: change(module, plain, x)

    return damage


def in_bf16(module: Any, plain: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x.bfloat16(), module.weight.bfloat16()).float()


def other_eps(twin: Any, name: str) -> None:
    twin.get_submodule(name).variance_epsilon = 1e-3


def other_weight(twin: Any, name: str) -> None:
    """One gain of a norm, one element of a matrix; not those of a module that shares it."""
    module = twin.get_submodule(name)
    module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    module.weight.data.view(-1)[7] *= 1 + 2.0**-20


def used_row(twin: Any, name: str) -> None:
    module = twin.get_submodule(name)
    module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    module.weight.data[ord("e"), 3] += 1e-6


FAULTS: list[tuple[str, str, Damage]] = [
    ("head computed in bf16", "head", forward_with(in_bf16)),
    ("input of the head rounded to bf16", "head", forward_with(lambda m, plain, x: plain(x.bfloat16().float()))),
    ("input of the head rounded to fp16", "head", forward_with(lambda m, plain, x: plain(x.half().float()))),
    ("one element of the head one ulp off", "head", other_weight),
    ("input of the norm rounded to bf16", "norm", forward_with(lambda m, plain, x: plain(x.bfloat16().float()))),
    ("eps of the norm 1e-3", "norm", other_eps),
    ("one gain of the norm", "norm", other_weight),
    ("one row of the embedding", "embedding", used_row),
    ("a sample evaluated twice", "embedding", forward_with(lambda m, plain, x: plain(x[[0, *range(len(x) - 1)]]))),
]


def failing(outcomes: dict[str, Outcome]) -> list[str]:
    found = [label for label, one in outcomes.items() if one.status == "failed"]
    return sorted(found, key=flow_key)


@BOTH
def test_every_recipe_has_them_between_its_layers_and_the_logits_and_they_pass(
    gate: SmallGate, run: tuple[str, str]
) -> None:
    outcomes = gate.judge(*run)
    labels = [label for label in outcomes if label in (*OUTSIDE, LOGITS)]
    assert labels == [*OUTSIDE, LOGITS]
    assert not failing(outcomes)
    for label in OUTSIDE:
        figures = outcomes[label].figures
        assert figures["outside.mse"].new == 0
        assert figures["outside.max_abs"].new == 0
        assert figures["outside.distance"].new == 0


@BOTH
@pytest.mark.parametrize(("label", "damage"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_change_fails_in_its_own_case(gate: SmallGate, run: tuple[str, str], label: str, damage: Damage) -> None:
    with damaged(damage, label):
        outcomes = gate.judge(*run)
    found = failing(outcomes)
    assert found[0] == label
    assert not {*OUTSIDE, *(f"layer_{n}" for n in range(4) if outcomes[f"layer_{n}"].is_own)} & {*found[1:]}
    assert outcomes[label].verdict == "not float"
    assert outcomes[label].is_own


@BOTH
def test_an_unused_row_of_the_embedding_fails_by_its_digest(gate: SmallGate, run: tuple[str, str]) -> None:
    def unused(twin: Any, name: str) -> None:
        module = twin.get_submodule(name)
        module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
        module.weight.data[255, 3] += 1e-6

    with damaged(unused, "embedding"):
        outcomes = gate.judge(*run)
    assert failing(outcomes) == ["embedding"]
    assert "weights.changed" in [name for name, figure in outcomes["embedding"].figures.items() if figure.moved]


# ------------------------------------------------------------------------------------------- which modules there are


class Bare(nn.Module):
    """Layers and a head that the model states; the norm is where norms are, the embedding is not stated."""

    def __init__(self, *, head: str = "called", embeddings: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(300, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.ln_f = nn.LayerNorm(8)
        self.out = nn.Linear(8, 300)
        self.kind, self.embeddings = head, embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.out

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = sum((self.words(tokens) for _ in range(self.embeddings)), torch.zeros(()))
        for layer in self.layers:
            x = layer(x)
        x = self.ln_f(x)
        if self.kind == "broken":
            raise RuntimeError("no forward")
        return self.out(x) if self.kind == "called" else nn.functional.linear(x, self.out.weight)


TOKENS = torch.arange(24).view(2, 12)


def test_a_users_model_has_those_that_it_runs_once() -> None:
    every = {"embedding": "words", "norm": "ln_f", "head": "out"}
    assert outside_modules(Bare()) == every
    assert running_once(Bare(), every, TOKENS) == every
    assert list(running_once(Bare(head="read"), every, TOKENS)) == ["embedding", "norm"]
    assert list(running_once(Bare(embeddings=2), every, TOKENS)) == ["norm", "head"]
    assert running_once(Bare(head="broken"), every, TOKENS) == every  # whoever runs it says why
    assert outside_modules(nn.Sequential(nn.Linear(2, 2))) == {}


@pytest.mark.parametrize("name", ["tiny-mamba", "tiny-llama"])
def test_the_embedded_models_have_all_three_though_the_head_is_the_embedding(name: str) -> None:
    model: Any = load_model(name).model
    assert list(outside_modules(model)) == list(OUTSIDE)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_layer_that_was_selected_by_the_name_of_such_a_module_has_a_case_beside_it() -> None:
    bench = Bench(Settings(model="tiny-llama", layers=("lm_head", "1"), modes=("linear_w",), formats=("int8",)))
    assert bench.labels_on("cpu") == ("layer_1", "lm_head", *OUTSIDE, *PATHS, LOGITS)
    assert bench.labels_on("recorded:somewhere") == ("layer_1", "lm_head", LOGITS)
    batches = [TOKENS]
    reference = run_reference(bench.loaded.model, batches, ("lm_head", "1"), outside=bench.outside)
    twin, taken = apply(bench.loaded.model, Recipe("fp32")), {}

    def take(label: str, output: Tensor, expected: Tensor) -> None:
        taken[label] = torch.equal(output, expected)

    replay(twin, reference, take, injected=True)
    assert taken == dict.fromkeys(("layer_1", "lm_head", *OUTSIDE), True)


# ---------------------------------------------------------------------------------------------------- what they are fed


def test_norm_and_head_are_fed_values_of_more_bits_than_bfloat16_that_every_machine_makes_alike() -> None:
    values = torch.tensor([[1.0, -2.5, 0.0], [3e-38, torch.inf, 1e30]]).bfloat16()
    whole = refined([values])[0]
    parts = torch.cat(refined([values[:1], values[1:]]))
    assert torch.equal(whole, parts)  # whatever the batches
    assert torch.equal(whole.bfloat16(), values)
    assert (whole != values.float()).tolist() == [[False, True, False], [True, False, True]]  # the first fill is 0
    many = refined([torch.ones(100_000).bfloat16()])[0]
    assert len(set(many.tolist())) == 2**15
    assert (many < 1 + 2.0**-8).all()


def test_outside_modules_cost_no_forward_of_their_own() -> None:
    model, forwards = Bare(), 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    reference = run_reference(model, [TOKENS], outside=outside_modules(model))
    twin = copy.deepcopy(model)
    twin.register_forward_hook(count)
    replay(twin, reference, lambda *_: None, injected=True)
    assert forwards == 1
    assert not any(label in reference.layers for label in OUTSIDE)


def test_a_copy_without_its_norm_leaves_that_case_uncovered_and_measures_the_others() -> None:
    model = Bare()
    reference: Reference = run_reference(model, [TOKENS], outside=outside_modules(model))
    twin: Any = copy.deepcopy(model)
    twin.ln_f = nn.Sequential()
    del twin.ln_f
    twin.ln_f = lambda x: x
    taken: list[str] = []
    with pytest.raises(ValueError, match="has no module ln_f"):
        replay(twin, reference, lambda label, *_: taken.append(label), injected=True)
    assert taken == ["embedding", "layer_0", "layer_1", "head"]
