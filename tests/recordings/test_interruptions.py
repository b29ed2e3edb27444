"""Interrupted recordings are continued or refused, never taken as whole."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import probe
from probe.data.tokenizers import ByteTokenizer
from probe.models.loading import load_model
from probe.recordings import (
    RecordingError,
    publishing as publishing_module,
    read_recording,
)
from probe.running.measurement import NotAppliedError
from tests.files.accidents import files_of_at_most, killed_before, read_only
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
    assert os.listdir(root / "r") == [".partial"]
    return root / "r"


@pytest.fixture
def killed(tmp_path: Path, what_a_kill_leaves: Path) -> Path:
    shutil.copytree(what_a_kill_leaves, tmp_path / "r")
    return tmp_path / "r"


MORTAL: dict[str, Any] = {
    "model": "tests.recordings.models:mortal",
    "modes": ["fp32", "fp16", "bf16"],
    "samples": 2,
    "seqlen": 8,
}


def test_a_killed_recording_is_told_refused_and_finished(killed: Path, tmp_path: Path) -> None:
    partial = killed / ".partial"
    for folder in (killed, partial):
        with pytest.raises(
            RecordingError, match=r"interrupted recording: 1 of 3 recipes are whole, fp16, bf16 missing\. Run"
        ):
            read_recording(folder)
    before = files(partial)
    assert "fp16.safetensors" in before, "the kill was in the middle of it"
    for change, words in (
        ({"layers": ["all"]}, r"layers first last -> all"),
        ({"seqlen": 16}, r"tokens 2 x 8, \w+ -> 2 x 16, \w+"),
        ({"modes": ["fp16", "bf16"]}, r"recipes fp32 fp16 bf16 -> fp16 bf16"),
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


@pytest.fixture
def halved() -> Iterator[None]:
    """A mode that changes what it is given, and is calibrated."""

    def build(model: nn.Module, format: str, calibration: Any) -> nn.Module:
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        return model

    probe.register_mode("halved", build)
    yield
    probe.unregister_mode("halved")


def interrupted(tmp_path: Path, ids: list[Tensor], monkeypatch: pytest.MonkeyPatch, **more: Any) -> Path:
    """A recording that failed while it was put in its place: all recipes are whole."""

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publishing_module, "sync_tree", full)
        given = {"model": Stack(2), "modes": ["fp32", "bf16"], "batches": ids, **more}
        with pytest.raises(
            RecordingError, match=r"cannot write .*: No space left on device\. What was there before is"
        ):
            probe.record(tmp_path / "r", **given)
    return tmp_path / "r" / ".partial"


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize("change", ["calibration", "configuration", "nothing"])
def test_what_is_left_goes_on_with_its_own_calibration_and_configuration_only(
    tmp_path: Path, ids: list[Tensor], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    text, model = tmp_path / "mine.txt", load_model("tiny-llama")
    text.write_text("abc" * 40)
    given: dict[str, Any] = {"model": model, "batches": ids, "modes": ["fp32", "halved"]}
    given |= {"calib_data": str(text), "calib_data_num": 1, "calib_seqlen": 16}
    interrupted(tmp_path, ids, monkeypatch, **given)
    if change == "calibration":
        text.write_text("xyz" * 40)
    elif change == "configuration":
        vars(model.model)["config"].rms_norm_eps = 1e-3
    log = Log()
    probe.record(tmp_path / "r", **given, progress=log)
    assert bool(log.steps) == (change != "nothing")
    assert any("deleting" in line for line in log.lines) == (change != "nothing")


@pytest.mark.parametrize("layout", ["safetensors", "npy", "npz", "pt"])
def test_a_disk_that_is_full_at_the_end_loses_nothing(
    tmp_path: Path, ids: list[Tensor], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    interrupted(tmp_path, ids, monkeypatch, layout=layout)
    assert os.listdir(tmp_path / "r") == [".partial"]
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
    (tmp_path / "r" / ".partial").mkdir(parents=True)
    (tmp_path / "r" / ".partial" / "thesis.txt").write_text("years of work")
    for restart in (False, True):
        with pytest.raises(RecordingError, match=r"thesis\.txt is in the way and is no part of a recording\. Move it"):
            probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids, restart=restart)
    assert files(tmp_path) == {"r/.partial/thesis.txt": b"years of work"}


def test_two_processes_do_not_write_one_recording(tmp_path: Path, ids: list[Tensor]) -> None:
    class Intruder(Log):
        def step(self, recipe: str, name: str) -> None:
            if not self.steps:
                with pytest.raises(RecordingError, match=r"r is being written by another process\. Wait"):
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
    names = sorted(os.listdir(tmp_path / "r" / ".partial"))
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
    assert os.listdir(tmp_path / "r") == [".partial"]
    probe.record(tmp_path / "r", **again)
    assert os.listdir(tmp_path) == ["r"]


def test_a_folder_without_permission_is_told(ids: list[Tensor]) -> None:
    message = r"cannot write .*/r: Permission denied\. What was there"
    with tempfile.TemporaryDirectory() as name:
        with read_only(Path(name)), pytest.raises(RecordingError, match=message):
            probe.record(Path(name) / "r", model=Stack(2), modes=["fp32"], batches=ids)
        assert os.listdir(name) == []


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    ("layout", "there", "modes"),
    [
        ("safetensors", [], ["fp32", "bf16"]),
        ("npy", ["fp32", "bf16"], ["fp32"]),
        ("npz", ["fp16"], ["bf16"]),
        ("pt", ["fp32"], ["fp32"]),
    ],
    ids=["new", "overwrite", "add", "replace"],
)
def test_a_kill_at_any_file_event_is_worked_on_from(
    tmp_path: Path, ids: list[Tensor], layout: str, there: list[str], modes: list[str]
) -> None:
    """By the same command, with --restart and with --overwrite; nothing is left over."""
    given: dict[str, Any] = {"model": Stack(1, 8), "batches": ids, "layout": layout, "taps": []}
    mine: dict[str, Any] = {**given, "modes": modes, "overwrite": bool({*modes} & {*there})}
    before = tmp_path / "before"
    before.mkdir()
    if there:
        probe.record(before, modes=there, **given)
    expected = probe.record(shutil.copytree(before, tmp_path / "expected"), **mine)
    event, seen = 0, set()
    while True:
        left = shutil.copytree(before, tmp_path / "left")
        met = killed_before(event, lambda left=left: probe.record(left, **mine), folder=left)  # type: ignore[misc]
        for more in ({}, {"restart": True}, {"overwrite": True}) if met else ():
            again = shutil.copytree(left, tmp_path / "again", symlinks=True)
            recording = probe.record(again, **{**mine, **more})
            same(recording, expected)
            assert recording == read_recording(again)
            assert names_in(again) == {"manifest.json", *recording.manifest.files}, (event, met, more)
            shutil.rmtree(again)
        if not met:
            break
        seen.add(met)
        event += 1
        shutil.rmtree(left)
    assert event > 15
    assert {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"} <= seen
    assert names_in(left) == names_in(expected.folder)


def test_a_folder_that_exists_is_written_into_not_replaced(
    tmp_path: Path, ids: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder of a shell must stay the same folder."""
    monkeypatch.chdir(tmp_path)
    inode = os.stat(".").st_ino
    for modes, overwrite in ((["fp32"], False), (["bf16"], False), (["fp32"], True)):
        probe.record(".", model=Stack(1, 8), batches=ids, modes=modes, overwrite=overwrite)
        assert os.stat(".").st_ino == os.stat(tmp_path).st_ino == inode
    assert read_recording(".").recipes == ("fp32", "bf16")
    assert list(tmp_path.parent.glob(f"*{tmp_path.name}?*")) == [], "nothing beside it"


