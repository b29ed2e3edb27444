"""Baselines: they read back as written, every defect is told, and no accident loses or mixes them."""

import errno
import fcntl
import itertools
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import load_file, save, save_file

from probe.gate.baselines.entry import Entry, Stored
from probe.gate.baselines.format import BaselineError, digest, path_part, rounded
from probe.gate.baselines.store import MAX_BYTES_PER_CASE, Store, changes, natural_key
from probe.gate.cases import Case

MODEL = "tiny-mamba"
Entries = dict[Case, Entry]

GOLDEN = """{
 "cases": {
  "fp8_e4m3": {
   "layer_0": {
    "injected": {
     "correlation": [0.99987, 2e-07],
     "mse": [0.000231235, 1.2e-09, "größerer Block"]
    },
    "propagated": {
     "mse": [1.0, 0.0]
    },
    "values": "2f9cc761"
   },
   "layer_10": {
    "injected": {
     "mse": [0.0, 0.0]
    }
   },
   "layer_2": {
    "injected": {
     "mse": [123457000.0, 0.0]
    }
   }
  },
  "int8": {
   "logits": {
    "logits": {
     "kl": [-1.5e-12, 0.0],
     "top.1": [0.5, 0.0]
    }
   }
  }
 },
 "device": "cpu",
 "mode": "mode_2_1",
 "model": "tiny-mamba",
 "version": 1
}
"""


def case(layer: str = "layer_0", mode: str = "mode_2_1", fmt: str = "fp8_e4m3", device: str = "cpu") -> Case:
    return Case(mode, layer, device, fmt)


def golden() -> Entries:
    first = {
        "propagated.mse": Stored(1),
        "injected.mse": Stored(0.00023123456, 1.234e-9, "größerer Block"),
        "injected.correlation": Stored(0.99987, 2e-7),
    }
    return {
        case("logits", fmt="int8"): Entry({"logits.top.1": Stored(0.5), "logits.kl": Stored(-1.5e-12)}),
        case("layer_2"): Entry({"injected.mse": Stored(123456789.0)}),
        case("layer_10"): Entry({"injected.mse": Stored(-0.0)}),
        case(): Entry(first, (1.0, -2.5, 0.1)),
    }


