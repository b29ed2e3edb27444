"""Atomic writes: whole or not at all, whatever happens; and locks between processes."""

import errno
import fcntl
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from probe.files.atomic import (
    create,
    link_or_copy,
    locked,
    make_folder,
    move,
    remove_unfinished,
    sync,
    sync_tree,
    write,
    writing,
)
from tests.files.accidents import files_of_at_most, kill, read_only


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# ---------------------------------------------------------------------------------------------------------- write


def test_text_and_bytes_are_written_and_folders_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.txt"
    assert write(path, "größer\n") == path
    assert path.read_bytes() == "größer\n".encode()
    write(str(path), b"\xff")
    assert path.read_bytes() == b"\xff"
    assert names(tmp_path) == ["a", "a/b", "a/b/x.txt"]


def test_text_that_is_not_unicode_is_spelled_out(tmp_path: Path) -> None:
    assert write(tmp_path / "x", "\ud800").read_bytes() == b"\\ud800"


def test_a_kill_before_any_step_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    for steps in itertools.count():
        (tmp_path / "x").write_text("old")
        killed = kill("atomic.write('x', 'n' * 100_000)", tmp_path, steps=steps)
        text = (tmp_path / "x").read_text()
        assert text in ("old", "n" * 100_000)
        remove_unfinished(tmp_path)
        assert names(tmp_path) == ["x"]
        if not killed:
            break
    assert text != "old"
    assert steps >= 4, "open, fsync, rename, open, fsync"


def test_a_full_disk_leaves_the_old_file_and_names_the_new_one(tmp_path: Path) -> None:
    write(tmp_path / "x", "old")
    with pytest.raises(OSError, match=r"File too large: '\S+/x'"), files_of_at_most(10_000):
        write(tmp_path / "x", "n" * 100_000)
    assert (tmp_path / "x").read_text() == "old"
    assert names(tmp_path) == ["x"]


def test_a_folder_without_permission_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:
        with read_only(Path(name)), pytest.raises(PermissionError, match=rf"Permission denied: '{name}/x'"):
            write(Path(name) / "x", "text")
        assert names(Path(name)) == []


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []

    def note(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, (tmp_path / "x").exists()))

    monkeypatch.setattr(os, "fsync", note)
    write(tmp_path / "x", "text")
    assert synced == [(f".x.{os.getpid()}.tmp", False), (tmp_path.name, True)]


def test_what_is_no_regular_file_is_written_to_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write(tmp_path / "pipe", "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"'\S+/folder'"):
        write(tmp_path / "folder", "text")
    assert names(tmp_path) == ["folder", "pipe"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_text("old")
    (tmp_path / "x").symlink_to("elsewhere/x")
    write(tmp_path / "x", "new")
    assert (tmp_path / "x").is_symlink()
    assert (tmp_path / "elsewhere" / "x").read_text() == "new"
    assert names(tmp_path) == ["elsewhere", "elsewhere/x", "x"]


def test_only_the_leftovers_of_a_process_are_removed(tmp_path: Path) -> None:
    for name in (".x.12.tmp", ".x.13.tmp", "x.tmp", "y"):
        (tmp_path / name).touch()
    remove_unfinished(tmp_path, 12)
    assert names(tmp_path) == [".x.13.tmp", "x.tmp", "y"]
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["x.tmp", "y"]
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / ".x.12.tmp").touch()
    remove_unfinished(tmp_path / "made", 12)
    assert names(tmp_path) == ["x.tmp", "y"], "a folder that was made for the write goes too"
    remove_unfinished(tmp_path / "never", 12)


def test_a_refusal_is_one_message_of_the_callers_own(tmp_path: Path) -> None:
    class OwnError(Exception):
        pass

    message = rf"^cannot write {tmp_path}: No space left on device\. What was there before is whole\.$"
    with pytest.raises(OwnError, match=message), writing(tmp_path, OwnError):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(KeyError), writing(tmp_path, OwnError):
        raise KeyError


# -------------------------------------------------------------------------------------------- files and folders


def test_a_new_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "x").hardlink_to(tmp_path / "old")
    with create(tmp_path / "x") as stream:
        stream.write(b"new")
        stream.seek(0)
        assert stream.read() == b"new"
    (tmp_path / "y").symlink_to("old")
    create(tmp_path / "y").close()
    assert (tmp_path / "old").read_text() == "old"
    assert (tmp_path / "x").read_text() == "new"
    assert (tmp_path / "y").read_text() == ""


def test_a_kill_while_a_folder_is_moved_leaves_it_whole_in_one_place(tmp_path: Path) -> None:
    for steps in itertools.count():
        write(tmp_path / "a" / "x", "text")
        killed = kill("atomic.move(Path('a'), Path('b'))", tmp_path, steps=steps)
        found = names(tmp_path)
        assert found in (["a", "a/x"], ["b", "b/x"])
        if not killed:
            break
        move(tmp_path / found[0], tmp_path / "a")
    assert found[0] == "b"


def test_folders_are_made_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr("probe.files.atomic.sync", lambda path: synced.append(path.name))
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert synced == [tmp_path.name, "a"]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")


def test_a_second_name_or_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("text")
    link_or_copy(tmp_path / "x", tmp_path / "linked")
    assert (tmp_path / "linked").samefile(tmp_path / "x")

    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(tmp_path / "x", tmp_path / "copied")
    assert not (tmp_path / "copied").samefile(tmp_path / "x")
    assert (tmp_path / "copied").read_text() == "text"


def test_a_tree_is_synced_before_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a" / "x", "text")
    synced: list[str] = []

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", note)
    sync_tree(tmp_path)
    assert synced == ["a", "x", tmp_path.name]
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "missing")


# ---------------------------------------------------------------------------------------------------------- locks

HOLD = """
import sys, time
from pathlib import Path
from probe.files.atomic import locked
with locked(Path(sys.argv[1]), shared=sys.argv[2] == "shared"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path, kind: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def is_free(path: Path, *, shared: bool) -> bool:
    try:
        with locked(path, shared=shared, wait=False):
            return True
    except BlockingIOError:
        return False


@pytest.mark.parametrize("what", ["folder", "file"])
@pytest.mark.parametrize(
    ("held", "shared", "free"),
    [("alone", False, False), ("alone", True, False), ("shared", False, False), ("shared", True, True)],
)
def test_one_writer_or_many_readers(tmp_path: Path, what: str, held: str, shared: bool, free: bool) -> None:
    path = tmp_path if what == "folder" else tmp_path / "lock"
    with holder(path, held) as process:
        assert is_free(path, shared=shared) == free
        process.kill()
    assert is_free(path, shared=False), "the lock went with its process"


def test_without_locks_the_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "lock"):
        assert (tmp_path / "lock").exists()
    assert is_free(tmp_path, shared=False)


def test_an_error_in_the_block_frees_the_lock(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert not is_free(tmp_path, shared=True)
    with pytest.raises(RuntimeError), locked(tmp_path):
        raise RuntimeError
    assert is_free(tmp_path, shared=False)
