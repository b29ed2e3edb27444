"""A job for the tests of engines: units that compute, fail, die, wait or are large, as they are told."""

import os
import signal
import sys
import time
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probe.engines import Job
from probe.engines.interface import Emit


def import_tabnanny() -> None:
    """And something that is not there."""
    import tabnanny  # noqa: F401

    raise ImportError("there is no such module")


@dataclass(frozen=True, eq=False)
class Sums(Job[list[int], Any]):
    """Units are (what, value): see `run`. `state` counts the units that a worker ran."""

    name: str = "sums"
    _: KW_ONLY
    journaled: bool = False
    needed: tuple[tuple[str, str], ...] = ()
    room: int = 0
    accelerators: int = 0
    ballast: bytes = b""

    def open(self) -> list[int]:
        return []

    def run(self, state: list[int], work: tuple[str, Any], given: Any, emit: Emit) -> Any:
        what, value = work
        state.append(1)
        emit(("began", value))
        if what == "wait":
            time.sleep(value)
        elif what == "fail":
            raise ValueError(f"there is no {value}")
        elif what == "bug":
            raise KeyError(value)
        elif what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "die once":  # value is a file that the first one makes
            if not Path(value).exists():
                Path(value).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        elif what == "die again":  # every time but for the first
            if Path(value).exists():
                os.kill(os.getpid(), signal.SIGKILL)
            Path(value).touch()
            return 1
        elif what == "die here":  # on the node of the first try; value is a file with its name
            import ray

            node = ray.get_runtime_context().get_node_id()
            if not Path(value).exists():
                Path(value).write_text(node)
            if Path(value).read_text() == node:
                os.kill(os.getpid(), signal.SIGKILL)
        elif what == "die twice":  # value is a file: a byte for every try
            if not Path(value).exists() or Path(value).stat().st_size < 2:
                with Path(value).open("ab") as file:
                    file.write(b".")
                os.kill(os.getpid(), signal.SIGKILL)
        elif what == "die late":  # value is a file that the first one makes
            time.sleep(0.5)
            if not Path(value).exists():
                Path(value).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        elif what == "threads":
            import torch

            return torch.get_num_threads()
        elif what == "mark":  # value is a file: one more byte for every run
            with Path(value).open("ab") as file:
                file.write(b".")
        elif what == "mark zeros":
            with Path(value).open("ab") as file:
                file.write(b".")
            return np.zeros(10, np.uint8)
        elif what == "zeros":
            return np.zeros(value, np.uint8)
        elif what == "where":
            import ray

            time.sleep(value)
            return ray.get_runtime_context().get_node_id()
        elif what == "imported":
            return value in sys.modules
        elif what == "length":
            return len(given)
        elif what == "plus":
            return int(given.sum()) + value
        return value

    def pack(self, value: Any) -> bytes:
        return np.asarray(value, np.uint8).tobytes()

    def unpack(self, data: Any) -> Any:
        return np.frombuffer(data.read_bytes() if isinstance(data, Path) else data, np.uint8)

    @property
    def is_journaled(self) -> bool:
        return self.journaled

    def is_final(self, result: Any) -> bool:
        return bool(result is not None and str(result) != "failed")

    @property
    def gpus(self) -> int:
        return self.accelerators

    @property
    def paths(self) -> dict[str, str]:
        return dict(self.needed)

    @property
    def memory(self) -> int:
        return self.room
