"""The store of baselines: one JSON file for each mode of a model on a device, and the anchors that modes share.

<root>/<model>/<device>/<mode>.json            figures, golden values, environment and input   (format.py)
<root>/<model>/anchors-<digest>.safetensors    the anchors that the modes of a model share

A mode is one file, replaced by one rename: at every moment it is wholly old or wholly new. Anchors are a file of their
own, because a copy in every mode would take more room than all figures. Their name is the digest of their content
and each mode names its own; new anchors are written before the modes that name them, and old ones are removed when no
mode names them any more.
"""

import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from probe.files import atomic, defects
from probe.files.defects import DefectError
from probe.gate.baselines.format import (
    BaselineError,
    Entry,
    ModeBaselines,
    OldLayoutError,
    Stored,
    check,
    check_texts,
    digest,
    path_part,
    rounded,
)
from probe.gate.cases import Case
from probe.running.environment import ANCHORS, FORMAT, INCLUDE, INPUT
from probe.words import first_few, natural_key

Modes = Mapping[Path, ModeBaselines]

UNTOUCHED = "The old baselines are untouched."
HALF_WAY = "Every mode is wholly old or wholly new; run the update again once the cause is gone."
#: The environment of all modes of a model, which only version 1 kept in a file of its own.
OLD_ENVIRONMENT = "environment.json"