def entry(mse: float = 0.5, *values: float) -> Entry:
    return Entry({"injected.mse": Stored(mse, 1e-9)}, values)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """No waiting for the disk; where fsync matters a test counts the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "baselines")


@pytest.fixture
def small(store: Store) -> tuple[Path, Path]:
    """The two files of a store with one case."""
    store.write(MODEL, "cpu", {case(): entry(0.5, 1.0, 2.0)})
    file = store.file(MODEL, case())
    return file, file.with_suffix(".safetensors")


# ---------------------------------------------------------------------------------------------- what is written


def test_the_json_reads_well_in_a_review(store: Store) -> None:
    store.write(MODEL, "cpu", golden())
    folder = store.root / "tiny-mamba" / "cpu"
    assert sorted(path.name for path in folder.iterdir()) == ["mode_2_1.json", "mode_2_1.safetensors"]
    assert (folder / "mode_2_1.json").read_text(encoding="utf-8") == GOLDEN
    tensors = load_file(folder / "mode_2_1.safetensors")
    assert {name: row.tolist() for name, row in tensors.items()} == {"fp8_e4m3/layer_0": [1.0, -2.5, np.float32(0.1)]}
    assert tensors["fp8_e4m3/layer_0"].dtype == np.float32


def test_what_reads_back_is_the_rounded_entry(store: Store) -> None:
    store.write(MODEL, "cpu", golden())
    assert store.read(MODEL, "cpu") == {case: rounded(entry) for case, entry in golden().items()}
    assert rounded(golden()[case()]).figures["injected.mse"] == Stored(0.000231235, 1.2e-9, "größerer Block")
    assert math.copysign(1, rounded(entry(-0.0)).figures["injected.mse"].value) == 1


def test_bytes_depend_on_neither_order_nor_history(store: Store, tmp_path: Path) -> None:
    store.write(MODEL, "cpu", golden() | {case(mode="bf16", fmt=""): entry(1, 2, 3)})
    other = Store(tmp_path / "other")
    other.write(MODEL, "cpu", {case("old"): entry(7, 7), case(): entry(9, 9)})
    for key, value in reversed((golden() | {case(mode="bf16", fmt=""): entry(1, 2, 3)}).items()):
        other.write(MODEL, "cpu", {key: value})
    other.write(MODEL, "cpu", {}, drop=[case("old")])
    assert files(other.root) == files(store.root)


def test_a_float_mode_has_a_dash_for_its_format(store: Store) -> None:
    store.write(MODEL, "cpu", {case(mode="bf16", fmt=""): entry(1, 2)})
    file = store.file(MODEL, case(mode="bf16", fmt=""))
    assert list(json.loads(file.read_text())["cases"]) == ["-"]
    assert list(load_file(file.with_suffix(".safetensors"))) == ["-/layer_0"]
    assert list(store.read(MODEL, "cpu")) == [Case("bf16", "layer_0", "cpu", "")]


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
finite = st.floats(allow_nan=False, allow_infinity=False, max_value=1e307, min_value=-1e307)
stored = st.builds(Stored, finite, finite.map(abs), st.text(st.characters(codec="utf-8"), max_size=8))
figure_names = st.builds("{}.{}".format, names.filter(lambda name: "." not in name and name != "values"), names)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
entries_of_any_kind = st.dictionaries(
    st.builds(Case, st.sampled_from(["mode_2_1", "bf16"]), names, st.just("cpu"), st.sampled_from(["", "int8", "é "])),
    st.builds(
        Entry, st.dictionaries(figure_names, stored, min_size=1, max_size=4), st.lists(float32, max_size=4).map(tuple)
    ),
    max_size=5,
)


@given(entries_of_any_kind, entries_of_any_kind)
def test_anything_finite_survives_the_disk(first: Entries, second: Entries) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        store.write(MODEL, "cpu", first)
        once = files(store.root)
        found = store.read(MODEL, "cpu")
        assert found == {case: rounded(entry) for case, entry in first.items()}
        assert {case: rounded(entry) for case, entry in found.items()} == found
        assert changes(first, found) == []
        store.write(MODEL, "cpu", second, drop=list(first))
        assert store.read(MODEL, "cpu") == {case: rounded(entry) for case, entry in second.items()}
        store.write(MODEL, "cpu", found, drop=list(second))
        assert files(store.root) == once


def test_other_cases_and_modes_stay(store: Store) -> None:
    before = golden() | {case(mode="mode_3"): entry(3, 3)}
    store.write(MODEL, "cpu", before)
    store.write(MODEL, "cpu", {case("layer_2"): entry(2, 2), case("layer_5"): entry(5)}, drop=[case("layer_10")])
    wanted = before | {case("layer_2"): entry(2, 2), case("layer_5"): entry(5)}
    del wanted[case("layer_10")]
    assert store.read(MODEL, "cpu") == {case: rounded(entry) for case, entry in wanted.items()}


def test_files_that_do_not_change_are_not_touched(store: Store) -> None:
    store.write(MODEL, "cpu", golden() | {case(mode="mode_3"): entry(3, 3)})

    def stamps() -> dict[str, tuple[int, int]]:
        found = {path.name: path.stat() for path in store.folder(MODEL, "cpu").iterdir()}
        return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}

    before = stamps()
    store.write(MODEL, "cpu", golden(), drop=[case("never there"), case(mode="nor this")])
    assert stamps() == before
    store.write(MODEL, "cpu", {case("layer_2"): entry(0.1)})
    assert {name for name, stamp in stamps().items() if stamp != before[name]} == {"mode_2_1.json"}


def test_a_mode_without_cases_loses_its_files(store: Store) -> None:
    store.write(MODEL, "cpu", golden() | {case(mode="mode_3"): entry(3, 3)})
    store.write(MODEL, "cpu", {}, drop=list(golden()))
    assert list(files(store.root)) == ["tiny-mamba/cpu/mode_3.json", "tiny-mamba/cpu/mode_3.safetensors"]
    store.write(MODEL, "cpu", {case(mode="mode_3"): entry(3)})
    assert list(files(store.root)) == ["tiny-mamba/cpu/mode_3.json"]
    store.write(MODEL, "cpu", {}, drop=[case(mode="mode_3")])
    assert files(store.root) == {}
    assert store.models() == store.devices(MODEL) == []


def test_nothing_to_write_makes_no_folder(store: Store) -> None:
    store.write(MODEL, "cpu", {}, drop=[case()])
    assert not store.root.exists()
    assert store.read(MODEL, "cpu") == {}
    assert store.models() == store.devices(MODEL) == []
    assert store.environment(MODEL) is None


NOT_STORED = {
    "nan": (entry(math.nan), "mode_2_1-layer_0-cpu-fp8_e4m3: injected.mse is nan and is never stored"),
    "inf": (entry(-math.inf), "mode_2_1-layer_0-cpu-fp8_e4m3: injected.mse is -inf and is never stored"),
    "spread": (Entry({"a.b": Stored(1, math.inf)}), "the spread of a.b is inf and is never stored"),
    "spread too large to round": (Entry({"a.b": Stored(1, 1.79e308)}), "the spread of a.b is inf"),
    "negative spread": (Entry({"a.b": Stored(1, -1e-9)}), "the spread of a.b is -1e-09, expected 0 or more"),
    "nan value": (entry(1, 0, math.nan), "golden value 1 is nan and is never stored; nothing was written"),
    "value beyond float32": (entry(1, 1e39), "golden value 0 is inf and is never stored"),
    "no figures": (Entry({}, (1.0,)), "has no figures. A baseline has at least one"),
    "no group": (Entry({"mse": Stored(1)}), "figure 'mse' cannot be stored. Expected group.name, such as injected.mse"),
    "no name": (Entry({"mse.": Stored(1)}), "figure 'mse.' cannot be stored"),
    "empty group": (Entry({".mse": Stored(1)}), "figure '.mse' cannot be stored"),
    "reserved group": (Entry({"values.mse": Stored(1)}), "figure 'values.mse' cannot be stored"),
    "reserved for settings": (Entry({"settings.mse": Stored(1)}), "figure 'settings.mse' cannot be stored"),
    "no setting": (Entry({"a.b": Stored(1)}, settings={"seed": ""}), "setting 'seed' is '' and cannot be stored"),
    "surrogate": (Entry({"a.b": Stored(1, 0, "\ud800")}), "cannot be written as UTF-8; nothing was written"),
}


@pytest.mark.parametrize(("bad", "message"), NOT_STORED.values(), ids=NOT_STORED)
def test_what_must_not_be_stored_is_refused_before_anything_is_written(store: Store, bad: Entry, message: str) -> None:
    store.write(MODEL, "cpu", {case(): entry(0.5, 1.0)})
    before = files(store.root)
    with pytest.raises(BaselineError) as caught:
        store.write(MODEL, "cpu", {case("layer_1", mode="mode_0"): entry(1), case(): bad})
    assert message in str(caught.value)
    assert files(store.root) == before


@pytest.mark.parametrize(
    "bad",
    [
        Case("", "layer_0", "cpu"),
        Case("bf16", "", "cpu"),
        Case("bf16", "layer_0", "cpu", "-"),
        Case("bf16", "layer_0", "cpu", "a/b"),
    ],
)
def test_cases_that_could_not_be_told_apart_are_refused(store: Store, bad: Case) -> None:
    with pytest.raises(BaselineError, match=r"cannot be stored: mode, layer and device have a name"):
        store.write(MODEL, "cpu", {bad: entry()})
    assert not store.root.exists()


def test_size_per_case_counts_both_files(store: Store, small: tuple[Path, Path]) -> None:
    store.write(MODEL, "cpu", {case(mode="bf16", fmt=""): entry(), case("layer_1", mode="bf16", fmt=""): entry()})
    both = sum(path.stat().st_size for path in small)
    alone = store.file(MODEL, case(mode="bf16")).stat().st_size
    assert store.size_per_case(MODEL, "cpu") == {"bf16": alone / 2, "mode_2_1": both}
    assert MAX_BYTES_PER_CASE == 2048


# ------------------------------------------------------------------------------------------------ names and paths


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("tiny-mamba", "tiny-mamba"),
        ("state-spaces/mamba-130m-hf", "state-spaces_mamba-130m-hf"),
        ("package.module:factory", "package.module_factory"),
        ("./models/mine", "mine"),
        ("/somewhere/models/mine/", "mine"),
        ("~/mine", "mine"),
        ("../../etc/passwd", "passwd"),
        ("a/..", "__"),
        ("..", "__"),
        (".", "_"),
        ("", "_"),
        ("/", "_"),
        ("...", "___"),
        (".hidden", ".hidden"),
        ("cuda:0", "cuda_0"),
        ("recorded:/data/run 7/", "recorded_run_7"),
        ("recorded:", "recorded__"),
        ("recorded:/..", "recorded___"),
        ("größe\n\0\\x", "gr__e___x"),
    ],
)
def test_names_become_one_safe_part_of_a_path(name: str, part: str) -> None:
    assert path_part(name) == part


@given(st.text())
def test_no_name_leaves_its_folder(name: str) -> None:
    for part in (path_part(name), path_part(f"recorded:{name}")):
        assert part not in ("", ".", "..")
        assert set(part) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
        assert path_part(part) == part


def test_devices_and_models_have_their_true_names(store: Store) -> None:
    for model, device in (("org/name", "recorded:/data/gpu"), ("org/name", "cuda:0"), (MODEL, "cpu")):
        store.write(model, device, {case(device=device): entry(1, 2)})
        assert store.read(model, device) == {case(device=device): entry(1, 2)}
    (store.root / "README.md").write_text("not a model")
    assert store.models() == ["org/name", MODEL]
    assert store.devices("org/name") == ["cuda:0", "recorded:/data/gpu"]
    assert "org_name/recorded_gpu/mode_2_1.json" in files(store.root)


def test_two_names_for_one_folder_are_noticed(store: Store) -> None:
    store.write("org/name", "cuda:0", {case(device="cuda:0"): entry(1, 2)})
    before = files(store.root)
    other = r"models 'org/name' and 'org_name' would share .*, which belongs to the first\. Rename one of them, or"
    for attempt in (
        lambda: store.read("org_name", "cuda:0"),
        lambda: store.devices("org_name"),
        lambda: store.write("org_name", "cuda:0", {case(device="cuda:0"): entry(3)}),
        lambda: store.write("org_name", "cpu", {case(): entry(3)}),
        lambda: store.write_environment("org_name", {"torch": "2"}),
    ):
        with pytest.raises(BaselineError, match=other):
            attempt()
    device = r"devices 'cuda:0' and 'cuda_0' would share .*mode_2_1\.json"
    with pytest.raises(BaselineError, match=device):
        store.read("org/name", "cuda_0")
    with pytest.raises(BaselineError, match=device):
        store.write("org/name", "cuda_0", {case(device="cuda_0"): entry(3)})
    with pytest.raises(BaselineError, match=r"modes 'mode_2_1' and 'mode:2_1' would share .*mode_2_1\.json"):
        store.write("org/name", "cuda:0", {case(mode="mode:2_1", device="cuda:0"): entry(3)})
    with pytest.raises(BaselineError, match=r"modes 'a:b' and 'a;b' would share a_b\.json"):
        store.write("org/name", "cpu", {case(mode="a:b"): entry(3), case(mode="a;b"): entry(3)})
    with pytest.raises(BaselineError, match="is of device 'cpu': not to be written for 'org/name' on 'cuda:0'"):
        store.write("org/name", "cuda:0", {case(): entry(3)})
    with pytest.raises(BaselineError, match="is of device 'cpu'"):
        store.write("org/name", "cuda:0", {}, drop=[case()])
    assert files(store.root) == before


# ------------------------------------------------------------------------------------------------------- defects


def remedy(pattern: Path) -> str:
    return (
        f"Restore it with: git checkout -- '{pattern}'\n"
        f"or delete {pattern} and make it again with: pytest --update-baselines"
    )


def put(old: str, new: str) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert data.count(old.encode()) == 1, (old, data)
        return data.replace(old.encode(), new.encode())

    return change


ROW = "[0.5, 1e-09]"
DEFECTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "line 1 is not JSON (Expecting value)"),
    "cut": (lambda data: data[:80], "line 6 is not JSON (Expecting ',' delimiter)"),
    "merge marks": (put(' "device"', "<<<<<<< HEAD\n"), "is not JSON (Expecting property name enclosed in double quot"),
    "no last newline": (lambda data: data[:-1], "the last line does not end: the file is cut off"),
    "not UTF-8": (lambda data: data.replace(b"cpu", b"c\xff"), "is not UTF-8"),
    "utf-16": (lambda data: data.decode().encode("utf-16"), "byte 0 is not UTF-8"),
    "a list": (lambda data: b"[1]\n", "expected an object, found [1]"),
    "null": (lambda data: b"null\n", "expected an object, found null"),
    "deep": (lambda data: b"[" * 100_000, "is not JSON that can be read (maximum recursion depth"),
    "long number": (put("0.5", "1" * 5000), "is not JSON that can be read (Exceeds the limit"),
    "nan": (put("0.5", "NaN"), "holds NaN, which is never stored"),
    "infinity": (put("0.5", "-Infinity"), "holds -Infinity, which is never stored"),
    "too large": (put("0.5", "1e999"), "cases.fp8_e4m3.layer_0.injected.mse: expected a finite number, found Infinity"),
    "too large an integer": (put("0.5", "9" * 400), "mse: expected a finite number, found 99999"),
    "bool": (put("0.5", "true"), "cases.fp8_e4m3.layer_0.injected.mse: expected a finite number, found true"),
    "text": (put("0.5", '"0.5"'), 'cases.fp8_e4m3.layer_0.injected.mse: expected a finite number, found "0.5"'),
    "bool spread": (put("1e-09", "false"), "expected a finite number, found false"),
    "negative spread": (put("1e-09", "-1e-09"), "injected.mse: the spread is -1e-09, expected 0 or more"),
    "bare number": (put(ROW, "0.5"), "injected.mse: expected [value, spread] or [value, spread, reason], found 0.5"),
    "one number": (put(ROW, "[0.5]"), "expected [value, spread] or [value, spread, reason], found [0.5]"),
    "four": (put(ROW, '[1, 2, "a", 4]'), "[value, spread, reason], found [1, 2, "),
    "reason": (put(ROW, "[0.5, 0, 1]"), "injected.mse: expected a text, found 1"),
    "empty reason": (put(ROW, '[0.5, 0, ""]'), 'injected.mse: expected a text, found ""'),
    "key twice": (put(f'"mse": {ROW}', f'"mse": {ROW}, "mse": [1, 0]'), "the key 'mse' is there twice"),
    "unknown key": (put('"version": 1', '"version": 1, "when": 2'), "the key 'when' is unknown"),
    "missing key": (put(' "device": "cpu",\n', ""), "the key 'device' is missing"),
    "newer": (
        put('"version": 1', '"version": 2, "more": 1'),
        "was written by a newer probe: version 2, this one reads 1. Upgrade probe.",
    ),
    "older": (put('"version": 1', '"version": 0'), "version: expected 1, found 0"),
    "version text": (put('"version": 1', '"version": "1"'), 'version: expected 1, found "1"'),
    "version bool": (put('"version": 1', '"version": true'), "version: expected 1, found true"),
    "no version": (put(',\n "version": 1', ""), "version: expected 1, found none"),
    "no cases": (
        lambda data: data[:11] + b"{}" + data[data.index(b',\n "device"') :],
        "cases: expected an object with",
    ),
    "no layers": (
        put('"fp8_e4m3"', '"int8": {}, "fp8_e4m3"'),
        "cases.int8: expected an object with named keys, found {}",
    ),
    "no groups": (
        put('"layer_0"', '"layer_1": {}, "layer_0"'),
        "cases.fp8_e4m3.layer_1: expected an object with named",
    ),
    "values only": (
        put('"layer_0"', '"layer_1": {"values": "0"}, "layer_0"'),
        "cases.fp8_e4m3.layer_1: expected an object with named keys, found {}",
    ),
    "settings only": (
        put('"layer_0"', '"layer_1": {"settings": {"a": "b"}}, "layer_0"'),
        "cases.fp8_e4m3.layer_1: expected an object with named keys, found {}",
    ),
    "setting": (
        put('"injected"', '"settings": {"seed": 1}, "injected"'),
        "cases.fp8_e4m3.layer_0.settings.seed: expected a text, found 1",
    ),
    "no settings": (
        put('"injected"', '"settings": {}, "injected"'),
        "cases.fp8_e4m3.layer_0.settings: expected an object with named keys, found {}",
    ),
    "no figures": (put('"injected"', '"a": {}, "injected"'), "cases.fp8_e4m3.layer_0.a: expected an object with named"),
    "no name": (put('"mse"', '""'), "cases.fp8_e4m3.layer_0.injected: expected an object with named keys"),
    "layers in a list": (put('"fp8_e4m3"', '"int8": [], "fp8_e4m3"'), "cases.int8: expected an object with named keys"),
    "slash": (put("fp8_e4m3", "fp8/e4m3"), "cases.fp8/e4m3: a format has no '/'"),
    "dot": (put("injected", "in.jected"), "cases.fp8_e4m3.layer_0.in.jected: a group of figures has no '.'"),
    "device number": (put('"cpu"', "1"), "device: expected a text, found 1"),
    "other mode": (put("mode_2_1", "mode_3"), "mode: expected the one that the file is named for, found 'mode_3'"),
}


@pytest.mark.parametrize(("change", "message"), DEFECTS.values(), ids=DEFECTS)
def test_a_defect_of_the_json_is_told(
    store: Store, small: tuple[Path, Path], change: Callable[[bytes], bytes], message: str
) -> None:
    file, _ = small
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(BaselineError) as caught:
        store.read(MODEL, "cpu")
    text = str(caught.value)
    assert text.startswith(f"{file}: ")
    assert message in text
    assert "Upgrade" in text or text.endswith(". " + remedy(file.with_suffix(".*")))
    before = files(store.root)
    with pytest.raises(BaselineError):  # what cannot be read is never written over
        store.write(MODEL, "cpu", {case("layer_1"): entry(1)})
    assert files(store.root) == before


def test_no_depth_of_nesting_crashes_the_reader(store: Store, small: tuple[Path, Path]) -> None:
    for depth in range(800, 1000):  # about the limit of the interpreter
        small[0].write_bytes(b"[" * depth + b"]" * depth + b"\n")
        with pytest.raises(BaselineError, match=r"json: (expected an object, found|is not JSON that can be read)"):
            store.read(MODEL, "cpu")


def with_values(store: Store, data: bytes, digest_of: bytes | None = None) -> Path:
    """Put other values, and if asked their digest, in the place of those of the small store."""
    file = store.file(MODEL, case())
    if digest_of is not None:
        document = json.loads(file.read_text())
        document["cases"]["fp8_e4m3"]["layer_0"]["values"] = digest(digest_of)
        file.write_text(json.dumps(document) + "\n")
    file.with_suffix(".safetensors").write_bytes(data)
    return file.with_suffix(".safetensors")


KEY = "fp8_e4m3/layer_0"
BAD_VALUES: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "others": ({KEY: np.float32([1, 3])}, f"{KEY}: these are not the values that belong to the figures"),
    "fewer": ({KEY: np.float32([1])}, f"{KEY}: these are not the values that belong to the figures"),
    "none": ({}, f"{KEY}: figures without values"),
    "of another case": ({"int8/layer_0": np.float32([1, 2])}, f"{KEY}: figures without values"),
    "more": ({KEY: np.float32([1, 2]), "int8/layer_0": np.ones(1, "f4")}, "int8/layer_0: values without figures"),
}
BAD_ROWS = {
    "float64": (np.float64([1, 2]), "expected one row of float32, found float64 of shape [2]"),
    "float16": (np.float16([1, 2]), "expected one row of float32, found float16 of shape [2]"),
    "int32": (np.int32([1, 2]), "expected one row of float32, found int32 of shape [2]"),
    "scalar": (np.array(1, "f4"), "expected one row of float32, found float32 of shape []"),
    "matrix": (np.ones((1, 2), "f4"), "expected one row of float32, found float32 of shape [1, 2]"),
    "empty": (np.ones(0, "f4"), "expected one row of float32, found float32 of shape [0]"),
    "nan": (np.float32([1, math.nan]), "value 1 is not finite"),
    "inf": (np.float32([-math.inf, 1]), "value 0 is not finite"),
}


@pytest.mark.parametrize(("tensors", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_values_that_are_not_those_of_the_figures_are_told(
    store: Store, small: tuple[Path, Path], tensors: dict[str, np.ndarray], message: str
) -> None:
    file = with_values(store, save(tensors))
    with pytest.raises(BaselineError) as caught:
        store.read(MODEL, "cpu")
    assert str(caught.value) == f"{file}: {message}. {remedy(file.with_suffix('.*'))}"


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_values_of_another_kind_are_told_even_if_the_digest_fits(
    store: Store, small: tuple[Path, Path], row: np.ndarray, message: str
) -> None:
    file = with_values(store, save({KEY: row}), row.tobytes())
    with pytest.raises(BaselineError) as caught:
        store.read(MODEL, "cpu")
    assert str(caught.value) == f"{file}: {KEY}: {message}. {remedy(file.with_suffix('.*'))}"


def test_values_of_a_type_that_numpy_does_not_know_are_told(store: Store, small: tuple[Path, Path]) -> None:
    header = json.dumps({KEY: {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    with_values(store, struct.pack("<Q", len(header)) + header + bytes(4), bytes(4))
    with pytest.raises(
        BaselineError, match=r"mode_2_1\.safetensors: (is not safetensors|fp8_e4m3/layer_0: expected one)"
    ):
        store.read(MODEL, "cpu")


def test_half_a_pair_is_told(store: Store, small: tuple[Path, Path]) -> None:
    file, values_file = small
    both = file.with_suffix(".*")
    values = values_file.read_bytes()
    values_file.unlink()
    with pytest.raises(BaselineError) as caught:
        store.read(MODEL, "cpu")
    assert str(caught.value) == f"cannot read {values_file}: No such file or directory. {remedy(both)}"
    values_file.write_bytes(values)
    figures = file.read_bytes()
    file.unlink()
    for attempt in (lambda: store.read(MODEL, "cpu"), lambda: store.write(MODEL, "cpu", {case(): entry(1)})):
        with pytest.raises(BaselineError) as caught:
            attempt()
        expected = "values without figures: there is no mode_2_1.json beside it"
        assert str(caught.value) == f"{values_file}: {expected}. {remedy(both)}"
    file.write_bytes(put(',\n    "values": "b9c80b5a"', "")(figures))
    with pytest.raises(BaselineError, match=r"safetensors: values without figures: no case of mode_2_1\.json has any"):
        store.read(MODEL, "cpu")


def test_a_clean_merge_of_figures_with_the_values_of_one_side_is_told(store: Store) -> None:
    store.write(MODEL, "cpu", {case("layer_0"): entry(1, 1)})
    values_file = store.file(MODEL, case()).with_suffix(".safetensors")
    ours = values_file.read_bytes()
    store.write(MODEL, "cpu", {case("layer_1"): entry(2, 2)})
    values_file.write_bytes(ours)
    with pytest.raises(BaselineError, match="fp8_e4m3/layer_1: figures without values"):
        store.read(MODEL, "cpu")


def test_no_cut_of_a_file_passes(store: Store, small: tuple[Path, Path]) -> None:
    for file in small:
        whole = file.read_bytes()
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            with pytest.raises(BaselineError):
                store.read(MODEL, "cpu")
        file.write_bytes(whole + b"more")
        with pytest.raises(BaselineError):
            store.read(MODEL, "cpu")
        file.write_bytes(whole)
    assert store.read(MODEL, "cpu") == {case(): entry(0.5, 1.0, 2.0)}


def test_no_broken_byte_changes_the_values_or_crashes_the_reader(store: Store, small: tuple[Path, Path]) -> None:
    for file in small:
        whole = file.read_bytes()
        for index in range(len(whole)):
            file.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
            try:
                found = store.read(MODEL, "cpu")
            except BaselineError:
                continue
            assert [entry.values for entry in found.values()] == [(1.0, 2.0)]
        file.write_bytes(whole)


def test_a_folder_in_the_place_of_a_file_and_the_reverse_are_told(store: Store, small: tuple[Path, Path]) -> None:
    file, values_file = small
    for path in (values_file, file):
        path.unlink()
        path.mkdir()
        with pytest.raises(BaselineError, match=rf"cannot read {path}: Is a directory\. Restore it with"):
            store.read(MODEL, "cpu")
    shutil.rmtree(store.folder(MODEL, "cpu"))
    store.folder(MODEL, "cpu").write_text("")
    with pytest.raises(BaselineError, match=r"cannot read .*tiny-mamba/cpu: Not a directory"):
        store.read(MODEL, "cpu")
    with pytest.raises(
        BaselineError, match=r"cannot write .*tiny-mamba/cpu: File exists\. The old baselines are untou"
    ):
        store.write(MODEL, "cpu", {case(): entry(1)})
    shutil.rmtree(store.root)
    store.root.mkdir()
    (store.root / MODEL).write_text("")
    with pytest.raises(BaselineError, match=r"cannot read .*tiny-mamba/cpu: Not a directory"):
        store.read(MODEL, "cpu")
    (store.root / MODEL).unlink()
    (store.root / MODEL).symlink_to(store.root / "nowhere")
    assert store.read("other", "cpu") == {}


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, who may read and write everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that nobody may enter: those of tmp_path are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_files_and_folders_without_permission_are_told(open_folder: Path) -> None:
    store = Store(open_folder / "baselines")
    store.write(MODEL, "cpu", {case(): entry(1, 2)})
    file = store.file(MODEL, case())
    before = files(store.root)
    try:
        file.parent.chmod(0o555)
        with as_nobody(), pytest.raises(BaselineError) as caught:
            store.write(MODEL, "cpu", {case(): entry(2, 3)})
        message = f"cannot write {file}.partial: Permission denied. The old baselines are untouched."
        assert str(caught.value) == message
        for path, mode in ((file, 0), (file.with_suffix(".safetensors"), 0), (file.parent, 0), (file.parent.parent, 0)):
            kept = path.stat().st_mode
            path.chmod(mode)
            with as_nobody(), pytest.raises(BaselineError, match=r"cannot read .*: Permission denied\. Restore it"):
                store.read(MODEL, "cpu")
            path.chmod(kept)
        store.root.chmod(0o555)
        with as_nobody(), pytest.raises(BaselineError, match=r"cannot write .*/other: Permission denied\. The old"):
            store.write("other", "cpu", {case(): entry(2, 3)})
        assert files(store.root) == before
    finally:
        file.parent.chmod(0o755)
        store.root.chmod(0o755)


# ----------------------------------------------------------------------------------------------------- accidents


def two_states() -> tuple[Entries, Entries]:
    """Every way a mode can change: figures, values, values that come or go, a mode that comes or goes, none."""
    old = {
        case(mode="figures"): entry(1, 1, 2),
        case(mode="values.2"): entry(1, 1, 2),
        case(mode="values.2", layer="layer_1"): entry(1, 3),
        case(mode="gains"): entry(1),
        case(mode="loses"): entry(1, 1),
        case(mode="goes"): entry(1, 1),
        case(mode="goes_too"): entry(1),
        case(mode="same"): entry(1, 1),
    }
    new = {
        case(mode="figures"): entry(2, 1, 2),
        case(mode="values.2"): entry(1, 2, 1),
        case(mode="values.2", layer="layer_2"): entry(1, 4),
        case(mode="gains"): entry(2, 2),
        case(mode="loses"): entry(2),
        case(mode="comes"): entry(2, 2),
        case(mode="comes_too"): entry(2),
        case(mode="same"): entry(1, 1),
    }
    return old, new


def move(store: Store, old: Entries, new: Entries) -> None:
    store.write(MODEL, "cpu", new, drop=old.keys() - new.keys())


def of_mode(entries: Entries, mode: str) -> Entries:
    return {case: entry for case, entry in entries.items() if case.mode == mode}


def assert_each_mode_is_whole(found: Entries, *states: Entries) -> None:
    for mode in {case.mode for state in states for case in state}:
        assert of_mode(found, mode) in [of_mode(state, mode) for state in states], mode


class Killed(BaseException):
    pass


@contextmanager
def interrupted(after: int, error: Callable[[], BaseException], *, once: bool) -> Iterator[list[str]]:
    """The system call after the first `after` ones fails, and with it all later ones unless `once`."""
    calls: list[str] = []

    def patched(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(*given: object, **options: object) -> None:
            calls.append(name)
            if len(calls) == after + 1 or (len(calls) > after and not once):
                raise error()
            if name != "fsync":  # slow, and without effect on what another process sees
                real(*given, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink", "fsync"):
            patch.setattr(os, name, patched(name, getattr(os, name)))
        yield calls


def kill_at(after: int, store: Store, old: Entries, new: Entries) -> bool:
    """Whether the write was still under way at that call."""
    with interrupted(after, Killed, once=False):
        try:
            move(store, old, new)
        except Killed:
            return True
    return False


def test_a_kill_before_any_system_call_leaves_old_or_new(store: Store) -> None:
    old, new = two_states()
    for after in itertools.count():
        shutil.rmtree(store.root, ignore_errors=True)
        move(store, {}, old)
        killed = kill_at(after, store, old, new)
        found = store.read(MODEL, "cpu")
        assert_each_mode_is_whole(found, old, new)
        assert killed or found == new
        move(store, old, new)
        assert store.read(MODEL, "cpu") == new
        assert not list(store.root.rglob("*.partial"))
        if not killed:
            break
    assert after == 28


def test_a_second_kill_while_the_first_is_mended_leaves_old_or_new(store: Store) -> None:
    hard = ("values.2", "loses", "goes", "comes")
    old, new = ({case: entry for case, entry in state.items() if case.mode in hard} for state in two_states())
    third = {case: entry(3, *was.values, 3.0) for case, was in (old | new).items()} | {case(mode="goes"): entry(9)}
    move(store, {}, old)
    saved = store.root.with_name("saved")
    shutil.copytree(store.root, saved)
    for first in itertools.count():
        shutil.rmtree(store.root)
        shutil.copytree(saved, store.root)
        if not kill_at(first, store, old, new):
            break
        torn = store.root.with_name("torn")
        shutil.rmtree(torn, ignore_errors=True)
        shutil.copytree(store.root, torn)
        for second in range(first % 5, 60, 5):
            shutil.rmtree(store.root)
            shutil.copytree(torn, store.root)
            between = store.read(MODEL, "cpu")
            under_way = kill_at(second, store, between, third)
            assert_each_mode_is_whole(store.read(MODEL, "cpu"), between, third)
            if not under_way:
                assert store.read(MODEL, "cpu") == third
                break


def test_the_folder_is_synced_between_the_stages(store: Store) -> None:
    """Or a power cut could keep a later rename and lose an earlier one."""
    old, new = two_states()
    move(store, {}, old)
    with interrupted(10_000, Killed, once=True) as calls:
        move(store, old, new)
    rounds = ["".join(names) for synced, names in itertools.groupby(calls, lambda name: name == "fsync") if not synced]
    assert [(names.count("replace"), names.count("unlink")) for names in rounds] == [(2, 0), (6, 2), (3, 2)]
    assert calls[-1] == "fsync"
    assert calls.index("replace") == 6 + 3 + 1  # the JSON of 6 modes, the values of 3, the folder


def test_an_error_at_any_system_call_is_told_and_harmless(store: Store) -> None:
    old, new = two_states()
    full = OSError(errno.ENOSPC, "No space left on device")
    seen = set()
    for after in itertools.count():
        shutil.rmtree(store.root, ignore_errors=True)
        move(store, {}, old)
        before = files(store.root)
        try:
            with interrupted(after, lambda: full, once=True):
                move(store, old, new)
        except BaselineError as problem:
            text = str(problem)
            assert text.startswith(f"cannot write {store.folder(MODEL, 'cpu')}")
            assert ": No space left on device. " in text
            if "The old baselines are untouched." in text:
                seen.add("untouched")
                assert files(store.root) == before
            else:
                seen.add("half way")
                assert "Every mode is wholly old or wholly new; run the update again once the cause is gone." in text
                assert_each_mode_is_whole(store.read(MODEL, "cpu"), old, new)
            move(store, old, new)
        else:
            break
        assert store.read(MODEL, "cpu") == new
    assert seen == {"untouched", "half way"}


def run(script: str, *arguments: object) -> str:
    """Run a script in another process, with the functions of this module."""
    command = [
        sys.executable,
        "-c",
        f"from tests.gate.baselines.test_baselines import *\n{script}",
        *map(str, arguments),
    ]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout


def many(step: int) -> Entries:
    """50 modes; those with a number that 5 divides come and go, every seventh gains and loses its values."""
    return {
        case(f"layer_{layer}", mode=f"mode_{mode}"): entry(
            step + mode, *([] if mode % 7 == step % 2 else [float(step), float(layer)])
        )
        for mode in range(50)
        for layer in range(2)
        if mode % 5 or step % 2
    }


KILL = """
import random, signal, time
os.fsync = lambda descriptor: None  # slow, and without effect on what another process sees
store, chance = Store(Path(sys.argv[1])), random.Random(0)
move(store, {}, many(0))
started = time.perf_counter()
move(store, many(0), many(1))
duration = time.perf_counter() - started
between = 0
for kill in range(100):
    if kill >= 10 and between >= 3:
        break
    now = store.read(MODEL, "cpu")
    ready, child_ready = os.pipe()
    child = os.fork()
    if not child:
        os.write(child_ready, b".")
        step = kill
        while True:
            move(store, store.read(MODEL, "cpu"), many(step % 4))
            step += 1
    os.read(ready, 1)
    time.sleep(chance.uniform(0, 3 * duration))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready), os.close(child_ready)
    found = store.read(MODEL, "cpu")
    assert_each_mode_is_whole(found, now, *(many(step) for step in range(4)))
    between += bool(list(store.root.rglob("*.partial")))