def with_tokenizer(model: Stack) -> Stack:
    vars(model)["tokenizer"] = ByteTokenizer()
    return model


@pytest.fixture
def lazy() -> Iterator[None]:
    """A mode that changes nothing."""
    probe.register_mode("lazy", lambda model, format, calibration: model)
    yield
    probe.unregister_mode("lazy")


@pytest.mark.usefixtures("lazy")
def test_a_mode_that_is_not_applied_leaves_nothing_in_the_way(tmp_path: Path, ids: list[Tensor]) -> None:
    given: dict[str, Any] = {"model": with_tokenizer(Stack(2)), "batches": ids, "calib_data_num": 1, "calib_seqlen": 8}
    for after in (["fp32"], ["fp32", "bf16"], ["bf16"]):
        log = Log()
        with pytest.raises(NotAppliedError, match="lazy-int8 was not applied"):
            probe.record(tmp_path / "r", **given, modes=["fp32", "lazy"], progress=log)
        assert log.lines[-1].startswith(f"kept fp32 in {tmp_path}/r/.partial: a command that records them goes on")
        log = Log()
        probe.record(tmp_path / "r", **given, modes=after, progress=log)
        assert any("fp32 recorded already" in line for line in log.lines) == ("fp32" in after)
        assert any("deleting" in line for line in log.lines) == ("fp32" not in after)
        assert {recipe for recipe, _ in log.steps} == set(after) - {"fp32"} or "fp32" not in after
        assert read_recording(tmp_path / "r").recipes == tuple(after)
        assert names_in(tmp_path / "r") == {"manifest.json", "tokens.safetensors", *(f"{m}.safetensors" for m in after)}
        shutil.rmtree(tmp_path / "r")


@pytest.mark.usefixtures("lazy")
def test_what_an_error_left_of_other_layers_is_replaced(tmp_path: Path, ids: list[Tensor]) -> None:
    given: dict[str, Any] = {"model": with_tokenizer(Stack(2)), "batches": ids, "calib_data_num": 1, "calib_seqlen": 8}
    with pytest.raises(NotAppliedError):
        probe.record(tmp_path / "r", **given, modes=["fp32", "lazy"])
    probe.record(tmp_path / "r", **given, modes=["fp32"], layers=["all"], taps=["logits"])
    assert "logits" in read_recording(tmp_path / "r").names("fp32")
    assert os.listdir(tmp_path) == ["r"]