@dataclass(frozen=True)
class Store:
    """The baselines under `root`. Whatever is wrong with them is a BaselineError, never an absence of baselines."""

    root: Path

    def folder(self, model: str, device: str) -> Path:
        """Where the files of a model and device are."""
        return self.root / path_part(model) / path_part(device)

    def file(self, model: str, case: Case) -> Path:
        """The file that a case is in."""
        return self.folder(model, case.device) / f"{path_part(case.mode)}.json"

    def check_layout(self, model: str) -> None:
        """Refuse the baselines of a model that an older probe wrote, and say how to convert them."""
        if _exists(self.root / path_part(model) / OLD_ENVIRONMENT):
            raise self._old_layout()

    def read(self, model: str, device: str) -> dict[Case, Entry]:
        """Every stored case of a model and device; none where there is no folder."""
        return _entries(self.modes(model, device))

    def modes(self, model: str, device: str) -> list[ModeBaselines]:
        """The stored modes of a model and device; none where there is no folder."""
        folder = self.folder(model, device)
        if not _exists(folder):
            return []
        with self._locked(folder.parent, shared=True):
            modes = {file: self._load(file) for file in self._files(folder)}
        for file, mode in modes.items():
            _check_names(file, mode, model=model, device=device)
        return list(modes.values())

    def models(self) -> list[str]:
        """The models that have baselines, by their true names."""
        return sorted({mode.model for folder in _folders_in(self.root) for mode in self._one_per_device(folder)})

    def devices(self, model: str) -> list[str]:
        """The devices that a model has baselines of, by their true names."""
        folder = self.root / path_part(model)
        found = self._one_per_device(folder)
        for mode in found:
            _check_names(folder, mode, model=model)
        return sorted(mode.device for mode in found)

    def inventory(self) -> dict[str, list[ModeBaselines]]:
        """Every stored mode by the true name of its model, each file read once."""
        found: dict[str, list[ModeBaselines]] = {}
        for folder in _folders_in(self.root):
            with self._locked(folder, shared=True):
                for mode in (self._load(file) for device in _folders_in(folder) for file in self._files(device)):
                    found.setdefault(mode.model, []).append(mode)
        return found

    def environment(self, model: str) -> dict[str, str] | None:
        """What a model's baselines were made with, None if there are none; where modes differ, `2.12.0 or 2.13.0`."""
        modes = [mode for device in self.devices(model) for mode in self.modes(model, device)]
        found: dict[str, dict[str, None]] = {}
        for mode in modes:
            for name, fact in mode.environment.items():
                found.setdefault(name, {})[fact] = None
        return {name: " or ".join(facts) for name, facts in found.items()} if modes else None

    def anchors(self, model: str, name: str) -> bytes:
        """The content of the anchors of that name, which must be what the name says."""
        file = self.root / path_part(model) / name
        with _reading(file):
            if "/" in name or not name.startswith("anchors-"):
                raise DefectError(f"{name!r} is not a name of anchors")
            data = file.read_bytes()
            if name != _anchors_name(data):
                raise DefectError("does not hold what its name says: it is damaged or was edited")
        return data

    def write(
        self,
        model: str,
        entries: Mapping[Case, Entry],
        *,
        environment: Mapping[str, str] | None = None,
        anchors: bytes | None = None,
        tests: Mapping[Case, tuple[str, ...]] | None = None,
        drop: Collection[Case] = (),
    ) -> list[str]:
        """Drop the cases in `drop`, store `entries`, and return what changed; all other cases stay.

        `tests` has the tests that compare each case; a case that it lacks keeps those that are stored.

        Each entry is stored as `rounded(entry)`. A mode whose cases, input and anchors did not change is not touched,
        so it keeps its environment; the file of a mode without cases is deleted. After an error or a kill, every mode
        is wholly old or wholly new.
        """
        facts = {**(environment or {}), **({ANCHORS: _anchors_name(anchors)} if anchors is not None else {})}
        check_texts(f"environment of {model}:", facts)
        known = tests or {}
        check_texts("tests:", {test: test for listed in known.values() for test in listed})
        new = {case: rounded(entry) for case, entry in entries.items()}
        for case, entry in new.items():
            check(case, entry)
        files = self._files_of(model, [*new, *drop])
        folder = self.root / path_part(model)
        if not new and not (drop and _exists(folder)):
            return []
        with atomic.writing(folder, BaselineError):
            atomic.make_folder(folder)
        with self._locked(folder):
            stored = {file: self._load(file) for device in _folders_in(folder) for file in self._files(device)}
            for file, mode in stored.items():
                names = dict(zip(("device", "mode"), files.get(file, ()), strict=False))
                _check_names(file, mode, model=model, **names)
            renewed = {file: _renewed(stored.get(file), model, *files[file], new, drop, facts, known) for file in files}
            wanted = {**stored, **renewed}
            self._replace(folder, stored, wanted, anchors)
        return changes(_entries(stored.values()), _entries(wanted.values()))

    def _replace(self, folder: Path, stored: Modes, wanted: Modes, anchors: bytes | None) -> None:
        """Bring all files of a model from `stored` to `wanted`: write anchors, then modes; then delete unused files."""
        changed = {file: mode for file, mode in wanted.items() if mode != stored.get(file)}
        before = {file: _content(file) for file in changed}
        used = _anchors_of(wanted)
        try:
            for each in (folder, *_folders_in(folder)):
                atomic.remove_unfinished(each)
            for each in dict.fromkeys(file.parent for file in changed):
                atomic.make_folder(each)
            if changed and anchors is not None and not _exists(folder / _anchors_name(anchors)):
                atomic.write(folder / _anchors_name(anchors), anchors)
            atomic.write_all({file: mode.to_json() for file, mode in changed.items() if mode.entries})
            for file, mode in changed.items():
                if not mode.entries and file in stored:
                    file.unlink()
                    atomic.sync(file.parent)
        except OSError as problem:
            is_untouched = before == {file: _content(file) for file in changed}
            used = _anchors_of(stored) | (set() if is_untouched else used)
            state = UNTOUCHED if is_untouched else HALF_WAY
            raise BaselineError(f"cannot write {problem.filename or folder}: {problem.strerror}. {state}") from None
        finally:
            for file in folder.glob("anchors-*.safetensors"):
                if file.name not in used:
                    with atomic.writing(file, BaselineError):
                        file.unlink()

    def _files_of(self, model: str, cases: Iterable[Case]) -> dict[Path, tuple[str, str]]:
        """The files of the cases, with their device and mode."""
        files: dict[Path, tuple[str, str]] = {}
        for case in sorted(cases):
            file = self.file(model, case)
            device, mode = files.setdefault(file, (case.device, case.mode))
            _check_same(file, "device", device, case.device)
            _check_same(file, "mode", mode, case.mode)
        return files

    def _load(self, file: Path) -> ModeBaselines:
        with _reading(file):
            try:
                mode = ModeBaselines.from_json(file.read_bytes())
            except OldLayoutError:
                raise self._old_layout() from None
            if path_part(mode.mode) != file.stem:
                raise DefectError(f"mode: expected the one that the file is named for, found {mode.mode!r}")
        return mode

    def _files(self, folder: Path) -> list[Path]:
        with _reading(folder):
            return sorted(folder / name for name in os.listdir(folder) if name.endswith(".json"))

    def _one_per_device(self, model_folder: Path) -> list[ModeBaselines]:
        if not _exists(model_folder):
            return []
        with self._locked(model_folder, shared=True):
            return [self._load(file) for folder in _folders_in(model_folder) for file in self._files(folder)[:1]]

    @contextmanager
    def _locked(self, folder: Path, *, shared: bool = False) -> Iterator[None]:
        with _reading(folder):
            os.listdir(folder)
        with atomic.locked(folder, shared=shared):
            yield

    def _old_layout(self) -> BaselineError:
        return BaselineError(
            f"the baselines in {self.root} were written by an older probe, with several files for a mode. Convert "
            f"them, which changes no figure, with: python -m probe.gate.baselines.convert {shlex.quote(str(self.root))}"
        )


