"""Interrupted recordings are continued or refused, never taken as whole."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import probe
from probe.recordings import (
    RecordingError,
    publishing as publishing_module,
    read_recording,
)
from tests.files.accidents import files_of_at_most, read_only
from tests.recordings.examples import Log, files, same
from tests.recordings.models import KILL, Stack


@pytest.fixture(scope="module")
def what_a_kill_leaves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SIGKILL in the middle of the second of three recipes; a real process, a real signal."""
    root = tmp_path_factory.mktemp("killed")
    (root / KILL).touch()
    command = [sys.executable, "-m", "probe.commands", "record", "--model", "tests.recordings.models:mortal"]
    command += ["--modes", "fp32", "fp16", "bf16", "--samples", "2", "--seqlen", "8", "--out", "r"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert sorted(os.listdir(root)) == [str(KILL), "r.partial"]
    return root / "r.partial"


@pytest.fixture
def killed(tmp_path: Path, what_a_kill_leaves: Path) -> Path:
    shutil.copytree(what_a_kill_leaves, tmp_path / "r.partial")
    return tmp_path / "r"


MORTAL: dict[str, Any] = {
    "model": "tests.recordings.models:mortal",
    "modes": ["fp32", "fp16", "bf16"],
    "samples": 2,
    "seqlen": 8,
}


def test_a_killed_recording_is_told_refused_and_finished(killed: Path, tmp_path: Path) -> None:
    partial = tmp_path / "r.partial"
    assert not killed.exists()
    with pytest.raises(
        RecordingError, match=r"no folder .*/r\. .*r\.partial is an interrupted recording of it: run the"
    ):
        read_recording(killed)
    with pytest.raises(
        RecordingError, match=r"interrupted recording: 1 of 3 recipes are whole, fp16, bf16 missing\. Run"
    ):
        read_recording(partial)
    before = files(partial)
    assert "fp16.safetensors" in before, "the kill was in the middle of it"
    for change, words in (
        ({"layers": ["all"]}, r"layers first last -> all"),
        ({"seqlen": 16}, r"tokens 2 x 8, \w+ -> 2 x 16, \w+"),
        ({"modes": ["fp32", "fp16"]}, r"recipes fp32 fp16 bf16 -> fp32 fp16"),
        ({"layout": "npy"}, r"layout safetensors -> npy"),
        ({"taps": ["logits"]}, r"taps none -> logits"),
        ({"model": "tiny-mamba"}, r"model tests\.recordings\.models:mortal -> tiny-mamba"),
    ):
        with pytest.raises(
            RecordingError, match=rf"of something else: {words}.*\. Run the command that began it, or del"
        ):
            probe.record(killed, **(MORTAL | change))
    assert files(partial) == before
    log = Log()
    recording = probe.record(killed, **MORTAL, progress=log)
    assert f"continuing {partial}: fp32 recorded already" in log.lines
    assert {recipe for recipe, _ in log.steps} == {"fp16", "bf16"}, "what is whole is not run again"
    assert os.listdir(tmp_path) == ["r"]
    same(recording, probe.record(tmp_path / "at once", **MORTAL))


def test_a_killed_recording_can_be_started_again(killed: Path, tmp_path: Path) -> None:
    log = Log()
    probe.record(killed, **(MORTAL | {"modes": ["fp32"]}), restart=True, progress=log)
    assert log.lines[-1] == "[1/1] fp32"
    assert os.listdir(tmp_path) == ["r"]


def interrupted(tmp_path: Path, ids: list[Tensor], monkeypatch: pytest.MonkeyPatch, **more: Any) -> Path:
    """A recording that failed while it was put in its place: all recipes are whole."""

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publishing_module, "sync_tree", full)
        with pytest.raises(
            RecordingError, match=r"cannot write .*: No space left on device\. What was there before is"
        ):
            probe.record(tmp_path / "r", model=Stack(2), modes=["fp32", "bf16"], batches=ids, **more)
    return tmp_path / "r.partial"


