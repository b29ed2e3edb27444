"""GGUF files: the values are those of gguf's own dequantize, whatever the type; what is wrong is one message."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from probe.data.tokenizers import ByteTokenizer
from probe.models import gguf_files
from probe.models.loading import load_model
from probe.models.quantized import statement_of
from probe.models.quantized_checkpoints import load_quantized
from tests.models.folders import refusal
from tests.models.quantized_models import write_gguf

KINDS = (Kind.F32, Kind.Q8_0, Kind.Q4_0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_value_of_a_model_is_that_of_ggufs_own_dequantize(kind: Kind, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    wanted = write_gguf(file, kind)
    found = load_model(str(file))
    values = dict(found.model.named_parameters())
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        assert np.array_equal(value.numpy(), wanted[name]), name
    assert isinstance(found.tokenizer, ByteTokenizer)
    scheme = "38 tensors F32" if kind is Kind.F32 else f"10 tensors F32, 28 tensors {kind.name}"
    assert found.notes == (
        f"values are dequantized: {scheme}",
        f"no tokenizer in '{file}': text is read as bytes, ids 0 to 255",
    )


def test_a_tokenizer_in_the_file_is_used(tmp_path: Path) -> None:
    """The byte-level alphabet of GPT-2, in another order: the ids are not those of bytes."""
    file = tmp_path / "model.gguf"
    alphabet = [*map(chr, (*range(33, 127), *range(161, 173), *range(174, 256))), *map(chr, range(256, 323)), "!!"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(alphabet)
        writer.add_token_merges(["! !"])
        writer.add_bos_token_id(100)
        writer.add_eos_token_id(100)

    write_gguf(file, Kind.Q8_0, more=add)
    found = load_model(str(file))
    assert found.notes == ("values are dequantized: 10 tensors F32, 28 tensors Q8_0",)
    assert found.tokenizer.encode("abc!!") == [*(alphabet.index(letter) for letter in "abc"), 255]
    assert found.tokenizer.decode(found.tokenizer.encode("abc!!")) == "abc!!"


def test_a_float_file_computes_what_its_original_does(tmp_path: Path) -> None:
    """Rows of q and k lie in another order in GGUF: values in the wrong one would still be the same set."""
    file = tmp_path / "model.gguf"
    write_gguf(file, Kind.F32)
    tokens = torch.arange(40)[None]
    assert torch.equal(load_model(str(file)).model(tokens).logits, load_model("tiny-llama").model(tokens).logits)


def test_a_checkpoint_states_the_type_of_every_tensor(tmp_path: Path) -> None:
    file, original = tmp_path / "q8.gguf", load_model("tiny-llama").model
    write_gguf(file, Kind.Q8_0)
    stated = statement_of(load_quantized(str(file), original))
    assert stated is not None
    assert stated.is_dequantized
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert str(stated) == "GGUF (10 tensors F32, 28 tensors Q8_0)"
    assert len(stated.forms or {}) == sum(kind == "Q8_0" for kind in types.values()) == 28
    assert set((stated.forms or {}).values()) == {"Q8_0 of GGUF"}
    assert all(name in dict(original.named_parameters()) for name in stated.forms or ())


def test_a_model_of_a_file_says_nothing_of_its_types_later(tmp_path: Path) -> None:
    """It is a float model then: what a mode quantizes of it is no GGUF."""
    file = tmp_path / "q8.gguf"
    write_gguf(file, Kind.Q8_0)
    assert statement_of(load_model(str(file)).model) is None


def test_a_float_file_is_no_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "float.gguf"
    write_gguf(file, Kind.F32)
    with pytest.raises(ValueError, match=r"states GGUF \(38 tensors F32\), but all its weights are plain floats"):
        load_quantized(str(file), load_model("tiny-llama").model)


def test_a_folder_with_nothing_but_a_file_says_what_to_write(tmp_path: Path) -> None:
    file = tmp_path / "q8.gguf"
    write_gguf(file, Kind.Q8_0)
    assert refusal(tmp_path) == f"model folder '{tmp_path}' holds a GGUF file. Name the file itself: '{file}'"


def test_a_file_that_is_none_or_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "q8.gguf"
    assert refusal(file) == f"'{file}' does not exist (looked for {file}). Expected a GGUF file."
    write_gguf(file, Kind.Q8_0)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert f"'{file}' cannot be read as a GGUF file: " in refusal(file)
    file.write_bytes(b"nothing")
    assert refusal(file).endswith("Copy or download it again.")


def test_weights_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    file = tmp_path / "q8.gguf"
    write_gguf(file, Kind.Q8_0, blocks=5)
    assert "model.layers.4.input_layernorm.weight is missing" in refusal(file)


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "q8.gguf"
    write_gguf(file, Kind.Q8_0)
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None)
    told = f"'{file}' needs gguf and accelerate to be read, not installed: pip install \"quant-probe[gguf]\""
    assert refusal(file) == told