def changes(old: Mapping[Case, Entry], new: Mapping[Case, Entry]) -> list[str]:
    """A line for each figure that differs at 6 digits, each changed setting, and each new, dropped or changed case."""
    lines: list[str] = []
    for case in sorted({*old, *new}, key=lambda case: [natural_key(part) for part in vars(case).values()]):
        if case not in old or case not in new:
            lines.append(f"{case}  {'new' if case in new else 'dropped'}")
            continue
        before, after = rounded(old[case]), rounded(new[case])
        for name in sorted({*before.figures, *after.figures}):
            change = _figure_change(before.figures.get(name), after.figures.get(name))
            lines += [f"{case}  {name}  {change}"] if change else []
        for name in sorted({*before.settings, *after.settings}):
            then, now = (entry.settings.get(name, "none") for entry in (before, after))
            lines += [f"{case}  {name}  {then} -> {now}"] if then != now else []
        digests = [
            name for name in {*before.digests, *after.digests} if before.digests.get(name) != after.digests.get(name)
        ]
        lines += [f"{case}  digests  {len(digests)} changed: {first_few(sorted(digests))}"] if digests else []
        moved = [one != other for one, other in zip_longest(before.values, after.values)]
        if any(moved):
            lines.append(f"{case}  golden values  {sum(moved)} of {len(moved)} changed")
    return lines


def _figure_change(old: Stored | None, new: Stored | None) -> str:
    if old is None or new is None:
        return f"new {_short(new.value, 3)}" if new else "dropped"
    for digits in (3, 4, 5, 6):  # as few as show the difference
        before, after = _short(old.value, digits), _short(new.value, digits)
        if before != after:
            return f"{before} -> {after}"
    return ""


def _short(x: float, digits: int) -> str:
    return f"{x:.{digits - 1}e}" if 0 < abs(x) < 1e-3 else f"{x:.{min(digits + 2, 6)}g}"


def _renewed(
    old: ModeBaselines | None,
    model: str,
    device: str,
    mode: str,
    new: Mapping[Case, Entry],
    drop: Collection[Case],
    facts: Mapping[str, str],
    known: Mapping[Case, tuple[str, ...]],
) -> ModeBaselines:
    """A mode with its new cases and without the dropped ones; its environment is `facts` if anything changed."""
    before = old.entries if old else {}
    entries = {case: entry for case, entry in before.items() if case not in drop}
    entries |= {case: entry for case, entry in new.items() if (case.device, case.mode) == (device, mode)}
    stored = {**(old.tests if old else {}), **known}
    tests = {case: stored[case] for case in entries if stored.get(case)}
    bound = {name: fact for name, fact in facts.items() if name.startswith((INPUT, ANCHORS, FORMAT))}
    same_include = old is not None and old.environment.get(INCLUDE) == facts.get(INCLUDE)
    if old is not None and entries == before and same_include and bound.items() <= old.environment.items():
        return replace(old, tests=tests)
    return ModeBaselines(model, device, mode, dict(facts), entries, tests)


def _entries(modes: Iterable[ModeBaselines]) -> dict[Case, Entry]:
    return {case: entry for mode in modes for case, entry in mode.entries.items()}


def _anchors_of(modes: Modes) -> set[str]:
    return {mode.environment[ANCHORS] for mode in modes.values() if ANCHORS in mode.environment and mode.entries}


def _anchors_name(data: bytes) -> str:
    return f"anchors-{digest(data)}.safetensors"


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _exists(path: Path) -> bool:
    """Whether there is anything at `path`; a folder that may not be read is an error, not False."""
    with _reading(path):
        try:
            os.lstat(path)
        except FileNotFoundError:
            return False
        return True


def _folders_in(parent: Path) -> list[Path]:
    """The folders in a folder that need not exist."""
    if not _exists(parent):
        return []
    with _reading(parent):
        return sorted(path for path in parent.iterdir() if path.is_dir())


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise an error of `file` in the block as a BaselineError that says how to restore it or make it again."""
    remedy = (
        f"Restore it with: git checkout -- {shlex.quote(str(file))}\n"
        f"or delete {file} and make it again with: pytest --update-baselines"
    )
    with defects.reading(file, BaselineError, remedy=remedy):
        yield


def _check_names(file: Path, stored: ModeBaselines, **expected: str) -> None:
    for kind, name in expected.items():
        _check_same(file, kind, getattr(stored, kind), name)


def _check_same(file: Path, kind: str, owner: str, name: str) -> None:
    """Refuse to share a file: different names can give the same path."""
    if owner != name:
        raise BaselineError(
            f"{kind}s {owner!r} and {name!r} would share {file}, which belongs to the first. "
            "Rename one of them, or keep its baselines elsewhere with --baselines-dir."
        )
