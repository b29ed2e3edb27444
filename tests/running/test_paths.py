"""Paths: which tokens they have, which models can run them, and what they feed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probe.models.loading import load_model
from probe.running.capture import UncoveredError
from probe.running.paths import PADDING, Path, keeps_prefill, paths_of, run_path, support
from probe.running.recipes import Recipe
from probe.running.reference import Reference, run_reference
from probe.words import PATHS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.linear(x)
        return x + added


class Network(nn.Module):
    """A model that takes tokens only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 256)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Masked(Network):
    """One that claims to take a mask and a cache, and fails with either."""

    def forward(
        self, tokens: Tensor, attention_mask: Any = None, past_key_values: Any = None, use_cache: bool = False
    ) -> Any:
        if attention_mask is not None or use_cache:
            raise RuntimeError("neither mask nor cache is implemented")
        return super().forward(tokens)


def tokens_of(*shape: int) -> Tensor:
    return torch.arange(int(torch.tensor(shape).prod())).reshape(shape) % 250


@pytest.fixture(scope="module")
def reference() -> Reference:
    return run_reference(Network(), [tokens_of(3, 20)])


def test_the_paths_of_the_default_text() -> None:
    paths = paths_of(8, 256)
    assert tuple(sorted(paths)) == tuple(sorted(PATHS))
    assert [call.shape[1] for call in paths["decode"].calls] == [40] + [1] * 8
    assert paths["ragged"].calls[0].shape == (1, 285)
    assert [int(row.lt(0).sum()) for row in paths["padded"].calls[0]] == [PADDING, PADDING]
    assert paths["padded"].calls[0][0, 0] == paths["padded"].calls[0][1, -1] == -1


def test_tokens_are_related_to_the_prefill_where_it_has_the_same_ones_before_them() -> None:
    paths = paths_of(2, 64)
    assert all(bool(paths[name].is_related.all()) for name in ("decode", "batch_1", "padded"))
    assert paths["ragged"].is_related.tolist() == [True] * 64 + [False] * 29
    late = Path("late", 64, (torch.arange(1, 9)[None],), (torch.zeros(1, 8),), ("", ""))
    assert not bool(late.is_related.any())


@pytest.mark.parametrize("seqlen", [2, 16, 32, 64, 256])
@pytest.mark.parametrize("limit", [None, 16, 64, 256])
def test_a_ragged_length_is_no_multiple_of_a_chunk_and_within_the_positions(seqlen: int, limit: int | None) -> None:
    length = paths_of(4, seqlen, limit=limit)["ragged"].calls[0].shape[1]
    assert length % 16
    assert limit is None or length <= limit


def test_whole_rows_are_those_with_every_token_of_a_row() -> None:
    assert paths_of(2, 256, whole_rows=True)["batch_1"].has_whole_rows
    assert not any(path.has_whole_rows for path in paths_of(2, 256).values())


def test_a_model_of_tokens_runs_what_needs_neither_cache_nor_mask() -> None:
    reasons = support(Network(), 2, 16, ["all"])
    assert reasons == {
        "decode": "Network.forward takes no cache",
        "batch_1": "",
        "ragged": "",
        "padded": "Network.forward takes no attention_mask",
    }


def test_a_model_that_fails_on_a_path_is_believed_only_after_a_trial() -> None:
    reasons = support(Masked(), 2, 16, ["all"])
    assert "neither mask nor cache" in reasons["decode"]
    assert "neither mask nor cache" in reasons["padded"]
    assert reasons["batch_1"] == reasons["ragged"] == ""


def test_too_little_text_is_a_reason() -> None:
    assert support(load_model("tiny-mamba").model, 1, 2, ["all"])["padded"] == "1 x 2 tokens are too few"


@pytest.mark.parametrize("model", ["tiny-mamba", "tiny-llama"])
def test_the_embedded_models_run_every_path(model: str) -> None:
    assert set(support(load_model(model).model, 8, 256, ["all"]).values()) == {""}


def test_layers_are_fed_the_inputs_of_the_reference(reference: Reference) -> None:
    network = Network()
    for path in (paths_of(3, 20)["ragged"], paths_of(3, 20)["batch_1"]):
        made = run_path(network, path, reference)
        fed = torch.cat([one.flatten(0, 1) for one in reference.tensors["layer_1.input"]])[path.places].float()
        assert torch.equal(made["layer_1"], network.layers[1](fed).detach())


def test_hooks_do_not_outlive_a_path(reference: Reference) -> None:
    network = Network()
    run_path(network, paths_of(3, 20)["batch_1"], reference)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_a_layer_that_does_not_run_is_uncovered(reference: Reference) -> None:
    network = Network()
    network.layers[1].forward = network.layers[0].forward
    network.forward = lambda tokens: network.head(network.layers[0](network.embedding(tokens)))  # type: ignore[method-assign]
    with pytest.raises(UncoveredError, match="layer_1 ran 0 times in the 1 forwards of batch_1"):
        run_path(network, paths_of(3, 20)["batch_1"], reference)


MODULES = {f"layer_{n}": f"backbone.layers.{n}" for n in range(4)}


@pytest.mark.parametrize(
    ("mode", "format", "path", "keeps"),
    [
        ("2-1", "fp8_e4m3", "decode", True),
        ("2-1", "int8", "decode", False),  # the state has a grid
        ("2-1", "int8", "ragged", True),
        ("3", "fp8_e4m3", "decode", False),  # one scale for a sequence
        ("3", "fp8_e4m3", "ragged", False),
        ("3", "fp8_e4m3", "batch_1", True),  # a whole row
        ("linear_wa", "int8", "decode", True),
        ("bf16", None, "decode", True),
    ],
)
def test_where_a_path_must_equal_the_prefill(mode: str, format: str | None, path: str, keeps: bool) -> None:
    model = load_model("tiny-mamba").model
    found = keeps_prefill(model, Recipe(mode, format), paths_of(2, 256, whole_rows=mode == "3")[path], MODULES)
    assert found == dict.fromkeys(MODULES, keeps)
