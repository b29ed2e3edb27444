"""Recordings: they read back as written and are judged as the run itself; every defect and misfit is told."""

import copy
import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

import probe.recordings
from probe.calibration import Calibration
from probe.data import fingerprint, text_of, token_batches
from probe.gate.observations import Observation, observe
from probe.hooks import capture
from probe.models.load import Loaded, load_model
from probe.modes import Recipe, apply
from probe.overview import calibrate_on
from probe.recordings import Recording, RecordingError, observe_recording, read_recording, write_recording
from probe.recordings.format import manifest_from_json, manifest_to_json
from probe.runner import Reference, run_reference

Parts = dict[str, list[Tensor]]
FLOAT, QUANTIZED, CALIBRATED = Recipe("fp32"), Recipe("2-1", "fp8_e4m3"), Recipe("0", "int8")
RECIPES = (FLOAT, Recipe("fp16"), Recipe("bf16"), QUANTIZED, CALIBRATED)
LAYERS = ("layer_0", "layer_1", "layer_2", "layer_3")
AGAIN = "Copy the recording again from where it was made, or make it again there"


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """No waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model("tiny-mamba")


@pytest.fixture(scope="module")
def calibration(loaded: Loaded) -> Calibration:
    return calibrate_on(loaded, "calibration", 2, 32)


@pytest.fixture(scope="module")
def batches(loaded: Loaded) -> list[Tensor]:
    return token_batches(text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=2)


@pytest.fixture(scope="module")
def reference(loaded: Loaded, batches: list[Tensor]) -> Reference:
    return run_reference(loaded.model, batches)


@pytest.fixture(scope="module")
def parts(loaded: Loaded, batches: list[Tensor], calibration: Calibration) -> dict[Recipe, Parts]:
    return {recipe: run(loaded, recipe, batches, calibration) for recipe in RECIPES}


@pytest.fixture(scope="module")
def stored(
    tmp_path_factory: pytest.TempPathFactory, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts]
) -> Path:
    """A recording of all recipes, not to be changed."""
    return write(tmp_path_factory.mktemp("stored") / "trn1", loaded, batches, parts).folder


@pytest.fixture
def folder(tmp_path: Path, tiny: Path) -> Path:
    """A copy of the small recording, to be changed."""
    return Path(shutil.copytree(tiny, tmp_path / "small"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recipes of made-up numbers: 3 samples of 4 tokens."""
    return write_small(tmp_path_factory.mktemp("tiny") / "small").folder


@torch.no_grad()
def run(
    loaded: Loaded, recipe: Recipe, batches: list[Tensor], calibration: Calibration | None, *, inputs: bool = False
) -> Parts:
    """What a device would do: apply the recipe, run, capture."""
    twin = apply(loaded.model, recipe, calibration)
    with capture(twin, inputs=inputs) as captured:
        logits = [twin(batch, use_cache=False).logits for batch in batches]
    return {**captured.tensors, "logits": logits}


def write(folder: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], **more: Any) -> Recording:
    facts = {"model": loaded.name, "model_fingerprint": loaded.fingerprint, "device": "neuron trn1"} | more
    return write_recording(folder, parts.items(), batches=batches, **facts)


