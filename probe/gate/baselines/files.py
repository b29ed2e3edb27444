"""Baselines on disk: a killed write leaves every mode wholly old or wholly new, though a mode is two files.

The JSON is the only point of decision. It holds a digest of each case's values, and they are looked for in
`<mode>.safetensors` and, if those are others, in `<mode>.<digest of the JSON>.partial`. So a write

    prepares    every new file under a .partial name, fsynced: a full disk is noticed here, with nothing changed
    sets aside  values that no case needs any more, under the .partial name that the old JSON leads to
    commits     by renaming each JSON into its place, or removing it
    finishes    by renaming the new values into their place, and removing what was set aside

with the folder fsynced after each. At every moment the JSON that is there leads to its values, and a JSON that is not
there leaves none in place. The next write finishes what a killed one had committed and clears away what it had only
prepared. A lock on the folder keeps a write apart from reads and other writes.
"""

import fcntl
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from probe.gate.baselines.entry import Entry
from probe.gate.baselines.format import (
    BaselineError,
    DefectError,
    Figures,
    digest,
    figures_from_json,
    path_part,
    values_from_safetensors,
    values_to_safetensors,
)
from probe.gate.cases import Case

PARTIAL = ".partial"
UNTOUCHED = "The old baselines are untouched."
HALF_WAY = "Every mode is wholly old or wholly new; run the update again once the cause is gone."


@dataclass(frozen=True)
class ModeFiles:
    """A mode as it lies on disk. `values_file` is None where no case has values."""

    data: bytes  # of the JSON
    figures: Figures
    entries: dict[Case, Entry]
    values_file: Path | None
    size: int  # of both files


@dataclass(frozen=True)
class Steps:
    """A write, in order: files to prepare, then three rounds of moves. A move to None is a removal."""

    prepare: dict[Path, bytes] = field(default_factory=dict)
    set_aside: list[tuple[Path, Path | None]] = field(default_factory=list)
    commit: list[tuple[Path, Path | None]] = field(default_factory=list)
    finish: list[tuple[Path, Path | None]] = field(default_factory=list)

    def add(self, stem: Path, old: ModeFiles | None, data: bytes | None, entries: Mapping[Case, Entry]) -> None:
        """What brings a mode from `old` to the JSON `data` (None: removed) and the values of `entries`."""
        file, values_file = _with(stem, ".json"), _with(stem, ".safetensors")
        if data is None and old is not None:
            self.commit.append((file, None))
        if data is not None and (old is None or data != old.data):
            self.prepare[_with(file, PARTIAL)] = data
            self.commit.append((_with(file, PARTIAL), file))
        values = values_to_safetensors(entries)
        if data is not None and values is not None and (old is None or values != values_to_safetensors(old.entries)):
            self.prepare[_pending(stem, data)] = values
            self.finish.append((_pending(stem, data), values_file))
        if values is None and old is not None and old.values_file is not None:
            self.set_aside.append((values_file, _pending(stem, old.data)))
            self.finish.append((_pending(stem, old.data), None))

    def carry_out(self, folder: Path) -> None:
        """Prepare everything, then move everything: the disk says no before the first move, or not at all."""
        try:
            for partial, data in self.prepare.items():
                with writing(partial):
                    _write_whole(partial, data)
            with writing(folder):
                _sync(folder)
        except BaseException:
            for partial in self.prepare:
                with suppress(OSError):
                    partial.unlink()
            raise
        for moves in (self.set_aside, self.commit, self.finish):
            for source, target in moves:
                with writing(target or source, state=HALF_WAY):
                    if target is None:
                        source.unlink()
                    else:
                        source.replace(target)
            if moves:
                with writing(folder, state=HALF_WAY):
                    _sync(folder)


