"""What models are given: text, pictures, sounds, noise, and what a user's function returns."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probe.data.calls import Call, as_call, input_fingerprint
from probe.data.samples import TextSamples
from probe.data.tokenizers import ByteTokenizer, NoTokenizer
from probe.models.loading import Loaded
from probe.running.inputs import calibrating, check_samples, input_batches
from probe.running.reference import run_reference
from probe.running.reference_files import load_reference, save_reference


class Reads(nn.Module):
    """A model of which only the name of its main argument and its configuration matter."""

    def __init__(self, main_input_name: str, **config: Any) -> None:
        super().__init__()
        self.main_input_name = main_input_name
        self.config = type("Config", (), config)()


def loaded(model: nn.Module, **more: Any) -> Loaded:
    return Loaded("model", model, ByteTokenizer(), "0" * 16, **more)


def functions(monkeypatch: pytest.MonkeyPatch, **found: Callable[[], Any]) -> None:
    module = ModuleType("own_inputs")
    vars(module).update(found)
    monkeypatch.setitem(sys.modules, "own_inputs", module)


def test_text_is_tokens_and_an_encoder_decoder_gets_it_as_targets_too() -> None:
    wanted = TextSamples("evaluation", 3, 8, 2)
    plain = input_batches(loaded(nn.Identity()), wanted)
    assert [tuple(batch.shape) for batch in plain.batches] == [(2, 8), (1, 8)]
    both = input_batches(loaded(Reads("input_ids", is_encoder_decoder=True, decoder_start_token_id=7)), wanted)
    assert "the same as targets" in both.about
    for batch, tokens in zip(both.batches, plain.batches, strict=True):
        assert isinstance(batch, Call)
        assert isinstance(tokens, Tensor)
        assert torch.equal(batch.kwargs["input_ids"], tokens)
        assert torch.equal(batch.kwargs["decoder_input_ids"][:, 1:], tokens[:, :-1])
        assert batch.kwargs["decoder_input_ids"][:, 0].tolist() == [7] * len(tokens)


def test_models_without_tokens_get_noise_that_is_called_synthetic() -> None:
    made = input_batches(
        loaded(Reads("pixel_values", image_size=16, num_channels=1)), TextSamples("evaluation", 3, 8, 2)
    )
    assert [tuple(batch.shape) for batch in made.batches] == [(2, 1, 16, 16), (1, 1, 16, 16)]
    assert made.about == "3 synthetic pictures, 1 x 16 x 16"
    assert "the input is synthetic" in made.notes[0]
    other = input_batches(
        loaded(Reads("pixel_values", image_size=16, num_channels=1)), TextSamples("calibration", 3, 8)
    )
    assert input_fingerprint(other.batches) != input_fingerprint(made.batches)
    sound = Reads("input_features", num_mel_bins=4, max_source_positions=10, is_encoder_decoder=True)
    speech = input_batches(loaded(sound), TextSamples("evaluation", 2, 6))
    assert {name: tuple(one.shape) for name, one in as_call(speech.batches[0]).tensors.items()} == {
        "input_features": (2, 4, 20),
        "decoder_input_ids": (2, 6),
    }


@pytest.mark.parametrize(
    ("model", "source", "message"),
    [
        (Reads("pixel_values"), "evaluation", "does not state the size of pixel_values. Give them with a function"),
        (
            Reads("pixel_values", image_size=8),
            "own.txt",
            "is no folder, and Reads reads pixel_values. Give a folder of",
        ),
        (Reads("input_ids"), "FOLDER", "is a folder, and Reads reads tokens. Give a text"),
        (Reads("pixel_values", image_size=8), "FOLDER", "has 0 files (.png"),
    ],
)
def test_data_that_do_not_fit_the_model_are_told(model: nn.Module, source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        input_batches(loaded(model), TextSamples(source.replace("FOLDER", str(tmp_path)), 2, 8))
    assert message in str(caught.value)


def test_pictures_of_a_folder_need_the_processor_of_the_model(tmp_path: Path) -> None:
    from PIL import Image
    from transformers import ViTImageProcessorPil

    (tmp_path / "data").mkdir()
    for place, grey in enumerate((0, 255)):
        Image.new("L", (9, 9), grey).save(tmp_path / "data" / f"{place}.png")
    wanted, model = TextSamples(str(tmp_path / "data"), 2, 8), Reads("pixel_values", image_size=4)
    with pytest.raises(ValueError, match=r"has no preprocessor_config\.json"):
        input_batches(loaded(model, folder=tmp_path), wanted)
    ViTImageProcessorPil(size={"height": 4, "width": 4}).save_pretrained(tmp_path)
    made = input_batches(loaded(model, folder=tmp_path), wanted)
    assert torch.equal(as_call(made.batches[0]).main, torch.tensor([-1.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 3, 4, 4))
    assert made.about == f"2 pictures of {tmp_path / 'data'}"


def test_a_function_returns_tensors_tuples_and_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, x = torch.arange(6).reshape(2, 3), torch.ones(2, 4)
    functions(monkeypatch, batches=lambda: [ids, (x, x), {"a": x, "scale": 2}, x])
    found = input_batches(loaded(nn.Identity()), TextSamples("own_inputs:batches", 1, 1)).batches
    assert isinstance(found[0], Tensor), "token ids have figures and paths of their own"
    assert [type(one).__name__ for one in found[1:]] == ["Call", "Call", "Call"]
    assert as_call(found[2]).kwargs == {"a": x, "scale": 2}


def test_what_torch_draws_in_a_function_is_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    functions(monkeypatch, batches=lambda: [torch.randn(2, 3)])
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = input_batches(loaded(nn.Identity()), TextSamples("own_inputs:batches", 1, 1)).batches
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    second = input_batches(loaded(nn.Identity()), TextSamples("own_inputs:batches", 1, 1)).batches
    assert input_fingerprint(first) == input_fingerprint(second)


def test_what_is_wrong_with_a_function_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    functions(
        monkeypatch,
        changing=lambda: [torch.tensor([[random.random()]])],
        empty=list,
        lone=lambda: torch.ones(2),
        failing=lambda: 1 / 0,
        nested=lambda: [{"a": [1]}],
        nan=lambda: [{"b": torch.ones(2)}, {"b": torch.tensor([1.0, torch.nan])}],
    )
    for name, message in (
        ("changing", "returned other values the second time"),
        ("empty", "returned an empty list"),
        ("lone", "returned a Tensor. Expected a list of batches"),
        ("failing", "the function failed: ZeroDivisionError"),
        ("nested", "batch 0: argument a is a list"),
        ("nan", "batch 1: argument b has NaN"),
        ("emty", "Did you mean 'own_inputs:empty'?"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            input_batches(loaded(nn.Identity()), TextSamples(f"own_inputs:{name}", 1, 1))
        assert message in str(caught.value)
    with pytest.raises(ValueError, match="module 'no_such' cannot be imported"):
        check_samples(TextSamples("no_such:f", 1, 1))


def test_scales_are_taken_from_the_same_inputs_unless_others_are_named(tmp_path: Path) -> None:
    usual = TextSamples("calibration", 16, 256)
    assert calibrating(TextSamples("evaluation", 8, 64), usual) == usual
    assert calibrating(TextSamples("a.b:c", 8, 64), usual).source == "a.b:c"
    assert calibrating(TextSamples(str(tmp_path), 8, 64), usual) == TextSamples(str(tmp_path), 8, 64)
    own = TextSamples("a.b:d", 16, 256)
    assert calibrating(TextSamples("a.b:c", 8, 64), own) == own


def test_a_model_without_a_tokenizer_says_so_only_if_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Loaded("model", nn.Linear(1, 1), NoTokenizer("it has no tokenizer"), "0" * 16)
    functions(monkeypatch, batches=lambda: [torch.ones(2, 3)])
    assert input_batches(silent, TextSamples("own_inputs:batches", 1, 1)).samples == 2
    with pytest.raises(ValueError, match="it has no tokenizer"):
        input_batches(silent, TextSamples("evaluation", 1, 4))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        x = a + scale * b
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_reference_of_calls_is_written_and_read(tmp_path: Path) -> None:
    batches = [
        Call((torch.ones(2, 4),), {"b": torch.zeros(2, 4), "scale": 0.5}),
        Call((torch.ones(1, 4), torch.ones(1, 4))),
    ]
    made = run_reference(TwoInputs(), batches)
    assert made.kind.name == "values"
    save_reference(made, tmp_path / "r")
    read = load_reference(tmp_path / "r")
    assert input_fingerprint(read.batches) == input_fingerprint(made.batches)
    assert (read.kind, read.layers, read.modules, read.wanted) == (made.kind, made.layers, made.modules, made.wanted)
    assert all(torch.equal(a, b) for a, b in zip(read.outputs, made.outputs, strict=True))
    assert as_call(read.batches[0]).kwargs["scale"] == 0.5
    for name, tensors in made.tensors.items():
        assert all(torch.equal(a, b) for a, b in zip(read.tensors[name], tensors, strict=True))