move(store, store.read(MODEL, "cpu"), many(3))
assert store.read(MODEL, "cpu") == many(3)
assert not list(store.root.rglob("*.partial"))
print(between)
"""


def test_sigkill_at_a_random_moment_leaves_old_or_new(tmp_path: Path) -> None:
    assert int(run(KILL, tmp_path)) >= 3, "the kills should come in the middle of a write"


LIMIT = """
import resource
store = Store(Path(sys.argv[1]))
move(store, {}, many(0))
before = files(store.root)
longest = max(len(data) for data in files(store.root).values())
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in (0, 1, 100, longest // 2, longest - 1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        move(store, many(0), many(2))
    except BaselineError as problem:
        text = str(problem)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "cannot write" in text and ".partial: File too large. The old baselines are untouched." in text, text
    assert files(store.root) == before
move(store, many(0), many(2))
assert store.read(MODEL, "cpu") == many(2)
"""


def test_a_limit_on_the_size_of_files_changes_nothing(tmp_path: Path) -> None:
    run(LIMIT, tmp_path)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_changes_nothing(tiny_disk: Path) -> None:
    store = Store(tiny_disk / "baselines")
    move(store, {}, many(0))
    before = files(store.root)
    free = os.statvfs(tiny_disk)
    (tiny_disk / "filler").write_bytes(bytes((free.f_bavail - 10) * free.f_bsize))
    with pytest.raises(BaselineError, match=r"\.partial: No space left on device\. The old baselines are untouched\.$"):
        move(store, many(0), many(2))
    assert files(store.root) == before
    assert store.read(MODEL, "cpu") == many(0)
    (tiny_disk / "filler").unlink()
    move(store, many(0), many(2))
    assert store.read(MODEL, "cpu") == many(2)


WRITE_ONE_LAYER_AT_A_TIME = """
os.fsync = lambda descriptor: None
store = Store(Path(sys.argv[1]))
for index in range(30):
    store.write(MODEL, "cpu", {case(f"{sys.argv[2]}_{index}"): entry(index, index)})
    store.read(MODEL, "cpu")
"""


def test_two_writers_do_not_lose_each_others_cases(tmp_path: Path) -> None:
    both = "\n".join(
        [
            "child = os.fork()",
            "sys.argv[2] = 'child' if not child else 'parent'",
            WRITE_ONE_LAYER_AT_A_TIME,
            "assert not child or os.waitpid(child, 0)[1] == 0",
        ]
    )
    run(both, tmp_path, "")
    assert len(Store(tmp_path).read(MODEL, "cpu")) == 60


@pytest.mark.parametrize("reader", ["read", "size_per_case", "models", "devices"])
def test_a_reader_waits_for_a_writer(store: Store, small: tuple[Path, Path], reader: str) -> None:
    arguments = {"models": (), "devices": (MODEL,)}.get(reader, (MODEL, "cpu"))
    waiting = threading.Thread(target=getattr(store, reader), args=arguments)
    folder = os.open(small[0].parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
    finally:
        os.close(folder)
    waiting.join(10)
    assert not waiting.is_alive()


def test_strangers_in_the_folder_do_not_matter(store: Store, small: tuple[Path, Path]) -> None:
    for name in ("notes.txt", ".gitkeep", "mode_2_1.json~", "mode_9.12345678.partial", "mode_9.json.partial"):
        (store.folder(MODEL, "cpu") / name).write_text("?")
    assert store.read(MODEL, "cpu") == {case(): entry(0.5, 1.0, 2.0)}
    store.write(MODEL, "cpu", {case(mode="mode_3"): entry(3)})
    left = sorted(path.name for path in store.folder(MODEL, "cpu").iterdir())
    assert left == [".gitkeep", "mode_2_1.json", "mode_2_1.json~", "mode_2_1.safetensors", "mode_3.json", "notes.txt"]


# --------------------------------------------------------------------------------------------------- environment


def test_the_environment_is_kept_once_per_model(store: Store) -> None:
    facts = {"torch": "2.13.0", "cpu": "AVX512", "note": ""}
    store.write_environment("org/name", facts)
    file = store.root / "org_name" / "environment.json"
    assert file.read_text() == (
        '{\n "environment": {\n  "cpu": "AVX512",\n  "note": "",\n  "torch": "2.13.0"\n },\n'
        ' "model": "org/name",\n "version": 1\n}\n'
    )
    assert store.environment("org/name") == facts
    before = file.stat()
    store.write_environment("org/name", dict(reversed(facts.items())))
    assert file.stat().st_ino == before.st_ino
    store.write_environment("org/name", {})
    assert store.environment("org/name") == {}
    assert [path.name for path in file.parent.iterdir()] == ["environment.json"]
    assert store.models() == store.devices("org/name") == []


def test_defects_of_the_environment_are_told(store: Store) -> None:
    store.write_environment(MODEL, {"torch": "2.13.0"})
    file = store.root / MODEL / "environment.json"
    whole = file.read_bytes()
    for change, message in (
        (put('"2.13.0"', "2"), "environment.torch: expected a text, found 2"),
        (put('{\n  "torch": "2.13.0"\n }', "[]"), "environment: expected texts by name"),
        (
            put('"version": 1', '"version": 3'),
            "was written by a newer probe: version 3, this one reads 1. Upgrade probe.",
        ),
        (put('"version": 1', '"version": 1, "more": 1'), "the key 'more' is unknown"),
        (put(MODEL, "other"), "models 'other' and 'tiny-mamba' would share"),
    ):
        file.write_bytes(change(whole))
        with pytest.raises(BaselineError) as caught:
            store.environment(MODEL)
        assert message in str(caught.value)
        assert str(file) in str(caught.value)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(BaselineError, match=r"environment\.json: .*\. Restore it with: git checkout -- "):
            store.environment(MODEL)
    file.write_bytes(whole)
    with pytest.raises(BaselineError, match="environment of tiny-mamba: threads is 2, expected a text"):
        store.write_environment(MODEL, {"threads": 2})  # type: ignore[dict-item]
    assert file.read_bytes() == whole


# ------------------------------------------------------------------------------------------------------- changes


def test_changes_are_listed_in_the_order_of_the_layers() -> None:
    old = {case(f"layer_{index}"): entry(0.000231, 1, 2) for index in (10, 2, 0, 1)} | {case("logits"): entry()}
    new = {case(f"layer_{index}"): entry(0.000502, 1, 2) for index in (0, 10, 2, 3)} | {case("logits"): entry()}
    name = "mode_2_1-layer_{}-cpu-fp8_e4m3  {}".format
    assert changes(old, new) == [
        name(0, "injected.mse  2.31e-04 -> 5.02e-04"),
        name(1, "dropped"),
        name(2, "injected.mse  2.31e-04 -> 5.02e-04"),
        name(3, "new"),
        name(10, "injected.mse  2.31e-04 -> 5.02e-04"),
    ]
    assert changes(new, new) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (0.99987, 0.99971, "0.99987 -> 0.99971"),
        (0.999871, 0.999872, "0.999871 -> 0.999872"),
        (2.31111e-4, 2.31112e-4, "2.31111e-04 -> 2.31112e-04"),
        (2.31e-4, 0.0, "2.31e-04 -> 0"),
        (1e-12, -1e-12, "1.00e-12 -> -1.00e-12"),
        (5.0, 123456.0, "5 -> 1.2346e+05"),
        (0.0009999999, 0.001, None),
        (2.311111e-4, 2.311112e-4, None),
        (0.0, -0.0, None),
    ],
)
def test_a_figure_is_listed_if_its_six_digits_differ(old: float, new: float, told: str | None) -> None:
    line = [f"mode_2_1-layer_0-cpu-fp8_e4m3  injected.mse  {told}"] if told else []
    assert changes({case(): entry(old)}, {case(): entry(new)}) == line


def test_figures_that_come_and_go_and_golden_values_are_listed() -> None:
    old = {case(): Entry({"injected.mse": Stored(1), "injected.old": Stored(1)}, (1.0, 2.0, 3.0))}
    new = {case(): Entry({"injected.mse": Stored(1, 0.5, "why"), "injected.new": Stored(0.25)}, (1.0, 2.5))}
    assert [line.split("  ", 1)[1] for line in changes(old, new)] == [
        "injected.new  new 0.25",
        "injected.old  dropped",
        "golden values  2 of 3 changed",
    ]


def test_settings_are_stored_with_a_case_and_listed_where_they_change(store: Store) -> None:
    old = Entry({"a.b": Stored(1)}, (1.0,), {"outlier.threshold": "20.0", "tokens": "9f (3)"})
    new = replace(old, settings={"outlier.threshold": "64.0", "model.dtype": "float32"})
    store.write(MODEL, "cpu", {case(): old})
    assert store.read(MODEL, "cpu") == {case(): old}
    assert Entry.from_dict(old.as_dict()) == old
    assert [line.split("  ", 1)[1] for line in changes({case(): old}, {case(): new})] == [
        "model.dtype  none -> float32",
        "outlier.threshold  20.0 -> 64.0",
        "tokens  9f (3) -> none",
    ]
    store.write(MODEL, "cpu", {case(): new})
    assert store.read(MODEL, "cpu") == {case(): new}


def test_numbers_in_names_are_sorted_by_size() -> None:
    ordered = ["", "1", "2", "10", "layer", "layer_2", "layer_10", "layer_10.a2", "layer_10.a10", "logits"]
    mixed = ordered[::-1]
    assert sorted(mixed, key=natural_key) == ordered
    assert sorted(["layer_2", "layer_02"], key=natural_key) == sorted(["layer_02", "layer_2"], key=natural_key)


def test_loading_the_module_does_not_load_torch() -> None:
    code = "import sys, probe.gate.baselines.store; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_foreign_safetensors_with_a_name_of_ours_are_read(store: Store, small: tuple[Path, Path]) -> None:
    """Another version of safetensors may lay the same values out differently."""
    save_file({KEY: np.float32([1, 2])}, small[1], metadata={"made": "elsewhere"})
    assert store.read(MODEL, "cpu") == {case(): entry(0.5, 1.0, 2.0)}
