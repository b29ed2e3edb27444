"""Accidents of the tests of files: a kill before any step, a full disk, a folder without permission."""

import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
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
#: The same for `killed_before`.
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def kill(code: str, folder: Path, *, steps: int) -> bool:
    """Run code in `folder` in a process of its own and kill it after so many steps; False if it needs no more."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED + code, str(steps), str(folder)], capture_output=True, text=True
    )
    assert done.returncode in (0, -9), done.stderr
    return done.returncode == -9


def killed_before(event: int, action: Callable[[], object], *, folder: Path) -> str:
    """Run `action` in a fork that SIGKILL ends before its file event of that number, counted from 0, in `folder`.

    Events are openings for writing, renames, deletions, links, new and deleted folders, and fsync. The name of the
    event; empty if there were fewer.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        left, root, true_sync = [event], str(folder), os.fsync

        def meet(name: str) -> None:
            left[0] -= 1
            if left[0] < 0:
                os.write(writer, name.encode())
                os.kill(os.getpid(), signal.SIGKILL)

        def audit(name: str, details: tuple[object, ...]) -> None:
            place = str(details[0]) if details else ""
            if name in ("os.remove", "os.rmdir") and int(str(details[1])) >= 0:  # relative to an open folder: rmtree
                place = os.path.join(os.readlink(f"/proc/self/fd/{details[1]}"), place)
            is_ours = place.startswith(root)
            if is_ours and (name in CHANGES or (name == "open" and int(str(details[2])) & TO_WRITE)):
                meet(name)

        os.fsync = lambda descriptor: (meet("fsync"), true_sync(descriptor))[1]  # type: ignore[assignment,func-returns-value]
        sys.addaudithook(audit)
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        name = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    assert status == (signal.SIGKILL if name else 0), status
    return name


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