@pytest.mark.parametrize("layout", ["safetensors", "npy", "npz", "pt"])
def test_a_disk_that_is_full_at_the_end_loses_nothing(
    tmp_path: Path, ids: list[Tensor], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    interrupted(tmp_path, ids, monkeypatch, layout=layout)
    assert os.listdir(tmp_path) == ["r.partial"]
    log = Log()
    found = probe.record(
        tmp_path / "r", model=Stack(2), modes=["fp32", "bf16"], batches=ids, layout=layout, progress=log
    )
    assert log.steps == []
    assert found == read_recording(tmp_path / "r")
    assert os.listdir(tmp_path) == ["r"]


def test_an_interrupted_recording_that_was_changed_is_refused(
    tmp_path: Path, ids: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = interrupted(tmp_path, ids, monkeypatch)
    file = partial / "fp32.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    again: dict[str, Any] = {"model": Stack(2), "modes": ["fp32", "bf16"], "batches": ids}
    with pytest.raises(RecordingError, match=r"cannot be used\. .*its sha256 is .*or delete it with --restart\."):
        probe.record(tmp_path / "r", **again)
    probe.record(tmp_path / "r", **again, restart=True)
    assert os.listdir(tmp_path) == ["r"]


def test_a_folder_of_ones_own_is_not_deleted_by_restart(tmp_path: Path, ids: list[Tensor]) -> None:
    (tmp_path / "r.partial").mkdir()
    (tmp_path / "r.partial" / "thesis.txt").write_text("years of work")
    for restart in (False, True):
        with pytest.raises(RecordingError, match=r"r\.partial is in the way and is no interrupted recording\. Move it"):
            probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids, restart=restart)
    assert files(tmp_path) == {"r.partial/thesis.txt": b"years of work"}


def test_two_processes_do_not_write_one_recording(tmp_path: Path, ids: list[Tensor]) -> None:
    class Intruder(Log):
        def step(self, recipe: str, name: str) -> None:
            if not self.steps:
                with pytest.raises(RecordingError, match=r"r\.partial is being written by another process\. Wait"):
                    probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids)
            super().step(recipe, name)

    log = Intruder()
    probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids, progress=log)
    assert log.steps
    read_recording(tmp_path / "r")


def test_a_disk_that_is_full_in_the_middle_keeps_the_recipes_that_are_whole(tmp_path: Path, ids: list[Tensor]) -> None:
    """fp32 takes twice the bytes of bf16: with a limit between them the first is whole, the second is not."""
    again: dict[str, Any] = {"model": Stack(2, width=512), "modes": ["bf16", "fp32"], "batches": ids}
    message = r"cannot write .*fp32\.safetensors: File too large\. What was there"
    with pytest.raises(RecordingError, match=message), files_of_at_most(50_000):
        probe.record(tmp_path / "r", **again)
    names = sorted(os.listdir(tmp_path / "r.partial"))
    assert names == ["bf16.safetensors", "manifest.json", "tokens.safetensors"]
    log = Log()
    probe.record(tmp_path / "r", **again, progress=log)
    assert {recipe for recipe, _ in log.steps} == {"fp32"}
    assert read_recording(tmp_path / "r").recipes == ("fp32", "bf16")


@pytest.mark.parametrize("layout", ["npy", "pt"])
def test_a_disk_that_is_full_while_a_layout_is_written_is_told(tmp_path: Path, ids: list[Tensor], layout: str) -> None:
    """The file of the recipe is a little smaller than the limit; an .npy of float32 and a .pt are larger."""
    again: dict[str, Any] = {"model": Stack(2, width=512), "modes": ["bf16"], "batches": ids, "layout": layout}
    again |= {"layers": ["first"], "taps": []}
    message = r"cannot write .*: File too large\. What was there before is whole\."
    with pytest.raises(RecordingError, match=message), files_of_at_most(19_200):
        probe.record(tmp_path / "r", **again)
    assert os.listdir(tmp_path) == ["r.partial"]
    probe.record(tmp_path / "r", **again)
    assert os.listdir(tmp_path) == ["r"]


def test_a_folder_without_permission_is_told(ids: list[Tensor]) -> None:
    message = r"cannot write .*r\.partial: Permission denied\. What was there"
    with tempfile.TemporaryDirectory() as name:
        with read_only(Path(name)), pytest.raises(RecordingError, match=message):
            probe.record(Path(name) / "r", model=Stack(2), modes=["fp32"], batches=ids)
        assert os.listdir(name) == []


def test_a_kill_between_the_two_renames_is_mended(tmp_path: Path, ids: list[Tensor]) -> None:
    probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids)
    (tmp_path / "r").rename(tmp_path / ".r.previous")
    with pytest.raises(
        RecordingError, match=r"\.r\.previous is what an interrupted overwriting left of it: rename it ba"
    ):
        read_recording(tmp_path / "r")
    probe.record(tmp_path / "r", model=Stack(2), modes=["bf16"], batches=ids)
    assert read_recording(tmp_path / "r").recipes == ("fp32", "bf16")
    assert os.listdir(tmp_path) == ["r"]
