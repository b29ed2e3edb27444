"""Accidents: a kill, a full disk or another writer leaves every mode wholly old or wholly new, with its anchors."""

import errno
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from probe.gate.baselines.format import BaselineError
from probe.gate.baselines.store import Store
from tests.files.accidents import killed_before
from tests.gate.baselines.examples import (
    MODEL,
    Entries,
    assert_each_mode_is_whole,
    case,
    entry,
    files,
    many,
    move,
    two_states,
)


class Killed(BaseException):
    pass


@contextmanager
def interrupted(after: int, error: Callable[[], BaseException], *, once: bool) -> Iterator[list[str]]:
    """The system call after the first `after` ones fails, and with it all later ones unless `once`."""
    calls: list[str] = []

    def patched(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(*given: object, **options: object) -> None:
            calls.append(name)
            if len(calls) == after + 1 or (len(calls) > after and not once):
                raise error()
            if name != "fsync":  # slow, and without effect on what another process sees
                real(*given, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink", "fsync"):
            patch.setattr(os, name, patched(name, getattr(os, name)))
        yield calls


def kill_at(after: int, store: Store, old: Entries, new: Entries) -> bool:
    """Whether the write was still under way at that call."""
    with interrupted(after, Killed, once=False):
        try:
            move(store, old, new)
        except Killed:
            return True
    return False


def test_a_kill_before_any_system_call_leaves_old_or_new(store: Store) -> None:
    old, new = two_states()
    move(store, {}, old)
    saved = store.root.with_name("saved")
    shutil.copytree(store.root, saved)
    events = []
    for after in itertools.count():
        shutil.rmtree(store.root)
        shutil.copytree(saved, store.root)
        killed = killed_before(after, lambda: move(store, old, new), folder=store.root)
        events.append(killed)
        found = store.read(MODEL, "cpu")
        assert_each_mode_is_whole(found, old, new)
        assert killed or found == new
        move(store, old, new)
        assert store.read(MODEL, "cpu") == new
        assert not list(store.root.rglob(".*.tmp"))
        if not killed:
            break
    assert Counter(events) == {"os.mkdir": 6, "open": 6, "fsync": 9, "os.rename": 6, "os.remove": 2, "": 1}


def test_a_second_kill_while_the_first_is_mended_leaves_old_or_new(store: Store) -> None:
    hard = ("values.2", "loses", "goes", "comes")
    old, new = ({case: entry for case, entry in state.items() if case.mode in hard} for state in two_states())
    third = {case: entry(3, *was.values, 3.0) for case, was in (old | new).items()} | {case(mode="goes"): entry(9)}
    move(store, {}, old)
    saved = store.root.with_name("saved")
    shutil.copytree(store.root, saved)
    for first in itertools.count():
        shutil.rmtree(store.root)
        shutil.copytree(saved, store.root)
        if not kill_at(first, store, old, new):
            break
        torn = store.root.with_name("torn")
        shutil.rmtree(torn, ignore_errors=True)
        shutil.copytree(store.root, torn)
        for second in range(first % 5, 60, 5):
            shutil.rmtree(store.root)
            shutil.copytree(torn, store.root)
            between = store.read(MODEL, "cpu")
            under_way = kill_at(second, store, between, third)
            assert_each_mode_is_whole(store.read(MODEL, "cpu"), between, third)
            if not under_way:
                assert store.read(MODEL, "cpu") == third
                break


def test_a_file_is_on_disk_before_its_rename_and_the_folder_after_it(store: Store) -> None:
    """Or a power cut could keep a rename and lose what was renamed."""
    old, new = two_states()
    move(store, {}, old)
    with interrupted(10_000, Killed, once=True) as calls:
        move(store, old, new)
    assert calls == [*["fsync"] * 6, *["replace"] * 6, "fsync", *["unlink", "fsync"] * 2]


def test_an_error_at_any_system_call_is_told_and_harmless(store: Store) -> None:
    old, new = two_states()
    full = OSError(errno.ENOSPC, "No space left on device")
    seen = set()
    for after in itertools.count():
        shutil.rmtree(store.root, ignore_errors=True)
        move(store, {}, old)
        before = files(store.root)
        try:
            with interrupted(after, lambda: full, once=True):
                move(store, old, new)
        except BaselineError as problem:
            text = str(problem)
            assert text.startswith(f"cannot write {store.root / MODEL}")
            assert ": No space left on device. " in text
            if "The old baselines are untouched." in text:
                seen.add("untouched")
                assert files(store.root) == before
            else:
                seen.add("half way")
                assert "Every mode is wholly old or wholly new; run the update again once the cause is gone." in text
                assert_each_mode_is_whole(store.read(MODEL, "cpu"), old, new)
            move(store, old, new)
        else:
            break
        assert store.read(MODEL, "cpu") == new
    assert seen == {"untouched", "half way"}


def run(script: str, *arguments: object) -> str:
    """Run a script in another process, with the functions of this module."""
    command = [
        sys.executable,
        "-c",
        f"from tests.gate.baselines.test_accidents import *\n{script}",
        *map(str, arguments),
    ]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout


KILL = """
import random, signal, time
os.fsync = lambda descriptor: None  # slow, and without effect on what another process sees
store, chance = Store(Path(sys.argv[1])), random.Random(0)
move(store, {}, many(0))
started = time.perf_counter()
move(store, many(0), many(1))
duration = time.perf_counter() - started
between = 0
for kill in range(100):
    if kill >= 10 and between >= 3:
        break
    now = store.read(MODEL, "cpu")
    ready, child_ready = os.pipe()
    child = os.fork()
    if not child:
        os.write(child_ready, b".")
        step = kill
        while True:
            move(store, store.read(MODEL, "cpu"), many(step % 4))
            step += 1
    os.read(ready, 1)
    time.sleep(chance.uniform(0, 3 * duration))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready), os.close(child_ready)
    found = store.read(MODEL, "cpu")
    assert_each_mode_is_whole(found, now, *(many(step) for step in range(4)))
    between += bool(list(store.root.rglob(".*.tmp")))
move(store, store.read(MODEL, "cpu"), many(3))
assert store.read(MODEL, "cpu") == many(3)
assert not list(store.root.rglob(".*.tmp"))
print(between)
"""


def test_sigkill_at_a_random_moment_leaves_old_or_new(tmp_path: Path) -> None:
    assert int(run(KILL, tmp_path)) >= 3, "the kills should come in the middle of a write"


LIMIT = """
import resource
store = Store(Path(sys.argv[1]))
move(store, {}, many(0))
before = files(store.root)
longest = max(len(data) for data in files(store.root).values())
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in (0, 1, 100, longest // 2, longest - 1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        move(store, many(0), many(2))
    except BaselineError as problem:
        text = str(problem)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "cannot write" in text and ".json: File too large. The old baselines are untouched." in text, text
    assert files(store.root) == before
move(store, many(0), many(2))
assert store.read(MODEL, "cpu") == many(2)
"""


def test_a_limit_on_the_size_of_files_changes_nothing(tmp_path: Path) -> None:
    run(LIMIT, tmp_path)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_changes_nothing(tiny_disk: Path) -> None:
    store = Store(tiny_disk / "baselines")
    move(store, {}, many(0))
    before = files(store.root)
    free = os.statvfs(tiny_disk)
    (tiny_disk / "filler").write_bytes(bytes((free.f_bavail - 10) * free.f_bsize))
    with pytest.raises(BaselineError, match=r"\.json: No space left on device\. The old baselines are untouched\.$"):
        move(store, many(0), many(2))
    assert files(store.root) == before
    assert store.read(MODEL, "cpu") == many(0)
    (tiny_disk / "filler").unlink()
    move(store, many(0), many(2))
    assert store.read(MODEL, "cpu") == many(2)


WRITE_ONE_LAYER_AT_A_TIME = """
os.fsync = lambda descriptor: None
store = Store(Path(sys.argv[1]))
for index in range(30):
    store.write(MODEL, {case(f"{sys.argv[2]}_{index}"): entry(index, index)})
    store.read(MODEL, "cpu")
"""


def test_two_writers_do_not_lose_each_others_cases(tmp_path: Path) -> None:
    both = "\n".join(
        [
            "child = os.fork()",
            "sys.argv[2] = 'child' if not child else 'parent'",
            WRITE_ONE_LAYER_AT_A_TIME,
            "assert not child or os.waitpid(child, 0)[1] == 0",
        ]
    )
    run(both, tmp_path, "")
    assert len(Store(tmp_path).read(MODEL, "cpu")) == 60


@pytest.mark.parametrize("reader", ["read", "modes", "models", "devices"])
def test_a_reader_waits_for_a_writer(store: Store, small: Path, reader: str) -> None:
    arguments = {"models": (), "devices": (MODEL,)}.get(reader, (MODEL, "cpu"))
    waiting = threading.Thread(target=getattr(store, reader), args=arguments)
    folder = os.open(small.parent.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
    finally:
        os.close(folder)
    waiting.join(10)
    assert not waiting.is_alive()


def test_strangers_in_the_folder_do_not_matter(store: Store, small: Path) -> None:
    for name in ("notes.txt", ".gitkeep", "mode_2_1.json~", ".mode_9.json.123.tmp", ".mode_2_1.json.7.tmp"):
        (store.folder(MODEL, "cpu") / name).write_text("?")
    assert store.read(MODEL, "cpu") == {case(): entry(0.5, 1.0, 2.0)}
    store.write(MODEL, {case(mode="mode_3"): entry(3)})
    left = sorted(path.name for path in store.folder(MODEL, "cpu").iterdir())
    assert left == [".gitkeep", "mode_2_1.json", "mode_2_1.json~", "mode_3.json", "notes.txt"]
