"""Promises of probe.models.loading: what loads, what is said, and what is refused with which words."""

import hashlib
import json
import logging
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from probe.data.batches import token_batches
from probe.data.library_logs import quietly
from probe.data.texts import text_of
from probe.data.tokenizers import ByteTokenizer, PretrainedTokenizer, Tokenizer
from probe.models.loading import EMBEDDED, Loaded, load_model, weight_fingerprint

TRAINED = [row.name for row in EMBEDDED.values() if row.folder]
SMALL = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2}
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.fixture(scope="module")
def loaded() -> dict[str, Loaded]:
    return {name: load_model(name) for name in TRAINED}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of tiny-llama, to be damaged."""
    return Path(shutil.copytree(EMBEDDED["tiny-llama"].folder, tmp_path / "model"))


def refusal(name: object, **options: object) -> str:
    """The message of the ValueError, checked to be one line without a traceback."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_model(str(name), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def save_small(kind: str, target: Path) -> nn.Module:
    import transformers

    settings = {
        "Mamba2ForCausalLM": ("Mamba2Config", {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1}),
        "LlamaForCausalLM": ("LlamaConfig", {"num_attention_heads": 2, "intermediate_size": 32}),
        "BertModel": ("BertConfig", {"num_attention_heads": 2, "intermediate_size": 32}),
    }
    config, more = settings[kind]
    with quietly():
        model = getattr(transformers, kind)(getattr(transformers, config)(**SMALL, **more, **NO_SPECIAL_TOKENS))
        model.save_pretrained(target)
    return model


def card(name: str) -> str:
    return (EMBEDDED[name].folder / "README.md").read_text()


# What loads


@pytest.mark.parametrize("name", TRAINED)
def test_an_embedded_model_is_ready_to_measure(loaded: dict[str, Loaded], name: str) -> None:
    got = loaded[name]
    assert got.name == name
    assert got.notes == ()
    assert isinstance(got.tokenizer, ByteTokenizer)
    assert not any(module.training for module in got.model.modules())
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in got.model.parameters())
    assert f"{sum(p.numel() for p in got.model.parameters()):,} parameters" in card(name)


@pytest.mark.parametrize("name", TRAINED)
def test_the_weights_are_those_of_the_card(name: str) -> None:
    stated = re.search(r"sha256 of `model.safetensors`: `(\w+)`", card(name)).group(1)
    assert hashlib.sha256((EMBEDDED[name].folder / "model.safetensors").read_bytes()).hexdigest() == stated


@pytest.mark.parametrize("name", TRAINED)
def test_bits_per_byte_are_those_of_the_card(loaded: dict[str, Loaded], name: str) -> None:
    stated = float(re.search(r"`evaluation.txt`.*\| ([\d.]+) \|", card(name)).group(1))
    total = count = 0
    batches = token_batches(text_of("evaluation"), loaded[name].tokenizer, samples=16, seqlen=256, batch_size=4)
    with torch.no_grad(), quietly():
        for ids in batches:
            logits = loaded[name].model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            total += nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").item()
            count += ids[:, 1:].numel()
    assert total / count / math.log(2) == pytest.approx(stated, rel=0.02)


@pytest.mark.parametrize(
    ("asked", "got"), [(torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64), (None, torch.float32)]
)
def test_the_dtype_is_the_one_asked_for(asked: torch.dtype | None, got: torch.dtype) -> None:
    assert {p.dtype for p in load_model("tiny-llama", dtype=asked).model.parameters()} == {got}


def test_no_dtype_keeps_the_dtype_of_the_checkpoint(folder: Path) -> None:
    load_model(str(folder), dtype=torch.bfloat16).model.save_pretrained(folder)
    assert next(load_model(str(folder), dtype=None).model.parameters()).dtype == torch.bfloat16
    assert next(load_model(str(folder)).model.parameters()).dtype == torch.float32


def test_the_random_model_is_the_same_on_every_call_and_leaves_random_states_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = load_model("mamba-130m-random")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])
    torch.manual_seed(12)
    assert load_model("mamba-130m-random").fingerprint == first.fingerprint
    config = first.model.config
    assert (config.hidden_size, config.num_hidden_layers, config.state_size, config.vocab_size) == (768, 24, 16, 256)
    assert {p.dtype for p in first.model.parameters()} == {torch.float32}
    assert first.model.backbone.layers[0].mixer.in_proj.weight.std() > 0.01


@pytest.mark.parametrize("kind", ["Mamba2ForCausalLM", "LlamaForCausalLM", "BertModel"])
def test_a_saved_model_loads_back_from_its_folder(tmp_path: Path, kind: str) -> None:
    saved = save_small(kind, tmp_path)
    got = load_model(str(tmp_path))
    assert type(got.model).__name__ == kind
    assert got.fingerprint == weight_fingerprint(saved)
    assert got.notes == (f"no tokenizer files in {str(tmp_path)!r}: text is read as bytes, ids 0 to 255",)
    assert isinstance(got.tokenizer, ByteTokenizer)


