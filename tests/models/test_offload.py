"""Promises of probe.models.offload: what does not fit is kept elsewhere, and the numbers are the same."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from probe.models.checkpoints import stored_size
from probe.models.loading import EMBEDDED, Loaded, load_model, weight_fingerprint
from probe.models.mamba_blocks import with_sites
from probe.models.offload import Room, at_hand, device_named, offload, place, size_of
from tests.activations.toys import make

CPU = torch.device("cpu")
TRAINED = [row.name for row in EMBEDDED.values() if row.folder]


def here(model: nn.Module) -> int:
    """Bytes of weights that are in memory."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type != "meta")


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(20)[None]).logits
    return found


@pytest.fixture(scope="module", params=TRAINED)
def whole(request: pytest.FixtureRequest) -> Loaded:
    return load_model(request.param)


# Loaded from its files


@pytest.mark.parametrize("limit", [1, 10**6, 2 * 10**6])
def test_weights_that_do_not_fit_stay_in_the_files_of_the_model(whole: Loaded, limit: int) -> None:
    parts = load_model(whole.name, room=Room(CPU, limit))
    assert here(parts.model) <= limit
    assert (here(parts.model) > 0) == (limit > 1)
    assert torch.equal(logits(place(parts.model, Room(CPU, limit)).model), logits(whole.model))
    assert parts.fingerprint == whole.fingerprint == weight_fingerprint(parts.model)


