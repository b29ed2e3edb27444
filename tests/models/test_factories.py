"""Models made by a function, `package.module:factory`."""

import sys
from pathlib import Path

import pytest
import torch

from probe.data.tokenizers import ByteTokenizer
from probe.models.loading import load_model
from tests.models.folders import refusal

FACTORIES = """
import torch
class Small(torch.nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.layer, self.attributes = torch.nn.Linear(3, 2), vars(self).update(attributes)
class Words:
    def encode(self, text): return [len(word) for word in text.split()]
    def decode(self, tokens): return " ".join("x" * token for token in tokens)
class Config: vocab_size = 50
def small(): return Small()
def seeded(): torch.manual_seed(5); return Small()
def own_tokenizer(): return Small(tokenizer=Words())
def few_words(): return Small(config=Config())
def failing(): raise RuntimeError("no weights\\nhere")
def needing(size): return Small()
def dictionary(): return {}
number = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "making.py").write_text(FACTORIES)
    (tmp_path / "some_package" / "broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("some_package", "some_package.making"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "some_package.making"


@pytest.mark.parametrize("attribute", ["small", "Small"])
def test_a_factory_is_called_and_its_model_frozen(factories: str, attribute: str) -> None:
    name = f"{factories}:{attribute}"
    got = load_model(name, dtype=torch.float64)
    weight = got.model.get_parameter("layer.weight")
    assert got.name == name
    assert not got.model.training
    assert not weight.requires_grad
    assert weight.dtype == torch.float64
    assert got.notes == (f"model {name!r} brings no tokenizer: text is read as bytes, ids 0 to 255",)
    assert isinstance(got.tokenizer, ByteTokenizer)


def test_a_factory_keeps_its_dtype_and_tokenizer(factories: str) -> None:
    got = load_model(f"{factories}:own_tokenizer", dtype=None)
    assert got.model.get_parameter("layer.weight").dtype == torch.float32
    assert got.tokenizer.encode("to be or") == [2, 2, 2]
    assert got.notes == ()


def test_a_factory_that_seeds_leaves_the_random_state_alone(factories: str) -> None:
    before = torch.get_rng_state()
    load_model(f"{factories}:seeded")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "no_such_package.x:make",
            "module 'no_such_package.x' cannot be imported: ModuleNotFoundError: No module named",
        ),
        (
            "some_package.broken:make",
            "cannot be imported: ZeroDivisionError: division by zero. Expected package.module",
        ),
        (
            "some_package.making:smal",
            "has no 'smal'; expected a function that returns the model. Did you mean 'some_pa",
        ),
        ("some_package.making:number", "has an uncallable 'number'; expected a function"),
        ("some_package.making:failing", "the factory failed: RuntimeError: no weights here. It is called without arg"),
        ("some_package.making:needing", "the factory failed: TypeError: needing() missing 1 required"),
        ("some_package.making:dictionary", "the factory returned a dict; expected a torch.nn.Module."),
    ],
)
def test_a_factory_that_cannot_be_used(factories: str, name: str, words: str) -> None:
    message = refusal(name)
    assert message.startswith(f"model {name!r}")
    assert words in message


def test_a_small_vocabulary_without_tokenizer_is_told_when_text_is_read(factories: str) -> None:
    tokenizer = load_model("some_package.making:few_words").tokenizer
    with pytest.raises(ValueError, match="has no tokenizer and a vocabulary of 50; text as bytes needs at least 256"):
        tokenizer.encode("text")
