"""Promises of probe.models.loading: what loads, what is said, and what is refused with which words."""

import hashlib
import importlib
import logging
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from probe.data.library_logs import quietly
from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.data.tokenizers import ByteTokenizer
from probe.models.loading import EMBEDDED, Loaded, load_model, weight_fingerprint
from tests.models.folders import change_weights, refusal

TRAINED = [row.name for row in EMBEDDED.values() if row.folder]


@pytest.fixture(scope="module")
def loaded() -> dict[str, Loaded]:
    return {name: load_model(name) for name in TRAINED}


def folder_of(name: str) -> Path:
    found = EMBEDDED[name].folder
    assert found is not None
    return found


def on_card(pattern: str, name: str) -> str:
    """What the model card says at the group of the pattern."""
    found = re.search(pattern, (folder_of(name) / "README.md").read_text())
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", TRAINED)
def test_an_embedded_model_is_ready_to_measure(loaded: dict[str, Loaded], name: str) -> None:
    got = loaded[name]
    assert got.name == name
    assert got.notes == ()
    assert isinstance(got.tokenizer, ByteTokenizer)
    assert not any(module.training for module in got.model.modules())
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in got.model.parameters())
    assert on_card(r"([\d,]+) parameters", name) == f"{sum(p.numel() for p in got.model.parameters()):,}"


@pytest.mark.parametrize("name", TRAINED)
def test_the_weights_are_those_of_the_card(name: str) -> None:
    stated = on_card(r"sha256 of `model.safetensors`: `(\w+)`", name)
    assert hashlib.sha256((folder_of(name) / "model.safetensors").read_bytes()).hexdigest() == stated


@pytest.mark.parametrize("name", TRAINED)
def test_bits_per_byte_are_those_of_the_card(loaded: dict[str, Loaded], name: str) -> None:
    stated = float(on_card(r"`evaluation.txt`.*\| ([\d.]+) \|", name))
    total, count = 0.0, 0
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


def random_state_of_numpy() -> Any:
    state: Any = np.random.get_state()
    return state[1].copy()


def test_the_random_model_is_the_same_on_every_call_and_leaves_random_states_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state(), random.getstate(), random_state_of_numpy()
    first = load_model("mamba-130m-random")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(random_state_of_numpy(), before[2])
    torch.manual_seed(12)
    assert load_model("mamba-130m-random").fingerprint == first.fingerprint
    model: Any = first.model
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.state_size, config.vocab_size) == (768, 24, 16, 256)
    assert {p.dtype for p in first.model.parameters()} == {torch.float32}
    assert model.backbone.layers[0].mixer.in_proj.weight.std() > 0.01


def test_loading_prints_and_logs_nothing_and_restores_the_settings(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers_logging: Any = importlib.import_module("transformers.utils.logging")
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


def test_the_fingerprints_of_the_embedded_models_are_what_baselines_hold(loaded: dict[str, Loaded]) -> None:
    assert {name: got.fingerprint for name, got in loaded.items()} == {
        "tiny-mamba": "6005052c884c438d",
        "tiny-llama": "d5d26256aa126515",
    }


def test_the_fingerprint_moves_with_one_ulp_of_one_weight() -> None:
    linear, norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
    model = nn.Sequential(linear, norm)
    first = weight_fingerprint(model)
    assert re.fullmatch("[0-9a-f]{16}", first)
    with torch.no_grad():
        weight = linear.weight
        weight[2, 1] = torch.nextafter(weight[2, 1], torch.tensor(math.inf))
    second = weight_fingerprint(model)
    assert second != first
    assert norm.running_mean is not None
    norm.running_mean[0] = 1e-30
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


def test_an_unknown_name_offers_the_nearest_and_the_ways_to_write_one() -> None:
    assert refusal("tiny-mambo") == (
        "unknown model 'tiny-mambo'. Did you mean 'tiny-mamba'? Embedded: tiny-mamba, tiny-llama, mamba-130m-random. "
        "Write a folder as ./path/to/model, a GGUF file as ./path/to/model.gguf, a hub model as organization/name, a "
        "function that makes the model as package.module:factory."
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

    calls: list[tuple[str, dict[str, Any]]] = []

    def fetch(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
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
