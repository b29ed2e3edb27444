"""What a baseline file says: it reads well in a review, reads back as written, and never holds what must not be."""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from probe.gate.baselines.format import BaselineError, Entry, Stored, path_part, rounded
from probe.gate.baselines.store import Store, changes
from probe.gate.cases import Case
from tests.gate.baselines.examples import MODEL, Entries, case, entry, files, golden

GOLDEN = """{
 "cases": {
  "fp8_e4m3": {
   "layer_0": {
    "digests": {
     "corners.scan.u": "fd61a03a",
     "weights.in_proj.weight": "9f86d081"
    },
    "injected": {
     "correlation": [0.99987, 2e-07],
     "mse": [0.000231235, 1.2e-09, "größerer Block"]
    },
    "propagated": {
     "mse": [1.0, 0.0]
    },
    "values": "2f9cc761:AACAPwAAIMDNzMw9"
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
 "environment": {
  "cpu": "AVX512",
  "torch": "2.13.0"
 },
 "mode": "mode_2_1",
 "model": "tiny-mamba",
 "version": 3
}
"""


def test_the_json_reads_well_in_a_review(store: Store) -> None:
    store.write(MODEL, golden(), environment={"torch": "2.13.0", "cpu": "AVX512"})
    assert files(store.root) == {"tiny-mamba/cpu/mode_2_1.json": GOLDEN.encode()}


def test_what_reads_back_is_the_rounded_entry(store: Store) -> None:
    store.write(MODEL, golden())
    assert store.read(MODEL, "cpu") == {case: rounded(entry) for case, entry in golden().items()}
    assert rounded(golden()[case()]).figures["injected.mse"] == Stored(0.000231235, 1.2e-9, "größerer Block")
    assert math.copysign(1, rounded(entry(-0.0)).figures["injected.mse"].value) == 1


def test_bytes_depend_on_neither_order_nor_history(store: Store, tmp_path: Path) -> None:
    store.write(MODEL, golden() | {case(mode="bf16", fmt=""): entry(1, 2, 3)})
    other = Store(tmp_path / "other")
    other.write(MODEL, {case("old"): entry(7, 7), case(): entry(9, 9)})
    for key, value in reversed((golden() | {case(mode="bf16", fmt=""): entry(1, 2, 3)}).items()):
        other.write(MODEL, {key: value})
    other.write(MODEL, {}, drop=[case("old")])
    assert files(other.root) == files(store.root)


def test_a_float_mode_has_a_dash_for_its_format(store: Store) -> None:
    store.write(MODEL, {case(mode="bf16", fmt=""): entry(1, 2)})
    file = store.file(MODEL, case(mode="bf16", fmt=""))
    assert list(json.loads(file.read_text())["cases"]) == ["-"]
    assert list(store.read(MODEL, "cpu")) == [Case("bf16", "layer_0", "cpu", "")]


printable = st.characters(codec="utf-8", exclude_categories=["C", "Z"], include_characters=" ")
names = st.text(printable, min_size=1, max_size=6)
finite = st.floats(allow_nan=False, allow_infinity=False, max_value=1e307, min_value=-1e307)
stored = st.builds(Stored, finite, finite.map(abs), st.text(printable, max_size=8))
figure_names = st.builds(
    "{}.{}".format, names.filter(lambda name: "." not in name and name not in ("values", "settings")), names
)
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
        store.write(MODEL, first)
        once = files(store.root)
        found = store.read(MODEL, "cpu")
        assert found == {case: rounded(entry) for case, entry in first.items()}
        assert {case: rounded(entry) for case, entry in found.items()} == found
        assert changes(first, found) == []
        store.write(MODEL, second, drop=list(first))
        assert store.read(MODEL, "cpu") == {case: rounded(entry) for case, entry in second.items()}
        store.write(MODEL, found, drop=list(second))
        assert files(store.root) == once


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
    "surrogate": (Entry({"a.b": Stored(1, 0, "\ud800")}), "is not printable and is never stored; nothing was written"),
    "control": (Entry({"a.b": Stored(1, 0, "red \x1b[31m")}), "is not printable and is never stored"),
    "name with a newline": (Entry({"a.b\n": Stored(1)}), "'a.b\\n' is not printable and is never stored"),
}


@pytest.mark.parametrize(("bad", "message"), NOT_STORED.values(), ids=NOT_STORED)
def test_what_must_not_be_stored_is_refused_before_anything_is_written(store: Store, bad: Entry, message: str) -> None:
    store.write(MODEL, {case(): entry(0.5, 1.0)})
    before = files(store.root)
    with pytest.raises(BaselineError) as caught:
        store.write(MODEL, {case("layer_1", mode="mode_0"): entry(1), case(): bad})
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
        store.write(MODEL, {bad: entry()})
    assert not store.root.exists()


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
        ("a/..", "_"),
        ("..", "_"),
        (".", "_"),
        ("", "_"),
        ("/", "_"),
        ("...", "_"),
        (".hidden", "hidden"),
        ("cuda:0", "cuda_0"),
        ("recorded:/data/run 7/", "recorded_run_7"),
        ("recorded:", "recorded__"),
        ("recorded:/..", "recorded__"),
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


def test_loading_the_module_does_not_load_torch() -> None:
    code = "import sys, probe.gate.baselines.store; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False"


def test_a_count_is_stored_with_all_its_digits() -> None:
    """Of a large layer 6 digits would let a whole matrix pass."""
    entry = Entry({"weights.on_grid": Stored(6_738_415_617.0), "injected.mse": Stored(6_738_415_617.0)})
    figures = rounded(entry).figures
    assert figures["weights.on_grid"].value == 6_738_415_617
    assert figures["injected.mse"].value == 6_738_420_000


def test_a_file_of_version_2_is_read_without_its_sketch_of_corners(store: Store) -> None:
    """Its cases then have no digests: they fail until they are updated, and nothing is taken for a defect."""
    figures = {"injected.mse": Stored(0.5), "injected.distance": Stored(0.0), "corners.distance": Stored(0.0)}
    store.write(MODEL, {case(): Entry(figures, tuple(float(i) for i in range(120)))})
    file = store.file(MODEL, case())
    file.write_bytes(file.read_bytes().replace(b'"version": 3', b'"version": 2'))
    del figures["corners.distance"]
    assert store.read(MODEL, "cpu") == {case(): Entry(figures, tuple(float(i) for i in range(104)))}


def test_digests_that_changed_are_told_by_an_update() -> None:
    before = Entry({"injected.mse": Stored(0.5)}, digests={"weights.D": "9f86d081", "weights.A_log": "fd61a03a"})
    after = Entry({"injected.mse": Stored(0.5)}, digests={"weights.D": "00000000", "corners.scan.u": "fd61a03a"})
    lines = changes({case(): before}, {case(): after})
    assert lines == [f"{case()}  digests  3 changed: corners.scan.u, weights.A_log, weights.D"]


def test_a_digest_that_is_no_text_is_refused(store: Store) -> None:
    with pytest.raises(BaselineError, match=r"digest 'weights\.D' is '' and cannot be stored"):
        store.write(MODEL, {case(): Entry({"injected.mse": Stored(0.5)}, digests={"weights.D": ""})})
