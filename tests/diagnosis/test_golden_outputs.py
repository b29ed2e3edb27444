"""A user's mode is known by its outputs only: each fault is read from the stored output, and nothing more is said."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.diagnosis.causes import diagnose
from probe.models.loading import Loaded, load_model
from probe.numerics.grids import weight_on_grid
from probe.numerics.sketches import SAMPLE, places_of, sketched
from probe.running.calibration import Calibration
from probe.running.modes import register_mode, unregister_mode
from probe.running.recipes import Recipe
from probe.running.reference import Reference, run_reference
from probe.running.traces import LayerTrace

Change = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model("tiny-mamba")


@pytest.fixture(scope="module")
def reference(loaded: Loaded) -> Reference:
    batches = token_batches(text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=48, batch_size=2)
    return run_reference(loaded.model, batches)


class Linear(nn.Module):
    """A linear layer that computes in another dtype."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = weight, dtype

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.dtype), self.weight.to(self.dtype)).float()


def build(
    added: Change | None, whole: Change | None, dtype: torch.dtype | None, factor: float | None
) -> Callable[..., nn.Module]:
    """A mode that rounds the weights of every block; the changes hit what block 1 adds, and what it gives."""

    def made(model: Any, format: str, calibration: Calibration | None) -> nn.Module:
        with torch.no_grad():
            for block in model.backbone.layers:
                for name in ("in_proj", "x_proj", "out_proj"):
                    weight = block.mixer.get_submodule(name).weight
                    weight.copy_(weight_on_grid(weight, format))
        block = model.backbone.layers[1]
        if added is not None:
            block.mixer.register_forward_hook(lambda module, args, output: added(output.clone()))
        if whole is not None:
            block.register_forward_hook(lambda module, args, output: whole(output.clone()))
        if dtype is not None:
            block.mixer.in_proj = Linear(block.mixer.in_proj.weight, dtype)
        if factor is not None:
            block.norm.register_forward_hook(lambda module, args, output: factor * output)
        return model  # type: ignore[no-any-return]

    return made


@pytest.fixture
def cause_of(loaded: Loaded, reference: Reference) -> Iterator[Callable[..., str]]:
    """What is said of a user's mode with some changes, after one without them was stored."""
    changes: list[Any] = [None, None, None, None]
    register_mode("theirs", lambda *args: build(*changes)(*args))

    def find(
        added: Change | None = None,
        whole: Change | None = None,
        dtype: torch.dtype | None = None,
        factor: float | None = None,
    ) -> str:
        stored = stored_values(LayerTrace(loaded.model, Recipe("theirs", "int8"), reference, None, "layer_1"))
        changes[:] = [added, whole, dtype, factor]
        return diagnose(LayerTrace(loaded.model, Recipe("theirs", "int8"), reference, None, "layer_1"), (), stored)

    yield find
    unregister_mode("theirs")


def stored_values(trace: LayerTrace) -> tuple[float, ...]:
    flat = torch.cat([x.output.double() for x in trace.batches() if x.output is not None]).reshape(-1).numpy()
    values = np.concatenate([sketched(flat), flat[places_of(flat.size, SAMPLE)]]).astype(np.float32)
    return tuple(float(x) for x in values)


def at(place: Any, change: Change) -> Change:
    def changed(x: Tensor) -> Tensor:
        x[place] = change(x[place])
        return x

    return changed


def swapped(axis: int, one: int, other: int) -> Change:
    def change(x: Tensor) -> Tensor:
        order = torch.arange(x.shape[axis])
        order[[one, other]] = order[[other, one]]
        return x.index_select(axis, order)

    return change


def noise(size: float, seed: int) -> Change:
    return lambda x: x * (1 + size * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))


CHANNEL, TOKEN = (..., 17), (slice(None), 9)


