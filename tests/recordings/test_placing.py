"""A folder is a whole recording or not there; what was there before stays."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from probe.recordings import RecordingError, read_recording, write_recording
from probe.running.recipes import Recipe
from tests.recordings.examples import FLOAT, RECIPE, SMALL_TOKENS, Parts, files, small_parts, write_small


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


CALLS = ((Path, "mkdir"), (os, "replace"), (Path, "rename"), (os, "pwrite"), (os, "fsync"))


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


def test_all_is_on_the_disk_before_it_is_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "r"
    synced: list[tuple[str, bool]] = []

    def note(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, target.exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_small(target)
    names = [re.sub(r"^\.(.+)\.\d+\.tmp$", r"\1", name) for name, _ in synced]
    assert {"fp32.safetensors", "manifest.json", f"{RECIPE}.safetensors", "tokens.safetensors"} <= set(names[:-2])
    assert names[-2].endswith(".partial")
    assert synced[-1] == (tmp_path.name, True)
    assert not any(in_place for _, in_place in synced[:-1])


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
        names = sorted(path.name for path in partial.iterdir())
        assert names == ["fp32.safetensors", "tokens.safetensors"]  # on disk, without a manifest
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
