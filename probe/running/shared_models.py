"""A model as the workers of an engine load it: by its name, once for all jobs, and the same everywhere."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch

from probe.data.library_logs import quietly
from probe.engines import Engine, Job
from probe.engines.identity import identity_of
from probe.engines.interface import Result, State
from probe.files.atomic import write
from probe.files.paths import content_digest
from probe.models.factories import function_named, loaded_code
from probe.models.loading import EMBEDDED, Loaded, configuration_of, load_model
from probe.models.offload import Room
from probe.running.declarations import DeclaredMode
from probe.running.environment import differences
from probe.running.modes import MODES, Mode, declare_modes, find_mode
from probe.settings import FUNCTION
from probe.words import first_few, format_bytes

#: A model of at most so many bytes is sent to nodes that do not have its files.
MAX_SENT_BYTES = 2**26
#: What a worker takes beside weights: torch, transformers and the activations of small batches.
WORKER_BYTES = 2**29
#: Copies of the weights: the float model, its float copy and the quantized one.
COPIES = 3

_loaded: tuple[str, Loaded] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedModel:
    """A model by its name, with the modes that a worker does not know by itself."""

    name: str
    shown: str  # its name in results
    fingerprint: str
    weight_bytes: int
    configuration: Mapping[str, str] = field(default_factory=dict)
    allow_download: bool = False
    trust_remote_code: bool = False
    dtype: torch.dtype | None = torch.float32
    room: Room | None = None
    files: Mapping[str, bytes] | None = None  # of a small model, for nodes that do not have them
    modes: tuple[Mode | tuple[str, DeclaredMode], ...] = ()
    sources: tuple[str, ...] = ()  # checkpoints that modes load, and functions that make them
    contents: Mapping[str, str] = field(default_factory=dict)  # of these and of code, for nodes that have a copy

    @classmethod
    def of(
        cls,
        name: str,
        loaded: Loaded,
        engine: Engine,
        *,
        modes: Sequence[str] = (),
        allow_download: bool = False,
        trust_remote_code: bool = False,
        dtype: torch.dtype | None = torch.float32,
        room: Room | None = None,
    ) -> Self:
        """What other workers of this engine need to load the model `name`, which is loaded here already."""
        rows = [find_mode(mode) for mode in dict.fromkeys(modes)]
        rows += [find_mode(row.base) for row in rows if row.base]
        own = [row for row in rows if row.kind == "user" and not (row.base or row.library or row.source)]
        declared = [(row.name, DeclaredMode(row.base, row.keep_float)) for row in rows if row.base]
        sources = tuple(row.source for row in rows if row.source)
        functions = [one for one in (name, *sources) if FUNCTION.fullmatch(one)]
        contents: dict[str, str] = {}
        if not engine.shares_disk:
            contents = {one: content_digest(os.path.expanduser(one)) for one in sources if not FUNCTION.fullmatch(one)}
            for function in functions:
                function_named("function", function, returns="a model")
            contents |= loaded_code() if own or functions else {}
        size = sum(parameter.nbytes for parameter in loaded.model.parameters())
        return cls(
            name=name,
            shown=loaded.name,
            fingerprint=loaded.fingerprint,
            weight_bytes=size,
            configuration=configuration_of(loaded.model),
            allow_download=allow_download,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            room=room,
            files=None if engine.shares_disk else _small_files(name),
            modes=(*dict.fromkeys(own), *declared),
            sources=sources,
            contents=contents,
        )

    @classmethod
    def here(cls, name: str, fingerprint: str) -> Self:
        """A model that is in this process only, which no other one can load."""
        return cls(name="", shown=name, fingerprint=fingerprint, weight_bytes=0)

    @property
    def memory(self) -> int:
        """The bytes that a worker needs."""
        return WORKER_BYTES + COPIES * self.weight_bytes

    @property
    def paths(self) -> dict[str, str]:
        """The files that every worker must find; the weights of the model are compared when it is loaded."""
        return {**({self.name: ""} if self.files is None and _is_path(self.name) else {}), **self.contents}

    @property
    def is_plain(self) -> bool:
        """Whether its fields say all of it. Of code of the user's, and of another tool's files, they do not."""
        own = any(isinstance(mode, Mode) for mode in self.modes)
        return not (own or self.sources or self.trust_remote_code or FUNCTION.fullmatch(self.name))

    def load(self) -> Loaded:
        """The model, loaded once in a process, with its modes; another one under this name is refused."""
        global _loaded
        for mode in self.modes:
            if isinstance(mode, tuple):
                declare_modes(dict([mode]), where="this run")
            else:
                MODES[mode.name] = mode
        key = identity_of(self.name, self.fingerprint, self.configuration, self.dtype, self.room)
        if _loaded is None or _loaded[0] != key:
            _loaded = None
            with self._place() as place:
                found = load_model(
                    place,
                    dtype=self.dtype,
                    room=self.room,
                    allow_download=self.allow_download,
                    trust_remote_code=self.trust_remote_code,
                )
            self._check_same(found)
            _loaded = (key, replace(found, name=self.shown))
        return _loaded[1]

    def _check_same(self, found: Loaded) -> None:
        here = {"weights": self.fingerprint, **self.configuration}
        other = differences(here, {"weights": found.fingerprint, **configuration_of(found.model)})
        if other:
            raise ValueError(
                f"{self.name} on {os.uname().nodename} is another model than here (here -> there: {first_few(other)}). "
                "Put the same files on all nodes."
            )

    @contextmanager
    def _place(self) -> Iterator[str]:
        """The name, or a folder with its files while it is loaded, if this machine does not have them."""
        if self.files is None or os.path.exists(os.path.expanduser(self.name)):
            yield self.name
            return
        with tempfile.TemporaryDirectory(prefix="probe-model-") as folder:
            for name, data in self.files.items():
                write(Path(folder, name), data)
            yield str(Path(folder, Path(self.name).name)) if self.name.endswith(".gguf") else folder

    def __str__(self) -> str:
        return f"{self.shown}, {format_bytes(self.weight_bytes)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelJob(Job[State, Result]):
    """A job whose workers load a model."""

    model: SharedModel

    @classmethod
    def prepare(cls, engine: Engine) -> None:
        """Let the workers of an engine import what such a job needs, while this process loads the model itself."""
        engine.prepare(cls._import_libraries)

    @classmethod
    def _import_libraries(cls) -> None:
        """What takes longest of loading a model."""
        with quietly():
            import transformers.modeling_utils  # noqa: F401

    @property
    def is_journaled(self) -> bool:
        """Not with code of the user's, which its fields do not cover."""
        return self.model.is_plain

    @property
    def memory(self) -> int:
        """That of the model."""
        return self.model.memory

    @property
    def paths(self) -> Mapping[str, str]:
        """Those of the model."""
        return self.model.paths


def accelerators(*devices: str) -> int:
    """The GPUs that a worker needs for these devices; a number is refused, because a worker sees its own GPU only."""
    numbered = [device for device in devices if device.startswith("cuda:")]
    if numbered:
        raise ValueError(
            f"the device is {numbered[0]!r}, and the engine ray gives every worker a GPU of its own. Name it cuda."
        )
    return int("cuda" in devices)


def _is_path(name: str) -> bool:
    return name not in EMBEDDED and not FUNCTION.fullmatch(name) and os.path.exists(os.path.expanduser(name))


def _small_files(name: str) -> dict[str, bytes] | None:
    """The files of a small model by name; None for a large one, and for one that every node has or can make."""
    if not _is_path(name):
        return None
    place = Path(os.path.expanduser(name))
    files = sorted(file for file in place.iterdir() if file.is_file()) if place.is_dir() else [place]
    if sum(file.stat().st_size for file in files) > MAX_SENT_BYTES:
        return None
    return {file.name: file.read_bytes() for file in files}
