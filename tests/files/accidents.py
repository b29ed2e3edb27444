"""Accidents of the tests of files: a kill before any step, a full disk, a folder without permission."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: The steps before which a process is killed: calls that Python reports to audit hooks, and fsync.
KILLED = """
import os, signal, sys
from pathlib import Path
from probe.files import atomic
steps = int(sys.argv[1])

def step(event, *details):
    global steps
    if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "fsync"):
        steps -= 1
        if steps < 0:
            os.kill(os.getpid(), signal.SIGKILL)

true, os.fsync = os.fsync, lambda descriptor: (step("fsync"), true(descriptor))
os.chdir(sys.argv[2])
sys.addaudithook(step)
"""


def kill(code: str, folder: Path, *, steps: int) -> bool:
    """Run code in `folder` in a process of its own and kill it after so many steps; False if it needs no more."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED + code, str(steps), str(folder)], capture_output=True, text=True
    )
    assert done.returncode in (0, -9), done.stderr
    return done.returncode == -9


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to let a file grow further, as a full disk does."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody, not even root, may write to the folder."""
    mode, root = folder.stat().st_mode, os.geteuid() == 0
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)  # root may write anywhere; nobody may not
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(mode)
