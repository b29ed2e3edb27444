"""A folder is a whole recording or not there; what was there before stays."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import probe
from probe.recordings import (
    RecordingError,
    read_recording,
    write_recording,
)
from probe.running.recipes import Recipe
from tests.recordings.examples import FLOAT, RECIPE, SMALL_TOKENS, Parts, files, same, small_parts, write_small
from tests.recordings.models import Stack


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
    written = write_small(folder, overwrite=True)
    assert read_recording(folder) == written


def test_empty_folders_links_and_deep_paths_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write_small(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read_recording(tmp_path / "empty").recipes == ("fp32", RECIPE)
    write_small(tmp_path / "a" / "b.c" / "d")
    assert read_recording(tmp_path / "a" / "b.c" / "d").recipes == ("fp32", RECIPE)


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
        whole = r"No space left on device\. (What was there before is whole|The recording is whole; the same command)"
        assert isinstance(fault, KeyboardInterrupt) or re.search(whole, told)
        if files(tmp_path) != before:  # all was written, and is put in its place by the next call
            assert name in ("replace", "rename", "mkdir", "fsync")
            write_small(target, 5, overwrite=True)
            assert files(target).keys() == {"manifest.json", *read_recording(target).manifest.files}
            shutil.rmtree(target)
            if old:
                write_small(target)
        assert files(tmp_path) == before
        assert beside(target) == []
    else:
        pytest.fail("it never ended")


def test_all_is_on_the_disk_before_it_is_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "r"
    synced: list[tuple[str, bool]] = []

    def note(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, (target / "manifest.json").exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_small(target)
    names = [re.sub(r"^\.(.+)\.\d+\.tmp$", r"\1", name) for name, _ in synced]
    place = names.index("manifest.json")
    assert {"fp32.safetensors", f"{RECIPE}.safetensors", "tokens.safetensors"} <= set(names[:place])
    assert names[place + 1 :] == [".new", *["r"] * 4], "then all is moved, the manifest last"
    assert synced[-1] == ("r", True)
    assert not any(in_place for _, in_place in synced[:-1])


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_comes_while_it_is_recorded_is_not_lost(tmp_path: Path, overwrite: bool) -> None:
    def recipes() -> Iterator[tuple[Recipe, Parts]]:
        yield FLOAT, small_parts()
        (tmp_path / "r" / "thesis.txt").write_text("years of work")

    with pytest.raises(RecordingError, match="is not empty and is no recording"):
        write_recording(tmp_path / "r", recipes(), model="m", device="d", batches=SMALL_TOKENS, overwrite=overwrite)
    assert files(tmp_path) == {"r/thesis.txt": b"years of work"}


# -------------------------------------------------------------------------------------------------- adding, overwriting


@pytest.mark.parametrize("layout", ["safetensors", "npy", "npz"])
def test_modes_are_added_to_a_recording_of_the_same(tmp_path: Path, ids: list[Tensor], layout: str) -> None:
    both = probe.record(tmp_path / "both", model=Stack(2), modes=["fp32", "bf16"], batches=ids, layout=layout)
    probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids, layout=layout)
    (tmp_path / "r" / "notes.txt").write_text("mine")
    added = probe.record(tmp_path / "r", model=Stack(2), modes=["bf16"], batches=ids, layout=layout)
    assert added == read_recording(tmp_path / "r")
    assert added.manifest.recipes == both.manifest.recipes
    same(added, both)
    assert (tmp_path / "r" / "notes.txt").read_text() == "mine"
    assert "notes.txt" not in added.manifest.files
    assert sorted(os.listdir(tmp_path)) == ["both", "r"]
    if layout == "npz":
        stats = json.loads((tmp_path / "r" / "first_layer_io_all_modes_stats.json").read_text())
        assert list(stats["modes"]) == ["fp32", "bf16"]


def test_a_second_archive_beside_the_first(tmp_path: Path, ids: list[Tensor]) -> None:
    given: dict[str, Any] = {"model": Stack(2), "batches": ids, "layout": "npz"}
    probe.record(tmp_path / "r", **given, modes=["fp32"], output_file="a.npz")
    found = probe.record(tmp_path / "r", **given, modes=["bf16"], output_file="b.npz")
    assert found == read_recording(tmp_path / "r")
    both = probe.record(tmp_path / "both", **given, modes=["fp32", "bf16"])
    same(found, both)


@pytest.mark.parametrize("layout", ["safetensors", "npy", "npz", "pt"])
def test_a_mode_that_is_there_is_replaced_only_if_asked(tmp_path: Path, ids: list[Tensor], layout: str) -> None:
    target = tmp_path / "r"
    probe.record(target, model=Stack(2), modes=["fp32", "bf16"], batches=ids, layout=layout)
    before = files(target)
    message = r"r has fp32 already\. Leave them out, give another folder, or overwrite them \(--overwrite\)\."
    with pytest.raises(RecordingError, match=message):
        probe.record(target, model=Stack(2), modes=["fp32"], batches=ids, layout=layout)
    assert files(target) == before
    probe.record(target, model=Stack(2), modes=["fp32"], batches=ids, layout=layout, overwrite=True)
    again = probe.record(tmp_path / "new", model=Stack(2), modes=["fp32", "bf16"], batches=ids, layout=layout)
    same(read_recording(target), again)
    shutil.rmtree(tmp_path / "new")
    stamped = {name for name in before if "all_modes" in name} | {"manifest.json"}
    after = files(target)
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} <= stamped
    assert read_recording(target).recipes == ("fp32", "bf16")
    assert os.listdir(tmp_path) == ["r"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": Stack(3)}, r"weights \w{16} -> \w{16}"),
        ({"batches": [torch.zeros(3, 6, dtype=torch.int64)]}, r"tokens 3 x 6, \w{16} -> 3 x 6, \w{16}"),
        ({"layout": "npy"}, "layout safetensors -> npy"),
        ({"layers": ["all"], "model": Stack(2), "taps": ["logits"]}, r"bf16 would have other tensors than fp32 in the"),
    ],
    ids=["weights", "tokens", "layout", "taps"],
)
def test_modes_are_not_added_to_a_recording_of_something_else(
    tmp_path: Path, ids: list[Tensor], change: dict[str, Any], message: str
) -> None:
    probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids)
    before = files(tmp_path)
    with pytest.raises(RecordingError, match=message):
        probe.record(tmp_path / "r", **{"model": Stack(2), "modes": ["bf16"], "batches": ids, **change})
    assert files(tmp_path) == before
    assert os.listdir(tmp_path) == ["r"]


def test_what_is_no_recording_is_left_alone(tmp_path: Path, ids: list[Tensor]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RecordingError, match=r"is not empty and is no recording\. Give another folder\."):
            probe.record(tmp_path, model=Stack(2), modes=["fp32"], batches=ids, overwrite=overwrite, restart=True)
        with pytest.raises(RecordingError, match=r"thesis\.txt is a file\. Expected the name of a folder to make\."):
            probe.record(tmp_path / "thesis.txt", model=Stack(2), modes=["fp32"], batches=ids, overwrite=overwrite)
    assert files(tmp_path) == {"thesis.txt": b"years of work"}
    assert not tmp_path.with_name(f"{tmp_path.name}.partial").exists()


def test_several_modes_of_pt_have_a_folder_each(tmp_path: Path, ids: list[Tensor]) -> None:
    recording = probe.record(tmp_path / "r", model=Stack(2), modes=["fp32", "bf16"], layout="pt", batches=ids)
    assert (tmp_path / "r" / "mode_fp32" / "layer_1_output.pt").is_file()
    assert (tmp_path / "r" / "mode_bf16" / "metadata.pt").is_file()
    assert recording == read_recording(tmp_path / "r")
    probe.record(tmp_path / "r", model=Stack(2), modes=["fp16"], layout="pt", batches=ids)
    assert read_recording(tmp_path / "r").recipes == ("fp32", "fp16", "bf16")
    probe.record(tmp_path / "one", model=Stack(2), layout="pt", batches=ids)
    with pytest.raises(RecordingError, match=r"one holds fp32, and the layout pt has one mode in a folder\. Give anot"):
        probe.record(tmp_path / "one", model=Stack(2), modes=["bf16"], layout="pt", batches=ids)
