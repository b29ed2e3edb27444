"""What runs on the nodes of a cluster: a worker, and the description of a node before any work."""

import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from probe.engines.interface import Job, Setup
from probe.engines.process import OpenJob, ProjectFolder, set_up, use_threads
from probe.engines.versions import FOLDER, installed
from probe.files.atomic import write
from probe.files.paths import content_digest

#: Paths with the digests of their contents; with none they must only be there.
Paths = tuple[tuple[str, str], ...]
#: The answer of a unit whose `needs` were lost with their node.
LOST = "lost"


class Actor:
    """A worker: opens jobs, and runs one unit at a time."""

    def __init__(self, threads: int) -> None:
        gc.disable()  # until a job is open: to look for garbage takes up to half of the time of imports
        use_threads(threads)
        self._open_job = OpenJob()
        self._jobs: tuple[str, Job[Any, Any] | None] = ("", None)

    def enter(self, folder: ProjectFolder) -> dict[str, Any]:
        """Work where the project lies; the description of the node, so that no other process need give it."""
        folder.enter()
        return describe_node(())

    def set_up(self, setup: Setup) -> None:
        """Import what units will need. A call of its own: `setup` may be of a module that is found after `enter`."""
        set_up(setup)

    def run(self, key: str, job: list[Any], work: Any, needs: Any) -> Any:
        """(what the unit emitted, its result), pickled if it may go on disk; LOST if what it needs is gone."""
        known, state, items = *self._open(key, job), list[Any]()
        try:
            given = None if needs is None else self._open_job.kept(key, known, needs[0], _reader(*needs[1:]))
        except _lost_errors():
            return LOST
        result = known.run(state, work, given, items.append)
        answer = items, result
        return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL) if known.is_final(result) else answer

    def keep(self, key: str, job: list[Any], work: Any, file: tuple[int, str | None, str]) -> tuple[Any, str | None]:
        """The packed result, which stays in the object store, and the file that it went to instead, if any."""
        known, state = self._open(key, job)
        packed = known.pack(known.run(state, work, None, lambda item: None))
        limit, folder, name = file
        if folder is not None and len(packed) > limit:
            return None, str(write(Path(folder) / name, packed))
        return np.frombuffer(packed, np.uint8), None  # as an array it is not copied out of the store again

    def _open(self, key: str, reference: list[Any]) -> tuple[Job[Any, Any], Any]:
        """The job, and its state; what is loaded for it is left out of collections of garbage."""
        if self._jobs[0] != key:
            import ray

            self._jobs = ("", None)
            self._jobs = (key, ray.get(reference[0]))
        job = self._jobs[1]
        assert job is not None
        state = self._open_job.state(key, job)
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        return job, state


def _reader(reference: list[Any], file: str | None) -> Callable[[], Any]:
    def read() -> Any:
        import ray

        return Path(file) if file is not None else ray.get(reference[0])

    return read


def _lost_errors() -> tuple[type[Exception], ...]:
    import ray

    return (ray.exceptions.ObjectLostError, FileNotFoundError)


def describe_node(paths: Paths) -> dict[str, Any]:
    """The versions on this node, which of the paths it does not have, and which of them hold something else."""
    found: dict[str, Any] = {"installed": installed(), "folder": FOLDER, "missing": [], "other": []}
    for path, digest in paths:
        if not os.path.exists(path):
            found["missing"].append(path)
        elif digest and content_digest(path) != digest:
            found["other"].append(path)
    return found
