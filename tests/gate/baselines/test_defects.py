"""Damaged baselines: every defect is told with its file and key, and is never taken for an absence of baselines."""

import base64
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from probe.gate.baselines.format import BaselineError, digest
from probe.gate.baselines.store import Store
from tests.gate.baselines.examples import MODEL, case, entry, files, put


def remedy(file: Path) -> str:
    return (
        f"Restore it with: git checkout -- {shlex.quote(str(file))}\n"
        f"or delete {file} and make it again with: pytest --update-baselines"
    )


ROW = "[0.5, 1e-09]"
DEFECTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "is not JSON that can be read (Expecting value: line 1"),
    "cut": (lambda data: data[:80], "is not JSON that can be read (Expecting ',' delimiter: line 6"),
    "merge marks": (put(' "device"', "<<<<<<< HEAD\n"), "is not JSON that can be read (Expecting property name"),
    "no last newline": (lambda data: data[:-1], "the last line does not end: the file is cut off"),
    "not UTF-8": (lambda data: data.replace(b"cpu", b"c\xff"), "is not JSON that can be read ('utf-8' codec can't"),
    "utf-16": (
        lambda data: data.decode().encode("utf-16"),
        "is not JSON that can be read ('utf-8' codec can't decode byte 0xff in position 0",
    ),
    "a list": (lambda data: b"[1]\n", "expected an object with named keys, found [1]"),
    "null": (lambda data: b"null\n", "expected an object with named keys, found null"),
    "deep": (lambda data: b"[" * 100_000, "is not JSON that can be read (maximum recursion depth"),
    "long number": (put("0.5", "1" * 5000), "is not JSON that can be read (Exceeds the limit"),
    "nan": (put("0.5", "NaN"), "holds NaN, which is never stored"),
    "infinity": (put("0.5", "-Infinity"), "holds -Infinity, which is never stored"),
    "too large": (
        put("0.5", "1e999"),
        "layer_0.injected.mse[0]: expected a finite number, found Infinity",
    ),
    "too large an integer": (put("0.5", "9" * 400), "mse[0]: expected a finite number, found 99999"),
    "bool": (put("0.5", "true"), "cases.fp8_e4m3.layer_0.injected.mse[0]: expected a finite number, found true"),
    "text": (put("0.5", '"0.5"'), 'cases.fp8_e4m3.layer_0.injected.mse[0]: expected a finite number, found "0.5"'),
    "bool spread": (put("1e-09", "false"), "expected a finite number, found false"),
    "negative spread": (put("1e-09", "-1e-09"), "injected.mse: the spread is -1e-09, expected 0 or more"),
    "bare number": (put(ROW, "0.5"), "injected.mse: expected [value, spread] or [value, spread, reason], found 0.5"),
    "one number": (put(ROW, "[0.5]"), "expected [value, spread] or [value, spread, reason], found [0.5]"),
    "four": (put(ROW, '[1, 2, "a", 4]'), "[value, spread, reason], found [1, 2, "),
    "reason": (put(ROW, "[0.5, 0, 1]"), "injected.mse[2]: expected a text, found 1"),
    "empty reason": (put(ROW, '[0.5, 0, ""]'), 'injected.mse[2]: expected a text, found ""'),
    "key twice": (put(f'"mse": {ROW}', f'"mse": {ROW}, "mse": [1, 0]'), "the key 'mse' is there twice"),
    "unknown key": (put('"version": 3', '"version": 3, "when": 2'), "the key when is unknown"),
    "missing key": (put(' "device": "cpu",\n', ""), "the key device is missing"),
    "newer": (
        put('"version": 3', '"version": 4, "more": 1'),
        "version: was written by a newer probe, 4; this one reads 3. Upgrade probe.",
    ),
    "version 0": (put('"version": 3', '"version": 0'), "version: expected a whole number, 1 or more, found 0"),
    "version text": (put('"version": 3', '"version": "3"'), 'version: expected a whole number, 1 or more, found "3"'),
    "version bool": (put('"version": 3', '"version": true'), "version: expected a whole number, 1 or more, found true"),
    "no version": (put(',\n "version": 3', ""), "the key version is missing"),
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
        "cases.fp8_e4m3.layer_1: has no figures",
    ),
    "settings only": (
        put('"layer_0"', '"layer_1": {"settings": {"a": "b"}}, "layer_0"'),
        "cases.fp8_e4m3.layer_1: has no figures",
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
    "fact": (put('"2.13.0"', "2"), "environment.torch: expected a text, found 2"),
    "no facts": (put('{\n  "torch": "2.13.0"\n }', "[]"), "environment: expected an object with named keys, found []"),
    "device number": (put('"cpu"', "1"), "device: expected a text, found 1"),
    "other mode": (put("mode_2_1", "mode_3"), "mode: expected the one that the file is named for, found 'mode_3'"),
}