def load_mode(folder: Path, stem: str) -> ModeFiles:
    """A mode from its files; values that a killed write has not moved into their place yet are found too."""
    file, values_file, both = (folder / f"{stem}{suffix}" for suffix in (".json", ".safetensors", ".*"))
    with reading(file, restore=both):
        data = file.read_bytes()
        figures = figures_from_json(data)
        if path_part(figures.mode) != stem:
            raise DefectError(f"mode: expected the one that the file is named for, found {figures.mode!r}")
    if not figures.digests:
        with reading(values_file, restore=both):
            if exists(values_file):
                raise DefectError(f"values without figures: no case of {file.name} has any")
        return ModeFiles(data, figures, figures.entries, None, len(data))
    problems: list[BaselineError] = []
    for candidate in (values_file, _pending(folder / stem, data)):
        try:
            with reading(candidate, restore=both):
                values_data = candidate.read_bytes()
                values = values_from_safetensors(values_data, figures.digests)
        except BaselineError as problem:
            problems.append(problem)
        else:
            entries = {case: replace(entry, values=values.get(case, ())) for case, entry in figures.entries.items()}
            return ModeFiles(data, figures, entries, candidate, len(data) + len(values_data))
    raise problems[0]


def stems_in(folder: Path) -> list[str]:
    """The modes of a folder, by file name. Values on their own are a defect."""
    with reading(folder):
        names = sorted(os.listdir(folder))
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    for name in names:
        stem = name.removesuffix(".safetensors")
        if stem != name and stem not in stems:
            with reading(folder / name, restore=folder / f"{stem}.*"):
                raise DefectError(f"values without figures: there is no {stem}.json beside it")
    return stems


def settle(folder: Path) -> None:
    """Finish what a killed write had committed, clear away what it had only prepared."""
    with reading(folder):
        partials = [folder / name for name in sorted(os.listdir(folder)) if name.endswith(PARTIAL)]
    for partial in partials:
        stem = partial.name.rsplit(".", 2)[0]
        needed = exists(folder / f"{stem}.json") and load_mode(folder, stem).values_file == partial
        with writing(partial):
            if needed:
                partial.replace(folder / f"{stem}.safetensors")
            else:
                partial.unlink()
    if partials:
        with writing(folder):
            _sync(folder)


def replace_whole(file: Path, data: bytes) -> None:
    """Put `data` in the place of what is in `file`, or leave it as it is."""
    partial = _with(file, PARTIAL)
    Steps(prepare={partial: data}, commit=[(partial, file)]).carry_out(file.parent)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, so that it outlives a crash."""
    with writing(folder):
        if not folder.is_dir():
            make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            _sync(folder.parent)


@contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Alone in the folder, or among readers only."""
    with reading(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def exists(path: Path) -> bool:
    """Whether there is anything at `path`. Not being allowed to know is an error, not a no."""
    with reading(path):
        try:
            os.lstat(path)
        except FileNotFoundError:
            return False
        return True


def folders_in(parent: Path) -> list[Path]:
    """The folders in a folder that need not exist."""
    if not exists(parent):
        return []
    with reading(parent):
        return sorted(path for path in parent.iterdir() if path.is_dir())


@contextmanager
def reading(file: Path, *, restore: Path | None = None) -> Iterator[None]:
    """What goes wrong with `file` in the block is a BaselineError that says how to restore it or make it again."""
    restore = restore or file
    remedy = (
        f"Restore it with: git checkout -- {shlex.quote(str(restore))}\n"
        f"or delete {restore} and make it again with: pytest --update-baselines"
    )
    try:
        yield
    except OSError as problem:
        raise BaselineError(f"cannot read {file}: {problem.strerror}. {remedy}") from None
    except DefectError as problem:
        raise BaselineError(f"{file}: {problem}. {problem.remedy or remedy}") from None


@contextmanager
def writing(file: Path, *, state: str = UNTOUCHED) -> Iterator[None]:
    """What the system refuses in the block is a BaselineError that says what became of the baselines."""
    try:
        yield
    except OSError as problem:
        raise BaselineError(f"cannot write {file}: {problem.strerror}. {state}") from None


def _pending(stem: Path, data: bytes) -> Path:
    """Where the values wait that belong to the JSON `data`."""
    return _with(stem, f".{digest(data)}{PARTIAL}")


def _with(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _write_whole(file: Path, data: bytes) -> None:
    with open(file, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
