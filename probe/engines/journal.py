"""Finished units on disk: what a run that failed, or was stopped, need not do again.

A journal is a folder of the user's own cache, named by the digest of everything that the results depend on, the code
among it. It is deleted when its run has ended well, or after a week. Its files are pickles, as the workers made them,
that only this user can have written, and only the same version of this package reads.
"""

import hashlib
import os
import shutil
import time
from pathlib import Path

from probe.files.atomic import make_folder, write
from probe.files.paths import is_private, user_cache

#: Seconds after which a journal that nobody continued is deleted.
KEPT_FOR = 7 * 24 * 3600


class Journal:
    """The finished units of one job, by name."""

    def __init__(self, key: str) -> None:
        runs = user_cache() / "runs"
        make_folder(runs)
        self.folder = runs / key
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not is_private(self.folder):
            raise ValueError(
                f"{self.folder} belongs to somebody else, or others can write to it, so nothing is read from it. "
                "Delete it, or name another cache: XDG_CACHE_HOME."
            )
        os.utime(self.folder)
        for other in runs.iterdir():
            if other != self.folder and time.time() - other.stat().st_mtime > KEPT_FOR:
                shutil.rmtree(other, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self.folder / hashlib.sha256(name.encode()).hexdigest()[:32]

    def __contains__(self, name: str) -> bool:
        return self._file(name).exists()

    def read(self, name: str) -> bytes:
        """The answer of a finished unit."""
        return self._file(name).read_bytes()

    def add(self, name: str, answer: bytes) -> None:
        """Keep the answer of a unit, whole or not at all."""
        write(self._file(name), answer)

    def delete(self) -> None:
        """The run has ended well."""
        shutil.rmtree(self.folder, ignore_errors=True)