@pytest.mark.parametrize(("change", "message"), DEFECTS.values(), ids=DEFECTS)
def test_a_defect_of_the_json_is_told(
    store: Store, small: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    file = small
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(BaselineError) as caught:
        store.read(MODEL, "cpu")
    text = str(caught.value)
    assert text.startswith(f"{file}: ")
    assert message in text
    assert "Upgrade" in text or text.endswith(". " + remedy(file))
    before = files(store.root)
    with pytest.raises(BaselineError):  # what cannot be read is never written over
        store.write(MODEL, {case("layer_1"): entry(1)})
    assert files(store.root) == before


def test_no_depth_of_nesting_crashes_the_reader(store: Store, small: Path) -> None:
    for depth in range(800, 1000):  # about the limit of the interpreter
        small.write_bytes(b"[" * depth + b"]" * depth + b"\n")
        with pytest.raises(BaselineError, match=r"json: (expected an object with named|is not JSON that can be read)"):
            store.read(MODEL, "cpu")


KEY = "cases.fp8_e4m3.layer_0.values"
ENCODED = "a digest and float32 in base64"


def encoded(data: bytes, name: str | None = None) -> str:
    return f"{name or digest(data)}:{base64.b64encode(data).decode()}"


BAD_VALUES = {
    "others": (
        encoded(np.array([1, 3], "f4").tobytes(), "b9c80b5a"),
        "the values do not have the digest b9c80b5a: they are",
    ),
    "fewer": (encoded(np.array([1], "f4").tobytes(), "b9c80b5a"), "the values do not have the digest b9c80b5a"),
    "digest only": ("b9c80b5a", f"expected {ENCODED}, found"),
    "empty": (encoded(b""), f"expected {ENCODED}, found"),
    "no base64": ("b9c80b5a:AAAA*", f"expected {ENCODED}, found"),
    "cut": (encoded(np.array([1, 2], "f4").tobytes())[:-1], f"expected {ENCODED}, found"),
    "float16": (encoded(np.array([1], "f2").tobytes()), f"expected {ENCODED}, found"),
    "nan": (encoded(np.array([1, np.nan], "f4").tobytes()), "value 1 is not finite"),
    "inf": (encoded(np.array([-np.inf, 1], "f4").tobytes()), "value 0 is not finite"),
}


@pytest.mark.parametrize(("values", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_values_that_are_damaged_or_of_another_kind_are_told(
    store: Store, small: Path, values: str, message: str
) -> None:
    small.write_bytes(put(encoded(np.array([1, 2], "f4").tobytes()), values)(small.read_bytes()))
    with pytest.raises(BaselineError) as caught:
        store.read(MODEL, "cpu")
    assert str(caught.value).startswith(f"{small}: {KEY}: {message}")
    assert str(caught.value).endswith(remedy(small))


def test_a_clean_merge_of_lines_is_read_and_half_a_line_is_told(store: Store, small: Path) -> None:
    """Figures and values of a case are in one file, so a merge by lines keeps or takes them whole."""
    ours = small.read_bytes()
    store.write(MODEL, {case("layer_1"): entry(2, 2)}, environment={"torch": "2.13.0"})
    theirs = small.read_bytes()
    assert set(theirs.splitlines()) > set(ours.splitlines()) - {b"   }"}
    small.write_bytes(theirs.replace(b"AAAAQA==", b"AACAQA=="))
    with pytest.raises(BaselineError, match=r"layer_1\.values: the values do not have the digest"):
        store.read(MODEL, "cpu")


def test_no_cut_of_a_file_passes(store: Store, small: Path) -> None:
    whole = small.read_bytes()
    for length in range(len(whole)):
        small.write_bytes(whole[:length])
        with pytest.raises(BaselineError):
            store.read(MODEL, "cpu")
    small.write_bytes(whole + b"more")
    with pytest.raises(BaselineError):
        store.read(MODEL, "cpu")
    small.write_bytes(whole)
    assert store.read(MODEL, "cpu") == {case(): entry(0.5, 1.0, 2.0)}


def test_no_broken_byte_changes_the_values_or_crashes_the_reader(store: Store, small: Path) -> None:
    whole = small.read_bytes()
    refused = 0
    for index in range(len(whole)):
        small.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        try:
            found = store.read(MODEL, "cpu")
        except BaselineError:
            refused += 1
            continue
        assert [entry.values for entry in found.values()] == [(1.0, 2.0)]
    assert refused > len(whole) / 2


def test_a_folder_in_the_place_of_a_file_and_the_reverse_are_told(store: Store, small: Path) -> None:
    small.unlink()
    small.mkdir()
    with pytest.raises(BaselineError, match=rf"{small}: cannot be read: Is a directory\. Restore it with"):
        store.read(MODEL, "cpu")
    shutil.rmtree(store.folder(MODEL, "cpu"))
    store.folder(MODEL, "cpu").write_text("")
    with pytest.raises(BaselineError, match=r"tiny-mamba/cpu: cannot be read: Not a directory"):
        store.read(MODEL, "cpu")
    with pytest.raises(
        BaselineError, match=r"cannot write .*tiny-mamba/cpu: File exists\. The old baselines are untou"
    ):
        store.write(MODEL, {case(): entry(1)})
    shutil.rmtree(store.root)
    store.root.mkdir()
    (store.root / MODEL).write_text("")
    with pytest.raises(BaselineError, match=r"tiny-mamba(/cpu)?: cannot be read: Not a directory"):
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
    store.write(MODEL, {case(): entry(1, 2)})
    file = store.file(MODEL, case())
    before = files(store.root)
    try:
        file.parent.chmod(0o555)
        with as_nobody(), pytest.raises(BaselineError) as caught:
            store.write(MODEL, {case(): entry(2, 3)})
        message = f"cannot write {file}: Permission denied. The old baselines are untouched."
        assert str(caught.value) == message
        for path, mode in ((file, 0), (file.parent, 0), (file.parent.parent, 0)):
            kept = path.stat().st_mode
            path.chmod(mode)
            with as_nobody(), pytest.raises(BaselineError, match=r"cannot be read: Permission denied\. Restore it"):
                store.read(MODEL, "cpu")
            path.chmod(kept)
        store.root.chmod(0o555)
        with (
            as_nobody(),
            pytest.raises(BaselineError, match=r"cannot write .*/other: Permission denied\. What was"),
        ):
            store.write("other", {case(): entry(2, 3)})
        assert files(store.root) == before
    finally:
        file.parent.chmod(0o755)
        store.root.chmod(0o755)