def test_a_model_in_shards_loads(loaded: dict[str, Loaded], folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with quietly():
        loaded["tiny-llama"].model.save_pretrained(folder, max_shard_size="1MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert load_model(str(folder)).fingerprint == loaded["tiny-llama"].fingerprint
    next(folder.glob("*-00002-of-*.safetensors")).unlink()
    assert "lists shards that are not in its folder: model-00002-of-" in refusal(folder)


def test_tokenizer_files_are_used_and_add_no_tokens(folder: Path) -> None:
    from tokenizers import Tokenizer as Fast, models, pre_tokenizers, processors

    fast = Fast(models.WordLevel({"<s>": 0, "to": 1, "be": 2, "<unk>": 3}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    got = load_model(str(folder))
    assert isinstance(got.tokenizer, PretrainedTokenizer)
    assert got.tokenizer.encode("to be to") == [1, 2, 1]
    assert got.tokenizer.decode([1, 2]) == "to be"
    assert got.notes == ()


def test_bytes_come_back_as_text() -> None:
    tokenizer = ByteTokenizer()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("é!") == [0xC3, 0xA9, 0x21]
    assert tokenizer.decode(tokenizer.encode("Anne, 7 £ — naïve")) == "Anne, 7 £ — naïve"
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_tensors_without_a_place_are_noted(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update(extra=torch.ones(2)))
    notes = load_model(str(folder)).notes
    assert "1 tensors of the checkpoint are not part of LlamaForCausalLM and were left out: extra" in notes


def test_loading_prints_and_logs_nothing_and_restores_the_settings(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging as transformers_logging

    change_weights(folder, lambda weights: weights.update(extra=torch.ones(2)))
    transformers_logging.enable_progress_bar()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    logging.getLogger("transformers").addHandler(handler)
    try:
        load_model(str(folder))
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert records == []
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == logging.NOTSET
    assert transformers_logging.is_progress_bar_enabled()


def test_importing_the_module_does_not_import_transformers() -> None:
    code = "import sys, probe.models.loading, probe.data; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# The fingerprint


def test_the_fingerprints_of_the_embedded_models_are_what_baselines_hold(loaded: dict[str, Loaded]) -> None:
    assert {name: got.fingerprint for name, got in loaded.items()} == {
        "tiny-mamba": "6005052c884c438d",
        "tiny-llama": "d5d26256aa126515",
    }


def test_the_fingerprint_moves_with_one_ulp_of_one_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    first = weight_fingerprint(model)
    assert re.fullmatch("[0-9a-f]{16}", first)
    with torch.no_grad():
        weight = model[0].weight
        weight[2, 1] = torch.nextafter(weight[2, 1], torch.tensor(math.inf))
    second = weight_fingerprint(model)
    assert second != first
    model[1].running_mean[0] = 1e-30
    assert weight_fingerprint(model) not in (first, second)


def test_the_fingerprint_sees_names_dtypes_and_shapes() -> None:
    def holding(name: str, value: torch.Tensor) -> str:
        module = nn.Module()
        module.register_buffer(name, value)
        return weight_fingerprint(module)

    zeros = torch.zeros(4)
    variants = [("a", zeros), ("b", zeros), ("a", zeros.view(2, 2)), ("a", zeros.view(torch.int32)), ("a", zeros[0])]
    assert len({holding(*variant) for variant in variants}) == len(variants)
    assert holding("a", torch.arange(6).view(2, 3).t()) == holding("a", torch.arange(6).view(2, 3).t().contiguous())


# Names that are refused


def test_an_unknown_name_offers_the_nearest_and_the_ways_to_write_one() -> None:
    assert refusal("tiny-mambo") == (
        "unknown model 'tiny-mambo'. Did you mean 'tiny-mamba'? Embedded: tiny-mamba, tiny-llama, mamba-130m-random. "
        "Write a folder as ./path/to/model, a hub model as organization/name, a function that makes the model as "
        "package.module:factory."
    )
    for far in ("", "nofolder"):
        assert refusal(far).startswith(f"unknown model {far!r}. Embedded: tiny-mamba, tiny-llama")


def test_a_missing_folder(tmp_path: Path) -> None:
    assert f"model folder '{tmp_path}/none' does not exist (looked for {tmp_path}/none)." in refusal(tmp_path / "none")
    assert "model folder './none' does not exist" in refusal("./none")
    assert "model folder '~nobody-here/none' does not exist" in refusal("~nobody-here/none")


def test_a_file_is_not_a_folder(folder: Path) -> None:
    assert "is a file. Expected the folder that holds config.json" in refusal(folder / "config.json")


def test_a_hub_id_is_not_downloaded_unless_allowed() -> None:
    assert refusal("no-such-organization/no-such-model") == (
        "hub model 'no-such-organization/no-such-model' is not in the local cache, and no folder has that name. "
        "Downloading is off: allow it with --allow-download (allow_download=True in Python), or give the path of a "
        "folder."
    )


@pytest.mark.parametrize("allowed", [False, True])
def test_a_hub_id_is_looked_up_in_the_cache_and_never_fetches_pickles(
    folder: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    import huggingface_hub

    calls = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **kw: calls.append((name, kw)) or str(folder)
    )
    assert load_model("org/model-1.0", allow_download=allowed).name == "org/model-1.0"
    ((name, asked),) = calls
    assert name == "org/model-1.0"
    assert asked["local_files_only"] is not allowed
    assert not any("bin" in kind or kind == "*" for kind in asked["allow_patterns"])


def test_a_failed_download_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = refusal("org/model", allow_download=True)
    assert "hub model 'org/model' could not be downloaded: OSError: no route to host. Check the name" in message


def test_an_integer_dtype() -> None:
    assert "dtype torch.int8 cannot hold weights" in refusal("tiny-llama", dtype=torch.int8)


# Folders that are refused


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder) == (
        f"model folder {str(folder)!r} has no config.json. "
        "Expected a folder written by save_pretrained of transformers."
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not valid JSON: JSONDecodeError"), ("[]", "holds a list"), ("{}", "names no model_type")],
)
def test_a_broken_config(folder: Path, text: str, words: str) -> None:
    (folder / "config.json").write_text(text)
    message = refusal(folder)
    assert words in message
    assert "config.json" in message


def test_a_model_type_that_transformers_does_not_know(folder: Path) -> None:
    change_config(folder, model_type="zzz", architectures=None)
    message = refusal(folder)
    assert message.startswith("transformers 5.")
    assert "model type `zzz`" in message


@pytest.mark.parametrize("keep", [0, 7, 1000, 2_498_999], ids=lambda keep: f"{keep}_bytes")
def test_weights_that_are_cut_short(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(folder)
    assert f"weights '{file}' are corrupt or cut short ({keep} bytes): is not safetensors that can be read (" in message
    assert message.endswith("Copy or download the file again.")


def test_weights_with_a_corrupt_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])
    assert f"weights '{file}' are corrupt or cut short" in refusal(folder)


def test_pickled_weights_are_refused_unopened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    message = refusal(folder)
    assert "has its weights only as pickle (pytorch_model.bin), which can run code when opened." in message
    assert "Expected model.safetensors" in message


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights. Expected model.safetensors" in refusal(folder)


def test_an_index_that_leaves_its_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    assert "lists shards that are not in its folder: ../other.safetensors" in refusal(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"))
    message = refusal(folder)
    assert "do not fit LlamaForCausalLM of config.json: model.layers.2.mlp.up_proj.weight is missing." in message


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(5)}))
    assert "model.norm.weight is (5,), not (128,)." in refusal(folder)


def test_many_wrong_tensors_are_counted(folder: Path) -> None:
    change_config(folder, num_hidden_layers=6)
    assert re.search(r"model.layers.4.input_layernorm.weight is missing; .* and 10 more\. ", refusal(folder))


def test_a_small_vocabulary_without_tokenizer(folder: Path) -> None:
    change_config(folder, vocab_size=100)
    change_weights(folder, lambda w: w.update({"model.embed_tokens.weight": torch.zeros(100, 128)}))
    assert (
        "has no tokenizer files and a vocabulary of 100; text as bytes needs at least 256 ids. Add tokenizer.json"
        in refusal(folder)
    )


def test_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    message = refusal(folder)
    assert f"the tokenizer in '{folder}' cannot be loaded: " in message
    assert message.endswith("Copy its files again, or remove them to read text as bytes.")


def test_code_in_a_folder_runs_only_when_trusted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "marker"
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(marker)!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change_config(folder, model_type="own", auto_map=auto_map, architectures=["OwnForCausalLM"])
    message = refusal(folder)
    assert "needs its own Python code to run. Read that code first, then allow it with --trust-remote-code" in message
    assert not marker.exists()
    assert type(load_model(str(folder), trust_remote_code=True).model).__name__ == "OwnForCausalLM"
    assert marker.exists()


# Factories

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
    assert got.name == name
    assert not got.model.training
    assert not got.model.layer.weight.requires_grad
    assert got.model.layer.weight.dtype == torch.float64
    assert got.notes == (f"model {name!r} brings no tokenizer: text is read as bytes, ids 0 to 255",)
    assert isinstance(got.tokenizer, ByteTokenizer)


def test_a_factory_keeps_its_dtype_and_tokenizer(factories: str) -> None:
    got = load_model(f"{factories}:own_tokenizer", dtype=None)
    assert got.model.layer.weight.dtype == torch.float32
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
        ("some_package.making:few_words", "has no tokenizer and a vocabulary of 50; text as bytes needs at least 256"),
    ],
)
def test_a_factory_that_cannot_be_used(factories: str, name: str, words: str) -> None:
    message = refusal(name)
    assert message.startswith(f"model {name!r}")
    assert words in message
