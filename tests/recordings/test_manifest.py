"""The manifest: what it states, and every defect of one from elsewhere, with the file, the key and what to do."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from probe.data.calls import input_fingerprint
from probe.models.loading import Loaded
from probe.recordings import RecordingError, read_recording, write_recording
from probe.recordings.manifest import manifest_from_json, manifest_to_json
from probe.running.recipes import Recipe
from tests.recordings.examples import (
    AGAIN,
    LAYERS,
    RECIPE,
    RECIPES,
    SMALL_TOKENS,
    edit,
    is_refused,
    is_sound,
    small_parts,
)

# ------------------------------------------------------------------------------------------------------- what it states


def test_the_manifest_states_what_ran(stored: Path, loaded: Loaded, batches: list[Tensor]) -> None:
    document = json.loads((stored / "manifest.json").read_text())
    assert sorted(path.name for path in stored.iterdir()) == sorted(
        ["manifest.json", "tokens.safetensors", *(f"{recipe}.safetensors" for recipe in RECIPES)]
    )
    assert {key: document[key] for key in ("version", "model", "fingerprint", "device")} == {
        "version": 1,
        "model": "tiny-mamba",
        "fingerprint": loaded.fingerprint,
        "device": "neuron trn1",
    }
    assert document["tokens"] == {
        "count": 48,
        "samples": 3,
        "seqlen": 16,
        "fingerprint": input_fingerprint(batches),
        "file": "tokens.safetensors",
        "source": None,
        "kind": "token ids",
    }
    assert document["unfinished"] is None
    assert document["versions"]["torch"] == torch.__version__
    assert {"probe", "python"} < document["versions"].keys()
    entry = document["recipes"]["mode_2_1-fp8_e4m3"]
    data = (stored / "mode_2_1-fp8_e4m3.safetensors").read_bytes()
    file = document["files"]["mode_2_1-fp8_e4m3.safetensors"]
    assert file == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert {one["file"] for one in entry["tensors"].values()} == {"mode_2_1-fp8_e4m3.safetensors"}
    assert {name: one["key"] for name, one in entry["tensors"].items()} == {name: name for name in entry["tensors"]}
    assert (entry["mode"], entry["format"]) == ("mode_2_1", "fp8_e4m3")
    assert entry["layers"] == list(LAYERS)
    assert entry["tensors"]["layer_0.output"]["shape"] == [3, 16, 128]
    assert entry["tensors"]["logits"]["shape"] == [3, 16, 256]
    assert document["recipes"]["fp32"]["format"] is None


def test_the_manifest_is_sorted_with_an_indent_of_one(stored: Path) -> None:
    text = (stored / "manifest.json").read_text()
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"


def test_the_manifest_survives_its_text(stored: Path) -> None:
    data = (stored / "manifest.json").read_bytes()
    assert manifest_to_json(manifest_from_json(data)) == data


def test_the_manifest_states_the_dtype_that_ran(tmp_path: Path) -> None:
    given_parts = {**small_parts(dtype=torch.bfloat16), "logits": small_parts()["logits"]}
    write_recording(tmp_path / "r", [(Recipe("bf16"), given_parts)], model="m", device="cpu", batches=SMALL_TOKENS)
    entry = json.loads((tmp_path / "r" / "manifest.json").read_text())["recipes"]["bf16"]
    dtypes = {name: one["dtype"] for name, one in entry["tensors"].items()}
    assert dtypes == {"layer_2.output": "bfloat16", "layer_10.output": "bfloat16", "logits": "float32"}


# -------------------------------------------------------------------------------------------------------------- defects

FILE = f"{RECIPE}.safetensors"

Change = Callable[[dict[str, Any]], Any]


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


def of_tensor(key: str, *, of: str = "layer_2.output", value: Any = None, drop: bool = False) -> Change:
    return of_recipe("tensors", of, key, value=value, drop=drop)


def renamed_file(document: dict[str, Any]) -> None:
    document["files"]["x.safetensors"] = document["files"].pop(FILE)
    for one in document["recipes"][RECIPE]["tensors"].values():
        one["file"] = "x.safetensors"


def renamed(document: dict[str, Any]) -> None:
    document["recipes"]["mode_2_2-int8"] = document["recipes"].pop(RECIPE)


def one_place_for_two(document: dict[str, Any]) -> None:
    document["recipes"][RECIPE]["tensors"]["layer_2.output"]["key"] = "layer_10.output"


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
    ("fingerprint", at("fingerprint", value=7), r"fingerprint: expected a text, found 7"),
    ("device", at("device", value=None), r"device: expected a text, found null"),
    ("tokens", at("tokens", value=[]), r"tokens: expected an object with named keys, found \[\]"),
    ("zero samples", at("tokens", "samples", value=0), r"tokens\.samples: expected a whole number, 1 or more, found 0"),
    ("samples 3.0", at("tokens", "samples", value=3.0), r"tokens\.samples: expected a whole number"),
    ("count", at("tokens", "count", value=11), r"tokens\.count: expected 3 x 4, found 11"),
    ("data", at("tokens", "fingerprint", value=3), r"tokens\.fingerprint: expected a text, found 3"),
    ("layout", at("layout", value="zip"), r"layout: expected one of safetensors, npy, npz, pt, found \"zip\""),
    ("no layout", at("layout", value=[]), r"layout: expected one of safetensors"),
    (
        "bytes",
        at("files", FILE, "bytes", value=7),
        r"has \d+ bytes and the manifest says 7: it was cut short or changed",
    ),
    ("no bytes", at("files", FILE, "bytes", drop=True), r"the key files\..*\.bytes is missing"),
    ("tokens file", at("tokens", "file", value="x.pt"), r"tokens\.file: expected the name of a file in files"),
    ("not listed", at("files", FILE, drop=True), r"\.file: expected the name of a file in files, found"),
    ("applied", of_recipe("applied", value="maybe"), r"applied: expected one of by probe, before, found \"maybe\""),
    ("compiled", of_recipe("compiled", value=1), r"compiled: expected true or false, found 1"),
    ("calibration", of_recipe("calibration", value={}), r"calibration: expected an object with named keys, found \{\}"),
    (
        "percentile",
        of_recipe("calibration", value={"data": "d", "fingerprint": "f", "percentile": 1, "samples": 1, "seqlen": 1}),
        r"calibration\.percentile: expected a share above 0, at most 1\.0, found 1",
    ),
    (
        "unfinished",
        at("unfinished", value={"asked": {}, "failed": False, "missing": 1}),
        r"unfinished\.missing: expected a list",
    ),
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
        rf"tensors\.layer_10\.output: is neither logits or output nor of a layer in recipes\.{RECIPE}\.layers",
    ),
    ("no dtype", of_tensor("dtype", drop=True), r"the key recipes\..*\.tensors\.layer_2\.output\.dtype is missing"),
    ("no shape", of_tensor("shape", drop=True), r"the key recipes\..*\.tensors\.layer_2\.output\.shape is missing"),
    ("integers", of_tensor("dtype", value="int64"), r"layer_2\.output\.dtype: expected one of float64, .*int64"),
    (
        "other dtype",
        of_tensor("dtype", value="bfloat16"),
        r"is float32 \[3, 4, 5\], and the manifest says bfloat16 \[",
    ),
    (
        "other shape",
        of_tensor("shape", value=[3, 5, 4]),
        r"is float32 \[3, 4, 5\], and the manifest says float32 \[3, 5, 4\]",
    ),
    ("samples", of_tensor("shape", value=[2, 4, 5]), r"layer_2\.output\.shape: expected 3 first, .*\[2, 4, 5\]"),
    ("logits", of_tensor("shape", of="logits", value=[3, 5, 7]), r"shape: expected 3 x 4 first, as tokens says"),
    ("flat logits", of_tensor("shape", of="logits", value=[3]), r"shape: expected 3 x 4 first, as tokens says"),
    ("scalar", of_tensor("shape", value=[]), r"layer_2\.output\.shape: expected a list that is not empty"),
    ("negative", of_tensor("shape", value=[3, -4]), r"layer_2\.output\.shape\[1\]: expected a whole number"),
    (
        "sha",
        at("files", FILE, "sha256", value="0" * 64),
        r"mode_2_1-fp8_e4m3\.safetensors: its sha256 is .* says 000000000000",
    ),
    ("sha short", at("files", FILE, "sha256", value="ab"), r"sha256: expected 64 hexadecimal digits, found \"ab\""),
    ("two tensors", one_place_for_two, rf"recipes: {FILE} layer_10\.output belongs to more than one tensor"),
    ("no file", renamed_file, r"x\.safetensors: is missing, so the folder is not whole"),
    ("no name", of_tensor("file", value=None), r"file: expected the plain name of a file in this folder"),
    ("no key", of_tensor("key", value=3), r"key: expected a text, found 3"),
    ("other key", of_tensor("key", value="x"), r"layer_2\.output is in the file only"),
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
    sound = (folder / "manifest.json").read_bytes()
    edit(folder, of_tensor("file", value=name))
    with pytest.raises(RecordingError, match=r"file: expected the (plain )?name of a file in "):
        read_recording(folder)
    (folder / "manifest.json").write_bytes(sound)
    edit(folder, at("files", name, value={"bytes": 1, "sha256": "0" * 64}))
    with pytest.raises(RecordingError, match=r"plain name of a file in this folder|named keys|is missing|vouch"):
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
        ('{"version": NaN}', "holds NaN, which is never stored"),
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
    assert is_refused(folder) or is_sound(folder)
