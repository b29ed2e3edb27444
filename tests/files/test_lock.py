"""Locks between processes."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from probe.files.lock import locked

HOLD = """
import sys, time
from pathlib import Path
from probe.files.lock import locked
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