@pytest.mark.parametrize(
    ("added", "whole", "sentence"),
    [
        (lambda x: 1.01 * x, None, "what it adds is 1.01 times the stored one"),
        (lambda x: 0.9999 * x, None, "what it adds is 0.9999 times the stored one"),
        (None, lambda x: 1.01 * x, "its output is 1.01 times the stored one"),
        (lambda x: -x, None, "what it adds has the other sign"),
        (lambda x: x + 0.1, None, "a constant, +0.1, is added to every value"),
        (torch.zeros_like, None, "it returns its input: the layer is skipped"),
        (None, torch.zeros_like, "gives only zeros"),
        (at(CHANNEL, lambda x: 1.5 * x), None, "what it adds to channel 17 is 1.5 times the stored one"),
        (None, at(CHANNEL, lambda x: 1.5 * x), "channel 17 is 1.5 times the stored one"),
        (at(CHANNEL, lambda x: x + 1), None, "a constant, +1, is added to channel 17"),
        (None, at(CHANNEL, torch.zeros_like), "only channel 17 is zero"),
        (at(CHANNEL, torch.zeros_like), None, "only channel 17 is returned as it came in"),
        (at(CHANNEL, noise(5.0, 1)), None, "only channel 17 has changed"),
        (at(TOKEN, lambda x: 2 * x), None, "what it adds to token 9 is 2 times the stored one"),
        (at(TOKEN, torch.zeros_like), None, "only token 9 is returned as it came in"),
        (at((slice(None), slice(40, None)), torch.zeros_like), None, "only the tokens from 40 on are returned as they"),
        (None, lambda x: torch.cat([x[:1]] * len(x)), "sequence 1 is a copy of sequence 0"),
        (swapped(2, 3, 17), None, "channels 3 and 17 are swapped"),
        (None, swapped(2, 3, 17), "layer_1; channels 3 and 17 are swapped"),
        (None, swapped(1, 3, 17), "tokens 3 and 17 are swapped"),
        (None, lambda x: x.flip(1), "tokens are in reverse order"),
        (None, lambda x: x.roll(32, 2), "channels are permuted: shifted by 32"),
        (None, lambda x: x.roll(1, 1), "it is one token late"),
        (lambda x: x.roll(-1, 1), None, "what it adds: it is one token early"),
        (None, lambda x: x.bfloat16().float(), "its output is rounded to bfloat16"),
        (None, lambda x: x.half().float(), "its output is rounded to float16"),
        (lambda x: x.bfloat16().float(), None, "what it adds is rounded to bfloat16"),
        (None, lambda x: x.clamp(-1, 1), "values beyond +-1 are cut there"),
        (lambda x: x.clamp(-0.3, 0.3), None, "what it adds beyond +-0.3 is cut there"),
        (None, None, "alone it gives its stored output"),
    ],
)
def test_a_fault_of_a_users_mode_is_named(
    cause_of: Callable[..., str], added: Change | None, whole: Change | None, sentence: str
) -> None:
    cause = cause_of(added, whole)
    assert sentence in cause
    assert cause.startswith("layer_1; ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_in_a_narrower_float_is_named(cause_of: Callable[..., str], dtype: torch.dtype) -> None:
    assert cause_of(None, None, dtype) == f"layer_1; computed in {str(dtype).removeprefix('torch.')}"


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1])
def test_a_factor_inside_of_a_layer_is_named_with_its_module(cause_of: Callable[..., str], factor: float) -> None:
    """Of a module whose output reaches that of the layer through functions that are not linear."""
    cause = cause_of(factor=factor)
    assert cause == f"layer_1; as if the output of norm were {factor:.3g} times that of the stored run"


def test_the_search_inside_of_a_layer_runs_it_a_bounded_number_of_times(
    cause_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, whole = [0], [0]
    plain, batches = LayerTrace.outputs, LayerTrace.batches

    def outputs(trace: LayerTrace) -> Any:
        runs[0] += 1
        return plain(trace)

    def counted(trace: LayerTrace) -> Any:
        whole[0] += 1
        return batches(trace)

    monkeypatch.setattr(LayerTrace, "outputs", outputs)
    monkeypatch.setattr(LayerTrace, "batches", counted)
    assert "no known cause" in cause_of(noise(0.5, 3))
    parts = 3  # norm, mixer and out_proj have outputs of the shape of the layer's
    assert runs[0] <= 1 + 2 * parts + 2 * (8 + 2 + 12 + 1)
    assert whole[0] < 16, "the search runs the layer alone, not the model"


@pytest.mark.parametrize("size", [1e-3, 0.03, 0.5])
@pytest.mark.parametrize("seed", range(2))
def test_a_change_of_no_known_kind_is_not_explained(cause_of: Callable[..., str], size: float, seed: int) -> None:
    assert cause_of(noise(size, seed), None).startswith("layer_1; no known cause: its output moved by ")


@pytest.mark.parametrize(
    "look_alike",
    [
        lambda x: x * torch.linspace(1.0, 1.02, x.shape[-1]),  # a factor for each channel, not one
        lambda x: x * torch.linspace(0.98, 1.02, x.shape[1])[:, None],
        lambda x: x + 0.1 * torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(1)),  # not one constant
        lambda x: x.tanh(),  # not a clip
        lambda x: 0.5 * (x + x.roll(1, 1)),  # not a shift
        lambda x: torch.where(x.abs() < 0.01, torch.zeros_like(x), x),
    ],
    ids=["channel factors", "token factors", "bias vector", "tanh", "blurred", "dead zone"],
)
def test_a_look_alike_is_not_named_for_what_it_resembles(cause_of: Callable[..., str], look_alike: Change) -> None:
    assert "no known cause" in cause_of(look_alike, None)
