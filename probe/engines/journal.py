"""Finished units on disk: what a run that failed, or was stopped, need not do again.

A journal is a folder of the user's own cache, named by the digest of everything that the results depend on, the code
among it. It is deleted when its run has ended well, or after a week. Its files are pickles, as the workers made them,
that only this user can have written, and only the same version of this package reads.
"""

import os
import shutil
import time

from probe.engines.interface import Unit
from probe.files.atomic import make_folder, write
from probe.files.paths import is_private, user_cache

#: Seconds after which a journal that no run continued is deleted.
MAX_AGE = 7 * 24 * 3600


class Journal:
    """The finished units of one job."""

    def __init__(self, key: str) -> None:
        runs = user_cache() / "runs"
        self.folder = runs / key
        try:
            make_folder(runs)
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as problem:
            raise ValueError(
                f"finished units cannot be kept in {runs}: {problem.strerror or problem}. Name a cache that can be "
                "written to: XDG_CACHE_HOME."
            ) from None
        if not is_private(self.folder):
            raise ValueError(
                f"{self.folder} belongs to somebody else, or others can write to it, so nothing is read from it. "
                "Delete it, or name another cache: XDG_CACHE_HOME."
            )
        os.utime(self.folder)
        for other in runs.iterdir():
            if other != self.folder and time.time() - other.stat().st_mtime > MAX_AGE:
                shutil.rmtree(other, ignore_errors=True)

    def __contains__(self, unit: Unit) -> bool:
        return (self.folder / unit.key).exists()

    def read(self, unit: Unit) -> bytes | None:
        """The answer of a finished unit; None if it is gone: the same command, run beside this one, has ended well."""
        try:
            return (self.folder / unit.key).read_bytes()
        except FileNotFoundError:
            return None

    def add(self, unit: Unit, answer: bytes) -> None:
        """Keep the answer of a unit, whole or not at all; nothing if the folder is gone."""
        if self.folder.is_dir():
            write(self.folder / unit.key, answer)

    def remove(self, unit: Unit) -> None:
        """Forget a finished unit."""
        (self.folder / unit.key).unlink(missing_ok=True)

    def delete(self) -> None:
        """The run has ended well."""
        shutil.rmtree(self.folder, ignore_errors=True)