def small_parts(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> Parts:
    generator = torch.Generator().manual_seed(seed)
    layers = {
        f"layer_{i}.output": [torch.randn(n, 4, 5, generator=generator).to(dtype) for n in (2, 1)] for i in (2, 10)
    }
    return {**layers, "logits": [torch.randn(n, 4, 7, generator=generator) for n in (2, 1)]}


SMALL_TOKENS = [torch.arange(8).view(2, 4), torch.arange(4).view(1, 4)]


def write_small(folder: Path, seed: int = 0, **more: Any) -> Recording:
    facts: dict[str, Any] = {"model": "small", "device": "cpu", "batches": SMALL_TOKENS} | more
    return write_recording(folder, [(FLOAT, small_parts(seed)), (QUANTIZED, small_parts(seed + 1))], **facts)


def seen(recording: Recording, recipe: Recipe, reference: Reference, **more: Any) -> dict[str, Observation]:
    facts = {"model_fingerprint": reference.model, "data_fingerprint": fingerprint(reference.batches)} | more
    return observe_recording(recording, recipe, reference, **facts)


def only(kinds: tuple[str, ...], named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name.split(".")[0] in kinds}


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest."""
    file = folder / "manifest.json"
    document = json.loads(file.read_bytes())
    change(document)
    file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def put_file(folder: Path, data: bytes, recipe: Recipe = QUANTIZED) -> None:
    """Other bytes for the file of a recipe, and a manifest that says so."""
    (folder / f"{recipe}.safetensors").write_bytes(data)
    edit(folder, lambda d: d["recipes"][str(recipe)].update(sha256=hashlib.sha256(data).hexdigest()))


# ---------------------------------------------------------------------------------------------- what is written


def test_the_manifest_states_what_ran(stored: Path, loaded: Loaded, batches: list[Tensor]) -> None:
    document = json.loads((stored / "manifest.json").read_text())
    assert sorted(path.name for path in stored.iterdir()) == sorted(
        ["manifest.json", *(f"{recipe}.safetensors" for recipe in RECIPES)]
    )
    assert {key: document[key] for key in ("version", "model", "fingerprint", "device")} == {
        "version": 1,
        "model": "tiny-mamba",
        "fingerprint": loaded.fingerprint,
        "device": "neuron trn1",
    }
    assert document["tokens"] == {"count": 48, "samples": 3, "seqlen": 16, "fingerprint": fingerprint(batches)}
    assert document["versions"]["torch"] == torch.__version__
    assert {"probe", "python"} < document["versions"].keys()
    entry = document["recipes"]["mode_2_1-fp8_e4m3"]
    data = (stored / "mode_2_1-fp8_e4m3.safetensors").read_bytes()
    assert entry["sha256"] == hashlib.sha256(data).hexdigest()
    assert entry["file"] == "mode_2_1-fp8_e4m3.safetensors"
    assert (entry["mode"], entry["format"]) == ("mode_2_1", "fp8_e4m3")
    assert entry["layers"] == list(LAYERS)
    assert entry["shapes"]["layer_0.output"] == [3, 16, 128]
    assert entry["shapes"]["logits"] == [3, 16, 256]
    assert document["recipes"]["fp32"]["format"] is None


def test_the_manifest_is_sorted_with_an_indent_of_one(stored: Path) -> None:
    text = (stored / "manifest.json").read_text()
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"


def test_the_manifest_survives_its_text(stored: Path) -> None:
    data = (stored / "manifest.json").read_bytes()
    assert manifest_to_json(manifest_from_json(data, stored)) == data


def test_three_lines_of_torch_read_it(stored: Path, parts: dict[Recipe, Parts]) -> None:
    tensors = load_file(stored / "mode_2_1-fp8_e4m3.safetensors")
    assert torch.equal(tensors["layer_3.output"], torch.cat(parts[QUANTIZED]["layer_3.output"]))


def test_the_manifest_states_the_dtype_that_ran(tmp_path: Path) -> None:
    given_parts = {**small_parts(dtype=torch.bfloat16), "logits": small_parts()["logits"]}
    write_recording(tmp_path / "r", [(Recipe("bf16"), given_parts)], model="m", device="cpu", batches=SMALL_TOKENS)
    entry = json.loads((tmp_path / "r" / "manifest.json").read_text())["recipes"]["bf16"]
    assert entry["dtype"] == {"layer_2.output": "bfloat16", "layer_10.output": "bfloat16", "logits": "float32"}


def test_what_is_read_is_what_the_model_gave(stored: Path, parts: dict[Recipe, Parts]) -> None:
    recording = read_recording(str(stored))
    assert set(recording.recipes) == {str(recipe) for recipe in RECIPES}
    for recipe, given_parts in parts.items():
        assert recording.layers(str(recipe)) == LAYERS
        for name, tensors in given_parts.items():
            found = recording.tensor(str(recipe), name)
            assert found.dtype == tensors[0].dtype
            assert torch.equal(found, torch.cat(tensors)), (recipe, name)


def test_layers_keep_their_order_and_are_never_sorted_as_text(tiny: Path) -> None:
    assert read_recording(tiny).layers("fp32") == ("layer_2", "layer_10")


def test_inputs_can_be_recorded_too(tmp_path: Path, loaded: Loaded, batches: list[Tensor]) -> None:
    given_parts = {FLOAT: run(loaded, FLOAT, batches, None, inputs=True)}
    recording = write(tmp_path / "r", loaded, batches, given_parts)
    assert torch.equal(recording.tensor("fp32", "layer_1.input"), recording.tensor("fp32", "layer_0.output"))
    assert read_recording(tmp_path / "r") == recording


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_float_dtype_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    given_parts = small_parts(dtype=dtype)
    write_recording(tmp_path / "r", [(FLOAT, given_parts)], model="m", device="cpu", batches=SMALL_TOKENS)
    found = read_recording(tmp_path / "r").tensor("fp32", "layer_2.output")
    assert found.dtype == dtype
    assert torch.equal(found.double(), torch.cat([part.double() for part in given_parts["layer_2.output"]]))


def test_nan_and_infinity_are_kept(tmp_path: Path) -> None:
    given_parts = small_parts()
    given_parts["layer_2.output"][1][0, 0, :2] = torch.tensor([torch.nan, -torch.inf])
    write_recording(tmp_path / "r", [(FLOAT, given_parts)], model="m", device="cpu", batches=SMALL_TOKENS)
    found = read_recording(tmp_path / "r").tensor("fp32", "layer_2.output")
    assert found[2, 0, 0].isnan()
    assert found[2, 0, 1] == -torch.inf


def test_how_samples_are_batched_does_not_show(tmp_path: Path, loaded: Loaded, parts: dict[Recipe, Parts]) -> None:
    texts = []
    for size in (1, 2, 3):
        batches = token_batches(text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=size)
        cut = {name: list(torch.split(torch.cat(some), size)) for name, some in parts[QUANTIZED].items()}
        write(tmp_path / str(size), loaded, batches, {QUANTIZED: cut})
        texts.append(files(tmp_path / str(size)))
    assert texts[0] == texts[1] == texts[2]


def test_reading_a_tensor_maps_it(tmp_path: Path) -> None:
    """Neither validation nor a slice brings a tensor of 64 MB into memory of our own."""
    mega = {"layer_0.output": [torch.zeros(2, 8, 2**20)], "logits": [torch.zeros(2, 8, 2)]}
    tokens = [torch.zeros(2, 8, dtype=torch.int64)]
    write_recording(tmp_path / "r", [(FLOAT, mega)], model="m", device="cpu", batches=tokens)
    mega.clear()

    def own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    before = own()
    tensor = read_recording(tmp_path / "r").tensor("fp32", "layer_0.output")
    assert float(tensor.sum()) == 0
    assert own() - before < 16_000


def test_tensors_that_are_not_there_are_told(tiny: Path) -> None:
    recording = read_recording(tiny)
    with pytest.raises(RecordingError, match=r"small has no recipe 'fp99'\. It has: fp32, mode_2_1-fp8_e4m3\."):
        recording.layers("fp99")
    with pytest.raises(
        RecordingError, match=r"has no layer_3.output of fp32\. It has: layer_10.output, layer_2.output"
    ):
        recording.tensor("fp32", "layer_3.output")


def test_a_file_that_vanished_after_reading_is_told(folder: Path) -> None:
    recording = read_recording(folder)
    (folder / "fp32.safetensors").unlink()
    with pytest.raises(RecordingError, match=r"fp32\.safetensors: cannot be read: No such file"):
        recording.tensor("fp32", "logits")


def test_a_recording_can_be_moved(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for place in ("elsewhere", "link"):
        assert read_recording(tmp_path / place).tensor("fp32", "logits").shape == (3, 4, 7)


# ---------------------------------------------------------------------------------------------- defects

Change = Callable[[dict[str, Any]], Any]
RECIPE = str(QUANTIZED)


def at(*keys: str, value: Any = None, drop: bool = False) -> Change:
    def change(document: dict[str, Any]) -> None:
        for key in keys[:-1]:
            document = document[key]
        if drop:
            del document[keys[-1]]
        else:
            document[keys[-1]] = value

    return change


def of_recipe(*keys: str, value: Any = None, drop: bool = False) -> Change:
    return at("recipes", RECIPE, *keys, value=value, drop=drop)


def renamed(document: dict[str, Any]) -> None:
    document["recipes"]["mode_2_2-int8"] = document["recipes"].pop(RECIPE)


def one_file_for_two(document: dict[str, Any]) -> None:
    document["recipes"][RECIPE]["file"] = "fp32.safetensors"


OUTPUT = "layer_2.output"
DEFECTS: list[tuple[str, Change, str]] = [
    ("newer", at("version", value=2), r"version: was written by a newer probe, 2; this one reads 1\. Upgrade probe\."),
    ("version text", at("version", value="1"), r'version: expected a whole number, 1 or more, found "1"'),
    ("version true", at("version", value=True), r"version: expected a whole number, 1 or more, found true"),
    ("no version", at("version", drop=True), r"the key version is missing"),
    ("no model", at("model", drop=True), r"the key model is missing"),
    ("unknown key", at("tokens", "extra", value=1), r"the key tokens\.extra is unknown"),
    ("unknown of recipe", of_recipe("dtypes", value={}), rf"the key recipes\.{RECIPE}\.dtypes is unknown"),
    ("model number", at("model", value=3), r"model: expected a text, found 3"),
    ("model empty", at("model", value=""), r'model: expected a text, found ""'),
    ("model escape", at("model", value="\x1b[2J"), r'model: expected a text, found "\\u001b\[2J"'),
    ("layer escape", of_recipe("layers", value=["\x1b[2J"]), r'layers\[0\]: expected a text, found "\\u001b\[2J"'),
    ("fingerprint", at("fingerprint", value=7), r"fingerprint: expected a text or null, found 7"),
    ("device", at("device", value=None), r"device: expected a text, found null"),
    ("tokens", at("tokens", value=[]), r"tokens: expected an object with named keys, found \[\]"),
    ("zero samples", at("tokens", "samples", value=0), r"tokens\.samples: expected a whole number, 1 or more, found 0"),
    ("samples 3.0", at("tokens", "samples", value=3.0), r"tokens\.samples: expected a whole number"),
    ("count", at("tokens", "count", value=11), r"tokens\.count: expected 3 x 4, found 11"),
    ("data", at("tokens", "fingerprint", value=None), r"tokens\.fingerprint: expected a text, found null"),
    ("versions", at("versions", "torch", value=2), r"versions\.torch: expected a text, found 2"),
    ("empty", at("recipes", value={}), r"recipes: expected an object with named keys, found \{\}"),
    ("recipes list", at("recipes", value=[1]), r"recipes: expected an object with named keys, found \[1\]"),
    ("renamed", renamed, r"recipes\.mode_2_2-int8: its mode is 'mode_2_1' and its format 'fp8_e4m3', which is another"),
    ("format", of_recipe("format", value=None), rf"recipes\.{RECIPE}: its mode is 'mode_2_1' and its format None"),
    ("no layers", of_recipe("layers", value=[]), rf"recipes\.{RECIPE}\.layers: expected a list that is not empty"),
    ("layers text", of_recipe("layers", value="all"), r"layers: expected a list that is not empty, found \"all\""),
    ("layer 3", of_recipe("layers", value=["layer_2", 10]), r"layers\[1\]: expected a text, found 10"),
    ("twice", of_recipe("layers", value=["layer_2", "layer_10", "layer_2"]), r"layers: layer_2 is listed twice"),
    (
        "layer without output",
        of_recipe("layers", value=["layer_2", "layer_10", "layer_11"]),
        r"layers: layer_11 is listed, but there is no layer_11\.output",
    ),
    (
        "output without layer",
        of_recipe("layers", value=["layer_2"]),
        rf"shapes\.layer_10\.output: is neither logits nor of a layer in recipes\.{RECIPE}\.layers",
    ),
    ("no dtype", of_recipe("dtype", OUTPUT, drop=True), rf"recipes\.{RECIPE}: layer_2\.output has no dtype"),
    ("no shape", of_recipe("shapes", "logits", drop=True), rf"recipes\.{RECIPE}: logits has no shape"),
    (
        "integers",
        of_recipe("dtype", OUTPUT, value="int64"),
        r"dtype\.layer_2\.output: expected one of float64, .*int64",
    ),
    ("other dtype", of_recipe("dtype", OUTPUT, value="bfloat16"), r"is F32 \[3, 4, 5\], and the manifest says BF16 \["),
    ("other shape", of_recipe("shapes", OUTPUT, value=[3, 5, 4]), r"F32 \[3, 4, 5\], and the manifest says F32 \[3, 5"),
    (
        "samples",
        of_recipe("shapes", OUTPUT, value=[2, 4, 5]),
        r"shapes\.layer_2\.output: expected 3 first, .*\[2, 4, 5\]",
    ),
    ("logits", of_recipe("shapes", "logits", value=[3, 5, 7]), r"shapes\.logits: expected 3 x 4 first, as tokens says"),
    ("flat logits", of_recipe("shapes", "logits", value=[3]), r"shapes\.logits: expected 3 x 4 first, as tokens says"),
    ("scalar", of_recipe("shapes", OUTPUT, value=[]), r"shapes\.layer_2\.output: expected a list that is not empty"),
    ("negative", of_recipe("shapes", OUTPUT, value=[3, -4]), r"shapes\.layer_2\.output\[1\]: expected a whole number"),
    ("sha", of_recipe("sha256", value="0" * 64), r"mode_2_1-fp8_e4m3\.safetensors: its sha256 is .* says 000000000000"),
    ("sha short", of_recipe("sha256", value="ab"), r"sha256: expected 64 hexadecimal digits, found \"ab\""),
    ("two recipes", one_file_for_two, r"recipes: the file fp32\.safetensors belongs to more than one"),
    ("no file", of_recipe("file", value="x.safetensors"), r"x\.safetensors: is missing, so this is no whole recording"),
    ("no name", of_recipe("file", value=None), r"file: expected the plain name of a \.safetensors file in this folder"),
]


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in DEFECTS], ids=[row[0] for row in DEFECTS])
def test_defects_name_the_file_the_key_and_what_to_do(folder: Path, change: Change, message: str) -> None:
    edit(folder, change)
    with pytest.raises(RecordingError, match=message) as problem:
        read_recording(folder)
    assert str(problem.value).startswith(str(folder))
    assert str(problem.value).endswith((AGAIN, "Upgrade probe."))


@pytest.mark.parametrize(
    "name",
    [
        *("../x.safetensors", "/etc/x.safetensors", "..", ".", "a/b.safetensors", "a\\b.safetensors", ".x.safetensors"),
        *("", "manifest.json", "x.pt", "x\n.safetensors", "x.safetensors\n", "x\0.safetensors", "~/x.safetensors"),
        *("\ud800.safetensors", "C:x.safetensors"),
    ],
)
def test_names_that_would_leave_the_folder_are_refused(folder: Path, name: str) -> None:
    shutil.copy(folder / f"{RECIPE}.safetensors", folder.parent / "x.safetensors")
    edit(folder, of_recipe("file", value=name))
    with pytest.raises(RecordingError, match=r"file: expected the plain name of a \.safetensors file in this folder"):
        read_recording(folder)


@pytest.mark.parametrize("name", ["manifest.json", f"{RECIPE}.safetensors"])
def test_links_that_leave_the_folder_are_refused(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "outside")
    (folder / name).symlink_to(folder.parent / "outside")
    with pytest.raises(RecordingError, match=rf"{name}: is a link to .*outside, which is not in the folder\. Copy"):
        read_recording(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(folder / name)
    with pytest.raises(RecordingError, match=f"{name}: is missing"):
        read_recording(folder)


def test_missing_folders_and_files_are_told(folder: Path) -> None:
    with pytest.raises(RecordingError, match=r"there is no folder .*nowhere\. .*make it again there"):
        read_recording(folder / "nowhere")
    with pytest.raises(RecordingError, match="there is no folder"):
        read_recording(folder / "manifest.json")
    with pytest.raises(RecordingError, match=r"there is no folder|cannot be read"):
        read_recording(folder / ("x" * 300))
    (folder / f"{RECIPE}.safetensors").unlink()
    with pytest.raises(
        RecordingError, match=rf"{RECIPE}\.safetensors: is missing, so this is no whole recording\. Copy"
    ):
        read_recording(folder)
    (folder / f"{RECIPE}.safetensors").mkdir()
    with pytest.raises(RecordingError, match=rf"{RECIPE}\.safetensors: is missing"):
        read_recording(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(RecordingError, match=r"manifest\.json: is missing, so this is no whole recording"):
        read_recording(folder)


def test_files_that_the_system_refuses_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(RecordingError, match=r"manifest\.json: cannot be read: Permission denied\. Copy"):
        read_recording(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 1, "version": 1}', "the key 'version' is there twice"),
        ('{"version": 1, "tokens": {"count": 1, "count": 2}}', "the key 'count' is there twice"),
        ("", r"is not JSON that can be read \(Expecting value"),
        ("[1]", r"expected an object with named keys, found \[1\]"),
        ("{}", r"expected an object with named keys, found \{\}"),
        ("\xff", r"is not JSON that can be read \('utf-8' codec"),
        ("[" * 100_000, "is not JSON that can be read"),
        ('{"version": ' + "9" * 5000 + "}", "is not JSON that can be read"),
        ('{"version": NaN}', "version: expected a whole number, 1 or more, found NaN"),
        ('{"version": 1, "a\\u001b[2J\\ud800": 0}', r'named keys, found \{"version": 1, "a\\u001b\[2J\\ud800": 0\}'),
        ('{"version": 1, "a\\u001b[2J": 0, "a\\u001b[2J": 0}', r"the key 'a\\x1b\[2J' is there twice"),
    ],
)
def test_text_that_is_no_manifest_is_told(folder: Path, text: str, message: str) -> None:
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecordingError, match=message) as problem:
        read_recording(folder)
    assert str(problem.value).isprintable()
    assert AGAIN in str(problem.value)


def test_a_file_with_more_or_fewer_tensors_than_the_manifest_is_told(folder: Path) -> None:
    file = folder / f"{RECIPE}.safetensors"
    tensors = load_file(file)
    put_file(folder, save({**tensors, "layer_3.output": torch.zeros(3, 4, 5)}))
    with pytest.raises(RecordingError, match=rf"{RECIPE}\.safetensors: layer_3\.output is in the file only\. Copy"):
        read_recording(folder)
    put_file(folder, save({**tensors, "\x1b[2J": torch.zeros(3)}))
    with pytest.raises(RecordingError, match=r": \\x1b\[2J is in the file only\. Copy"):
        read_recording(folder)
    put_file(folder, save({name: tensor for name, tensor in tensors.items() if name != OUTPUT}))
    with pytest.raises(RecordingError, match=rf"{RECIPE}\.safetensors: layer_2\.output is in the manifest only\. Copy"):
        read_recording(folder)


def test_the_file_of_another_recipe_is_told(folder: Path) -> None:
    shutil.copy(folder / "fp32.safetensors", folder / f"{RECIPE}.safetensors")
    with pytest.raises(RecordingError, match=r"cut short or changed, or belongs to another recording"):
        read_recording(folder)


def test_a_flipped_bit_is_told(folder: Path) -> None:
    file = folder / f"{RECIPE}.safetensors"
    data = file.read_bytes()
    for place in (0, 8, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(RecordingError, match="its sha256 is"):
            read_recording(folder)


def test_nothing_is_unpickled(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(folder / "sprung"),)

    put_file(folder, pickle.dumps(Trap()))
    with pytest.raises(RecordingError, match="is not safetensors that can be read"):
        read_recording(folder)
    put_file(folder, b"")
    torch.save({"x": Trap()}, folder / f"{RECIPE}.safetensors")
    put_file(folder, (folder / f"{RECIPE}.safetensors").read_bytes())
    with pytest.raises(RecordingError, match="is not safetensors that can be read"):
        read_recording(folder)
    assert not (folder / "sprung").exists()


@pytest.mark.parametrize("believed", [False, True], ids=["sha256 as before", "sha256 of what is left"])
def test_a_file_cut_anywhere_is_told(folder: Path, believed: bool) -> None:
    file = folder / f"{RECIPE}.safetensors"
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for length in (*range(0, header + 4, 3), *range(header, len(data), 37), len(data) - 1):
        if believed:
            put_file(folder, data[:length])
        else:
            file.write_bytes(data[:length])
        with pytest.raises(RecordingError, match=rf"{RECIPE}\.safetensors: .*\. Copy the recording again"):
            read_recording(folder)
    put_file(folder, data)
    read_recording(folder)


def test_a_manifest_cut_anywhere_is_told(folder: Path) -> None:
    file = folder / "manifest.json"
    data = file.read_bytes()
    for length in (*range(0, len(data) - 1, 5), len(data) - 2):  # all but the last newline
        file.write_bytes(data[:length])
        with pytest.raises(RecordingError, match=r"manifest\.json: is not JSON that can be read"):
            read_recording(folder)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["logits", "x.output"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in members:
        yield from places(value, (*path, key))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_junk_in_the_manifest_is_a_recording_error_or_harmless(
    folder: Path, tiny: Path, data: st.DataObject
) -> None:
    document = json.loads((tiny / "manifest.json").read_bytes())
    path = data.draw(st.sampled_from(list(places(document))))
    junk = data.draw(JSON)
    holder: Any = {"root": document}
    keys = ("root", *path)
    node = holder
    for key in keys[:-1]:
        node = node[key]
    if isinstance(node, dict) and data.draw(st.booleans()):
        node[data.draw(st.text(max_size=4))] = junk
    else:
        node[keys[-1]] = junk
    (folder / "manifest.json").write_text(json.dumps(holder["root"]))
    read_or_refuse(folder)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=200))
def test_any_bytes_are_a_recording_error(folder: Path, tiny: Path, junk: bytes) -> None:
    shutil.copy(tiny / "manifest.json", folder)
    put_file(folder, junk)
    read_or_refuse(folder, never_sound=True)
    (folder / "manifest.json").write_bytes(junk)
    read_or_refuse(folder, never_sound=True)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_in_a_header_are_a_recording_error_or_harmless(folder: Path, tiny: Path, data: st.DataObject) -> None:
    shutil.copy(tiny / "manifest.json", folder)
    sound = (tiny / f"{RECIPE}.safetensors").read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    place, junk = data.draw(st.integers(0, header - 1)), data.draw(st.binary(min_size=1, max_size=4))
    put_file(folder, sound[:place] + junk + sound[place + len(junk) :])
    read_or_refuse(folder)


def read_or_refuse(folder: Path, *, never_sound: bool = False) -> None:
    told = ""
    try:
        recording = read_recording(folder)
    except RecordingError as problem:
        told = str(problem)
    if told:
        assert str(folder) in told
        assert told.isprintable()
        return
    assert not never_sound
    for recipe in recording.recipes:
        for label in recording.layers(recipe):
            assert recording.tensor(recipe, f"{label}.output").shape == (3, 4, 5)


# ---------------------------------------------------------------------------------------------- writing safely


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path != folder)


def test_a_folder_is_overwritten_only_if_it_is_a_recording_and_that_is_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "r"
    write_small(target)
    old = files(target)
    with pytest.raises(RecordingError, match=r"r holds a recording already\. Give another folder, or overwrite=True\."):
        write_small(target, 5)
    assert files(target) == old
    write_small(target, 5, overwrite=True)
    assert files(target).keys() == old.keys()
    assert files(target) != old
    assert beside(target) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_not_a_recording_is_never_overwritten(tmp_path: Path, overwrite: bool) -> None:
    target = tmp_path / "r"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(RecordingError, match=r"r is not empty and is no recording\. Give another folder\."):
        write_small(target, overwrite=overwrite)
    (target / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(
        RecordingError, match=r"no sound recording\. .* key device is missing|holds a recording already"
    ):
        write_small(target, overwrite=overwrite)
    assert files(target).keys() == {"thesis.txt", "manifest.json"}
    with pytest.raises(RecordingError, match=r"thesis\.txt is a file\. Expected the name of a folder to make\."):
        write_small(target / "thesis.txt", overwrite=overwrite)
    assert beside(target) == []


def test_a_recording_with_something_of_the_users_in_it_is_not_overwritten(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    old = files(folder)
    with pytest.raises(RecordingError, match=r"'notes\.txt' in it is no part of the recording\. Move it away\."):
        write_small(folder, 5, overwrite=True)
    assert files(folder) == old


def test_a_damaged_recording_can_be_overwritten(folder: Path) -> None:
    (folder / "fp32.safetensors").unlink()
    (folder / f"{RECIPE}.safetensors").write_bytes(b"cut")
    write_small(folder, overwrite=True)
    read_recording(folder)


def test_empty_folders_links_and_deep_paths_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write_small(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read_recording(tmp_path / "empty").recipes == ("fp32", RECIPE)
    write_small(tmp_path / "a" / "b.c" / "d")
    assert read_recording(tmp_path / "a" / "b.c" / "d").recipes == ("fp32", RECIPE)


def test_what_is_returned_is_what_is_read(tmp_path: Path) -> None:
    written = write_small(tmp_path / "r", versions={"torch_neuronx": "2.1"})
    assert written == read_recording(tmp_path / "r")
    assert written.manifest.versions["torch_neuronx"] == "2.1"
    assert written.manifest.fingerprint is None


def test_the_folder_is_readable_by_all_who_may(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    write_small(tmp_path / "r")
    assert (tmp_path / "r").stat().st_mode == (tmp_path / "plain").stat().st_mode


CALLS = ((Path, "mkdir"), (Path, "write_bytes"), (Path, "rename"), (probe.recordings, "save_file"), (os, "fsync"))


@pytest.mark.parametrize("old", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize(("owner", "name"), CALLS, ids=[name for _, name in CALLS])
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_an_accident_at_any_step_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: BaseException, old: bool
) -> None:
    target = tmp_path / "r"
    if old:
        write_small(target)
    before = files(tmp_path)
    true = getattr(owner, name)
    for step in range(20):
        calls: list[object] = []

        def failing(*args: Any, step: int = step, calls: list[object] = calls, **more: Any) -> Any:
            calls.append(args)
            if len(calls) == step + 1:
                raise fault
            return true(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            told = ""
            try:
                write_small(target, 5, overwrite=old)
            except (RecordingError, KeyboardInterrupt) as problem:
                told = str(problem)
        if len(calls) <= step:
            assert step > 0
            break
        assert isinstance(fault, KeyboardInterrupt) or "No space left on device. What was there before is" in told
        if files(tmp_path) != before:  # only the sync after the last rename comes too late
            assert name == "fsync"
            read_recording(target)
            shutil.rmtree(target)
            for left in beside(target):
                (tmp_path / left).rename(target)
        assert files(tmp_path) == before
        assert beside(target) == []
    else:
        pytest.fail("it never ended")


def test_what_the_writer_of_tensors_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: dict[str, Tensor], file: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(probe.recordings, "save_file", full)
    with pytest.raises(RecordingError, match=r"cannot write .*fp32\.safetensors: .*No space left on device"):
        write_small(tmp_path / "r")
    assert list(tmp_path.iterdir()) == []


def test_all_is_on_the_disk_before_it_is_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "r"
    synced: list[tuple[str, bool]] = []

    def note(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, target.exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_small(target)
    names = [name for name, _ in synced]
    assert sorted(names[:3]) == ["fp32.safetensors", "manifest.json", f"{RECIPE}.safetensors"]
    assert names[3].endswith(".partial")
    assert synced[4:] == [(tmp_path.name, True)]
    assert not any(in_place for _, in_place in synced[:4])


def test_nothing_is_run_when_there_is_no_place_for_it(folder: Path) -> None:
    def recipes() -> Iterator[tuple[Recipe, Parts]]:
        pytest.fail("the model was run for nothing")
        yield

    with pytest.raises(RecordingError, match="holds a recording already"):
        write_recording(folder, recipes(), model="m", device="d", batches=SMALL_TOKENS)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_comes_while_it_is_recorded_is_not_lost(tmp_path: Path, overwrite: bool) -> None:
    def recipes() -> Iterator[tuple[Recipe, Parts]]:
        yield FLOAT, small_parts()
        (tmp_path / "r").mkdir()
        (tmp_path / "r" / "thesis.txt").write_text("years of work")

    with pytest.raises(RecordingError, match="is not empty and is no recording"):
        write_recording(tmp_path / "r", recipes(), model="m", device="d", batches=SMALL_TOKENS, overwrite=overwrite)
    assert files(tmp_path) == {"r/thesis.txt": b"years of work"}


def test_a_recipe_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def recipes() -> Iterator[tuple[Recipe, Parts]]:
        yield FLOAT, small_parts()
        (partial,) = tmp_path.glob(".r.*.partial")
        assert [path.name for path in partial.iterdir()] == ["fp32.safetensors"]  # on disk, without a manifest
        raise RuntimeError("the device fell off the bus")

    with pytest.raises(RuntimeError, match="fell off the bus"):
        write_recording(tmp_path / "r", recipes(), model="m", device="d", batches=SMALL_TOKENS)
    assert list(tmp_path.iterdir()) == []


def with_part(name: str, index: int, tensor: Tensor) -> Parts:
    changed = small_parts()
    changed[name][index] = tensor
    return changed


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ([], r"nothing was recorded for .*r: not one recipe was given"),
        ([(FLOAT, small_parts()), (FLOAT, small_parts())], r"fp32 is given twice"),
        ([(FLOAT, {})], r"fp32 recorded not one layer\. Expected tensors such as layer_0\.output"),
        ([(FLOAT, {"logits": small_parts()["logits"]})], r"fp32 recorded not one layer"),
        (
            [(FLOAT, {**small_parts(), "layer_2.scan": []})],
            r"fp32: 'layer_2\.scan' names no tensor\. Expected layer_0\.o",
        ),
        (
            [(FLOAT, {**small_parts(), "layer_3.output": small_parts()["layer_2.output"][:1]})],
            r"fp32: layer_3\.output has 2 samples of float32 \[4, 5\]\. Expected 3 of one dtype and shape",
        ),
        ([(FLOAT, {**small_parts(), "layer_3.output": []})], r"fp32: layer_3\.output has 0 samples of \. Expected 3"),
        (
            [(FLOAT, with_part("layer_2.output", 1, torch.zeros(1, 3, 5)))],
            r"layer_2\.output has 3 samples of float32 \[3, 5\] and float32 \[4, 5\]\. Expected 3 of one dtype",
        ),
        (
            [(FLOAT, with_part("layer_2.output", 1, torch.zeros(1, 4, 5).half()))],
            r"layer_2\.output has 3 samples of float16 \[4, 5\] and float32 \[4, 5\]",
        ),
        (
            [(FLOAT, {"layer_2.output": [torch.zeros(3, 4, dtype=torch.int32)]})],
            r"layer_2\.output is int32\. Expected one of float64, float32",
        ),
        ([(FLOAT, {**small_parts(), "layer_3.input": small_parts()["layer_2.output"]})], r"layer_3\.input: is neither"),
    ],
)
def test_partial_and_mixed_recordings_are_not_written(tmp_path: Path, recipes: Any, message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        write_recording(tmp_path / "r", recipes, model="m", device="d", batches=SMALL_TOKENS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "batches", [[], [torch.zeros(4)], [torch.zeros(2, 4), torch.zeros(1, 5)], [torch.zeros(0, 4)]], ids=str
)
def test_tokens_are_samples_of_one_length(tmp_path: Path, batches: list[Tensor]) -> None:
    with pytest.raises(
        RecordingError, match=r"batches have the shapes \[.*\]\. Expected \[samples, tokens\], all of one"
    ):
        write_small(tmp_path / "r", batches=batches)


# ---------------------------------------------------------------------------------------------- observing


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_recording_is_judged_as_the_run_itself(
    stored: Path, loaded: Loaded, reference: Reference, calibration: Calibration, recipe: Recipe
) -> None:
    live = observe(loaded.model, recipe, reference, calibration, bytes_per_token=1.5)
    from_disk = seen(read_recording(stored), recipe, reference, bytes_per_token=1.5)
    assert list(from_disk) == list(live) == [*LAYERS, "logits"]
    for label, one in from_disk.items():
        kinds = ("logits",) if label == "logits" else ("propagated",)
        assert one.figures == only(kinds, live[label].figures), label
        assert one.values == only(kinds, live[label].values)
        assert one.counts == only(kinds, live[label].counts)
        assert one.flaws == ()
        assert one.figures
    assert len(from_disk["layer_0"].points["output"]) == len(live["layer_0"].points["output"])


def test_the_batches_of_the_reference_need_not_be_those_of_the_recording(
    stored: Path, loaded: Loaded, reference: Reference
) -> None:
    recording = read_recording(stored)
    expected = seen(recording, QUANTIZED, reference)
    for size in (1, 3):
        batches = token_batches(text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=size)
        for label, one in seen(recording, QUANTIZED, run_reference(loaded.model, batches)).items():
            assert one.figures == pytest.approx(expected[label].figures, rel=1e-4, abs=1e-7)
            assert one.counts == expected[label].counts
            for kind, values in one.values.items():
                assert values == pytest.approx(expected[label].values[kind], rel=1e-6, abs=1e-6)
            assert one.flaws == ()


def test_the_same_values_in_other_batches_are_the_same_figures(stored: Path, reference: Reference) -> None:
    whole = replace(
        reference,
        batches=(torch.cat(reference.batches),),
        tensors={name: [torch.cat(some)] for name, some in reference.tensors.items()},
        logits=(torch.cat(reference.logits),),
    )
    recording = read_recording(stored)
    one, other = (seen(recording, QUANTIZED, some) for some in (reference, whole))
    for label in one:
        assert other[label].figures == pytest.approx(one[label].figures, rel=1e-9, abs=1e-12)
        for kind, values in one[label].values.items():
            assert other[label].values[kind] == pytest.approx(values, rel=1e-6, abs=1e-6)


def test_a_recipe_that_was_not_recorded_is_uncovered(stored: Path, reference: Reference) -> None:
    found = seen(read_recording(stored), Recipe("2-2", "int8"), reference)
    assert list(found) == [*LAYERS, "logits"]
    for label, one in found.items():
        assert (one.figures, one.values) == ({}, {})
        assert [flaw.verdict for flaw in one.flaws] == ["uncovered"]
        assert "mode_2_2-int8, only bf16, fp16, fp32, mode_0-int8, mode_2_1-fp8_e4m3. Copy" in one.flaws[0].message
        assert str(stored) in one.flaws[0].message
        assert label in one.flaws[0].message


def test_a_layer_that_was_not_recorded_is_uncovered_and_the_others_are_judged(
    tmp_path: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], reference: Reference
) -> None:
    some = {name: one for name, one in parts[QUANTIZED].items() if name in ("layer_0.output", "layer_3.output")}
    recording = write(tmp_path / "r", loaded, batches, {QUANTIZED: some})
    found = seen(recording, QUANTIZED, reference)
    assert {label for label, one in found.items() if one.flaws} == {"layer_1", "layer_2", "logits"}
    assert {flaw.verdict for one in found.values() for flaw in one.flaws} == {"uncovered"}
    assert "r has no layer_1 of mode_2_1-fp8_e4m3, only layer_0, layer_3. Copy" in found["layer_1"].flaws[0].message
    assert "there are no logits: " in found["logits"].flaws[0].message
    assert found["layer_0"].figures["propagated.mse"]


def test_layers_that_the_reference_does_not_ask_for_are_left_alone(
    stored: Path, loaded: Loaded, batches: list[Tensor]
) -> None:
    reference = run_reference(loaded.model, batches, ["last"])
    assert list(seen(read_recording(stored), QUANTIZED, reference)) == ["layer_3", "logits"]


def test_the_float_model_under_the_name_of_a_quantized_one_is_not_applied(
    tmp_path: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], reference: Reference
) -> None:
    recording = write(tmp_path / "r", loaded, batches, {QUANTIZED: parts[FLOAT], FLOAT: parts[FLOAT]})
    for label, one in seen(recording, QUANTIZED, reference).items():
        if label != "logits":
            assert [flaw.verdict for flaw in one.flaws] == ["not applied"]
            assert f"mode_2_1-fp8_e4m3 left {label} as it was: its output is the float layer's to the bit" in (
                one.flaws[0].message
            )
    assert not any(one.flaws for one in seen(recording, FLOAT, reference).values())


def test_the_float_model_of_another_device_is_not_applied_either(
    tmp_path: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], reference: Reference
) -> None:
    """Sums in another order, or a narrower float, do not make it a quantized model."""
    close = {name: [one * (1 + 2**-22) for one in some] for name, some in parts[FLOAT].items()}
    half = {name: [one.half() for one in some] for name, some in parts[FLOAT].items()}
    for index, given_parts in enumerate((close, half)):
        recording = write(tmp_path / str(index), loaded, batches, {QUANTIZED: given_parts})
        found = seen(recording, QUANTIZED, reference)
        for label in LAYERS:
            assert [flaw.verdict for flaw in found[label].flaws] == ["not applied"], (index, label)


@pytest.mark.parametrize(("bad", "nans", "infs"), [(torch.nan, 1, 0), (torch.inf, 0, 1)])
def test_nan_and_infinity_are_found_with_their_place(
    tmp_path: Path,
    loaded: Loaded,
    batches: list[Tensor],
    parts: dict[Recipe, Parts],
    reference: Reference,
    bad: float,
    nans: int,
    infs: int,
) -> None:
    broken = {name: [one.clone() for one in some] for name, some in parts[QUANTIZED].items()}
    broken["layer_1.output"][1][0, 2, 5] = bad
    broken["logits"][0][1, 15, 3] = bad
    found = seen(write(tmp_path / "r", loaded, batches, {QUANTIZED: broken}), QUANTIZED, reference)
    assert {label for label, one in found.items() if one.flaws} == {"layer_1", "logits"}
    (flaw,) = found["layer_1"].flaws
    assert flaw.verdict == "not finite"
    index = 2 * 16 * 128 + 2 * 128 + 5
    assert f"propagated: {nans} NaN and {infs} Inf among the {3 * 16 * 128} values of layer_1" in flaw.message
    assert f"the first at index {index}." in flaw.message
    assert [flaw.verdict for flaw in found["logits"].flaws] == ["not finite"]


def test_misfits_say_what_differs(tmp_path: Path, stored: Path, loaded: Loaded, reference: Reference) -> None:
    recording = read_recording(stored)

    def fails(message: str, samples: int = 3, seqlen: int = 16, text: str = "evaluation", model: Any = None) -> None:
        batches = token_batches(text_of(text), loaded.tokenizer, samples=samples, seqlen=seqlen, batch_size=2)
        other = run_reference(model or loaded.model, batches)
        with pytest.raises(RecordingError, match=message) as problem:
            seen(recording, QUANTIZED, other)
        assert str(problem.value).startswith(str(stored))
        assert "Record this model on these tokens" in str(problem.value)

    fails(r"the number of samples is 3, that of the reference is 2: they cannot be compared", samples=2)
    fails(r"the length of a sample is 16, that of the reference is 8: they cannot be compared", seqlen=8)
    fails(r"the fingerprint of the tokens is \w{16}, that of the reference is \w{16}: they", text="calibration")
    fails(r"the fingerprint of the model is \w{16}, that of the reference is \w{16}: they", model=changed(loaded))


def changed(loaded: Loaded) -> torch.nn.Module:
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] += 1
    return model


def test_a_recording_that_does_not_know_its_weights_is_judged(
    tmp_path: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], reference: Reference
) -> None:
    given_parts = {QUANTIZED: parts[QUANTIZED]}
    recording = write(tmp_path / "r", loaded, batches, given_parts, model_fingerprint=None)
    assert seen(recording, QUANTIZED, reference)["layer_0"].figures["propagated.mse"]


@pytest.mark.parametrize("name", ["layer_2.output", "logits"])
def test_other_shapes_are_told_and_never_cropped(
    tmp_path: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], reference: Reference, name: str
) -> None:
    for cut in (lambda one: one[..., :-1], lambda one: torch.cat([one, one], -1), lambda one: one[..., None]):
        other = {**parts[QUANTIZED], name: [cut(one) for one in parts[QUANTIZED][name]]}
        recording = write(tmp_path / "r", loaded, batches, {QUANTIZED: other}, overwrite=True)
        with pytest.raises(
            RecordingError, match=rf"{name} of mode_2_1-fp8_e4m3 has the shape \[3, 16, .* never cropped"
        ):
            seen(recording, QUANTIZED, reference)


def test_a_reference_of_something_else_is_refused(stored: Path, reference: Reference) -> None:
    recording = read_recording(stored)
    for wrong in ({"model_fingerprint": "0" * 16}, {"data_fingerprint": "0" * 16}):
        with pytest.raises(
            ValueError, match=r"the reference is of model \w+ and tokens \w+, expected .*0{16}"
        ) as problem:
            seen(recording, QUANTIZED, reference, **wrong)
        assert not isinstance(problem.value, RecordingError)