def test_what_fits_is_loaded_as_ever(whole: Loaded) -> None:
    parts = load_model(whole.name, room=Room(CPU, size_of(whole.model)))
    assert here(parts.model) == here(whole.model)
    assert place(parts.model, Room(CPU, 10**9)).note == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_kept_on_disk_weights_have_the_type_that_was_asked_for(whole: Loaded, dtype: torch.dtype | None) -> None:
    expected, parts = load_model(whole.name, dtype=dtype), load_model(whole.name, dtype=dtype, room=Room(CPU, 1))
    assert parts.fingerprint == expected.fingerprint
    assert torch.equal(logits(parts.model), logits(expected.model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_the_size_is_known_before_anything_is_loaded(dtype: torch.dtype | None) -> None:
    row = EMBEDDED["tiny-llama"]
    assert row.folder is not None
    parameters = load_model(row.name, dtype=dtype).model.parameters()
    assert stored_size(row.folder, dtype) == sum(p.numel() * p.element_size() for p in parameters)


def test_weights_on_disk_that_do_not_fit_the_configuration_are_refused_when_loading(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EMBEDDED["tiny-llama"].folder or "", tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 32
    (folder / "config.json").write_text(json.dumps(config))
    expected = r"layers\.0\.mlp\.(down|gate)_proj\.weight is \(\d+, \d+\), not \(\d+, \d+\)"
    for room in (None, Room(CPU, 1), Room(CPU, 10**6)):
        with pytest.raises(ValueError, match=expected):
            load_model(str(folder), room=room)


PEAK = """
import sys, threading, time
from pathlib import Path
import torch
from probe.activations.settings import read_configuration
from probe.activations.run import analyze

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024

def found(path, more):
    given = {"model.path": path, "data.num_samples": "1", "data.seq_len": "8"}
    return analyze(read_configuration(None, list((given | more).items())), progress=lambda text: None)

torch.set_num_threads(1)
found("tiny-llama", {"memory.max_memory": "1kB", "memory.offload_device": "disk"})  # everything is imported
def peak(limit):
    start, seen, over = anonymous(), [], threading.Event()
    def watch():
        while not over.is_set():
            seen.append(anonymous())
            time.sleep(0.001)
    watching = threading.Thread(target=watch)
    watching.start()
    found(sys.argv[1], {"memory.max_memory": limit, "memory.offload_device": "disk"})
    over.set()
    watching.join()
    return max(seen) - start

print(peak("10MB"), peak("10GB"))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status, which is Linux'")
def test_a_model_larger_than_its_limit_never_is_in_memory_as_a_whole(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = transformers.LlamaConfig(vocab_size=256, **shape, bos_token_id=None, eos_token_id=None)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    size = stored_size(tmp_path / "model", torch.float32)
    assert size > 1e8

    command = [sys.executable, "-c", PEAK, str(tmp_path / "model")]
    some, whole = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert some < 0.4 * size
    assert whole > 0.9 * size, "as this way of measuring shows"


# Placed after loading: models of factories, and copies with sites


def test_only_what_fits_stays(whole: Loaded) -> None:
    model = load_model(whole.name).model
    size = size_of(model)
    placed = offload(model, Room(CPU, size // 2))
    assert 0 < here(model) <= size // 2
    assert "kept on disk and brought in to run" in placed.note
    assert torch.equal(logits(placed.model), logits(whole.model))


def test_a_copy_with_sites_can_be_offloaded() -> None:
    model = load_model("tiny-mamba").model
    placed = place(with_sites(model), Room(CPU, 1))
    assert here(placed.model) == 0
    assert torch.equal(logits(placed.model), logits(with_sites(model)))


def test_the_folder_of_offloaded_weights_goes_with_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    placed = place(make(), Room(CPU, 1))
    assert len(list(tmp_path.iterdir())) == 1
    del placed
    import gc

    gc.collect()
    assert not list(tmp_path.iterdir())


def test_offloaded_to_the_cpu_the_model_gives_the_same(whole: Loaded) -> None:
    """With the CPU in the place of a GPU that this machine does not have."""
    model = load_model(whole.name).model
    placed = offload(model, Room(CPU, 1, "cpu"))
    assert here(model) == 0
    assert torch.equal(logits(placed.model), logits(whole.model))
    name = next(name for name, _ in model.named_modules() if name.endswith((".up_proj", ".x_proj")))
    with at_hand(model.get_submodule(name)):
        assert torch.equal(model.get_parameter(f"{name}.weight"), whole.model.get_parameter(f"{name}.weight"))


def test_what_is_said_to_be_elsewhere_is_elsewhere(whole: Loaded) -> None:
    """Also of a model that came with a device map of its own, all of it here."""
    model: Any = load_model(whole.name).model
    model.hf_device_map = {"": "cpu"}
    assert place(model, Room(CPU)).note == ""
    note = place(load_model(whole.name, room=Room(CPU, 1)).model, Room(CPU, 1)).note
    assert re.fullmatch(r"\d\.\d+ MB of \d\.\d+ MB of weights are kept on disk and brought in to run", note)


# What is said


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (
            Room(CPU, 1000, "disk", False),
            r"the model has .* of weights and memory\.max_memory is 1 kB\. Allow ",
        ),
        (Room(CPU, 1000, "cpu"), r"memory\.device and memory\.offload_device are both cpu\. Take memory\.offload_"),
    ],
)
def test_what_does_not_fit_and_may_not_be_offloaded_is_said(room: Room, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        place(make(), room)
    with pytest.raises(ValueError, match=expected):
        load_model("tiny-llama", room=room)


def test_without_accelerate_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    expected = r"needs the package accelerate, .*: pip install 'quant-probe\[offload\]'"
    with pytest.raises(ValueError, match=expected):
        place(make(), Room(CPU, 1000))
    with pytest.raises(ValueError, match=expected):
        load_model("tiny-llama", room=Room(CPU, 1000))


def test_without_a_limit_the_room_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 10**8 < Room(CPU).size < 10**14
    monkeypatch.setattr(Path, "read_text", lambda self: "MemTotal: 9 kB\nMemAvailable:       10 kB\n")
    assert Room(CPU).size == 9216
    with pytest.raises(ValueError, match=r"and cpu has room for 9\.22 kB, but memory\.device and .* are both cpu"):
        load_model("tiny-llama", room=Room(CPU, None, "cpu"))


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_said(name: str) -> None:
    with pytest.raises(ValueError, match=rf"memory\.device '{name}' "):
        device_named(name)
