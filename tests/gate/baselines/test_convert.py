"""Baselines of an older probe: recognised with one message, converted without a change, at any interruption."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from probe.gate.baselines.convert import convert, main
from probe.gate.baselines.format import BaselineError, Entry, Stored, digest, json_lines
from probe.gate.baselines.store import Store
from tests.files.accidents import killed_before
from tests.gate.baselines.examples import MODEL, case, entry, files

ENTRIES = {
    case(): Entry({"injected.mse": Stored(0.000231235, 1.2e-9, "größerer Block")}, (1.0, -2.5), {"num_levels": "7"}),
    case("logits", fmt=""): entry(0.1 + 0.2, 0.1),
    case(mode="mode_3"): entry(1e-300),
}
FACTS = {"torch": "2.13.0", "input.tokens": "9f (3)", "anchors": f"anchors-{digest(b'anchors')}.safetensors"}


@pytest.fixture
def old(store: Store) -> Store:
    """ENTRIES as version 1 wrote them: figures, golden values and the environment in three files."""
    store.write(MODEL, ENTRIES, environment=FACTS)
    for file in store.folder(MODEL, "cpu").iterdir():
        document = json.loads(file.read_text())
        del document["environment"]
        rows = {}
        for format, layers in document["cases"].items():
            for layer, groups in layers.items():
                if "values" in groups:
                    groups["values"], _, _ = groups["values"].partition(":")
                    key = case(layer, mode=document["mode"], fmt=format.strip("-"))
                    rows[f"{format}/{layer}"] = np.array(ENTRIES[key].values, "f4")
        file.write_text(json.dumps({**document, "version": 1}) + "\n")
        if rows:
            file.with_suffix(".safetensors").write_bytes(save(rows))
    (store.root / MODEL / FACTS["anchors"]).write_bytes(b"anchors")
    (store.root / MODEL / "environment.json").write_text(
        json.dumps({"environment": FACTS, "model": MODEL, "version": 1})
    )
    return store


def assert_converted(store: Store) -> None:
    expected = Store(store.root.with_name("expected"))
    expected.write(MODEL, ENTRIES, environment=FACTS)
    for file in expected.folder(MODEL, "cpu").iterdir():  # version 2, which an update brings to the present one
        file.write_bytes(file.read_bytes().replace(b'"version": 3', b'"version": 2'))
    anchors = {f"{MODEL}/{FACTS['anchors']}": b"anchors"}
    assert files(store.root) == files(expected.root) | anchors
    assert store.environment(MODEL) == FACTS


def test_the_old_layout_is_recognised_with_one_message(old: Store) -> None:
    message = (
        f"the baselines in {old.root} were written by an older probe, with several files for a mode. Convert them, "
        f"which changes no figure, with: python -m probe.gate.baselines.convert {old.root}"
    )
    before = files(old.root)
    attempts: tuple[Callable[[], object], ...] = (
        lambda: old.read(MODEL, "cpu"),
        lambda: old.devices(MODEL),
        lambda: old.models(),
        lambda: old.check_layout(MODEL),
        lambda: old.write(MODEL, {case(): entry(1)}),
    )
    for attempt in attempts:
        with pytest.raises(BaselineError) as caught:
            attempt()
        assert str(caught.value) == message
    assert files(old.root) == before


def test_everything_is_converted_and_nothing_is_changed(old: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(old.root)]) == 0
    printed = capsys.readouterr().out
    assert "mode_2_1.json: 2 figures, 3 golden values of 2 cases: unchanged" in printed
    assert "tiny-mamba: 3 facts of the environment; removed environment.json" in printed
    assert_converted(old)
    old.check_layout(MODEL)
    assert main([str(old.root)]) == 0
    assert "nothing to convert" in capsys.readouterr().out
    assert_converted(old)


def test_a_conversion_that_was_killed_is_completed_by_another(old: Store) -> None:
    saved = old.root.with_name("saved")
    shutil.copytree(old.root, saved)
    events = set()
    for moment in itertools.count():
        shutil.rmtree(old.root)
        shutil.copytree(saved, old.root)
        event = killed_before(moment, lambda: list(convert(old.root)), folder=old.root)
        if event:
            events.add(event)
        if (old.root / MODEL / "environment.json").exists():
            with pytest.raises(BaselineError, match=f"convert {old.root}$"):
                old.check_layout(MODEL)
        else:
            assert_converted(old)
        list(convert(old.root))
        assert_converted(old)
        if not event:
            break
    assert moment > 8, "replacing two modes and removing what they had"
    assert events == {"os.mkdir", "open", "fsync", "os.rename", "os.remove"}


def test_values_that_a_killed_write_of_version_1_left_aside_are_found(old: Store) -> None:
    file = old.file(MODEL, case())
    values = file.with_suffix(".safetensors")
    values.rename(file.with_suffix(f".{digest(file.read_bytes())}.partial"))
    list(convert(old.root))
    assert_converted(old)


@pytest.mark.parametrize(
    "name", ["cpu/mode_2_1.safetensors", "cpu/mode_2_1.json", FACTS["anchors"], "environment.json"]
)
def test_damaged_files_are_not_converted(old: Store, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = old.root / MODEL / name
    data = file.read_bytes()
    file.write_bytes(data[:-3] + b"?" + data[-2:])
    before = files(old.root)
    assert main([str(old.root)]) == 2
    assert "first" in capsys.readouterr().err
    assert files(old.root) == before


def test_a_figure_that_would_change_stops_the_conversion(old: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison does not lean on the reader: it would notice a wrong rendering."""
    before = files(old.root)
    real = json_lines
    monkeypatch.setattr(
        "probe.gate.baselines.convert.json_lines", lambda whole: real(whole).replace(b"1.2e-09", b"1.3e-09")
    )
    with pytest.raises(BaselineError, match="the figures of fp8_e4m3/layer_0 are not those of the old file"):
        list(convert(old.root))
    assert files(old.root) == before


def test_paths_that_a_shell_would_split_are_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "my baselines" / MODEL
    folder.mkdir(parents=True)
    (folder / "environment.json").write_text("{}")
    with pytest.raises(BaselineError, match=r"convert '.*/my baselines'$"):
        Store(folder.parent).check_layout(MODEL)
