"""Baselines: what was measured before, by model, device and mode, and what changed since.

<root>/<model>/environment.json              what they were made with
<root>/<model>/<device>/<mode>.json          figures          (format.py)
<root>/<model>/<device>/<mode>.safetensors   golden values    (how both are written: files.py)
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from probe.gate.baselines.entry import Entry, Stored
from probe.gate.baselines.files import (
    ModeFiles,
    Steps,
    exists,
    folders_in,
    load_mode,
    locked,
    make_folder,
    reading,
    replace_whole,
    settle,
    stems_in,
)
from probe.gate.baselines.format import (
    VERSION,
    BaselineError,
    DefectError,
    Figures,
    check,
    document_from_json,
    figures_to_json,
    path_part,
    rounded,
    text_in,
    to_json,
)
from probe.gate.cases import Case

__all__ = ["MAX_BYTES_PER_CASE", "BaselineError", "Store", "changes", "natural_key", "path_part", "rounded"]

#: What a case may take on disk, both files together. The default set is held to it by a test.
MAX_BYTES_PER_CASE = 2048


@dataclass(frozen=True)
class Store:
    """The baselines under `root`. Whatever is wrong with them is a BaselineError, never an absence of baselines."""

    root: Path

    def folder(self, model: str, device: str) -> Path:
        """Where the files of a model and device lie."""
        return self.root / path_part(model) / path_part(device)

    def file(self, model: str, case: Case) -> Path:
        """The JSON file that a case is in."""
        return self.folder(model, case.device) / f"{path_part(case.mode)}.json"

    def read(self, model: str, device: str) -> dict[Case, Entry]:
        """Every stored case of a model and device; none where there is no folder."""
        return {case: entry for mode in self._modes(model, device) for case, entry in mode.entries.items()}

    def size_per_case(self, model: str, device: str) -> dict[str, float]:
        """Bytes of both files over the number of cases, by mode."""
        return {mode.figures.mode: mode.size / len(mode.entries) for mode in self._modes(model, device)}

    def models(self) -> list[str]:
        """The models that have baselines, by their true names."""
        return sorted({figures.model for folder in folders_in(self.root) for figures in _one_per_device(folder)})

    def devices(self, model: str) -> list[str]:
        """The devices that a model has baselines of, by their true names."""
        folder = self.root / path_part(model)
        found = _one_per_device(folder)
        for figures in found:
            _check_names(folder, figures, model=model)
        return sorted(figures.device for figures in found)

    def write(self, model: str, device: str, entries: Mapping[Case, Entry], *, drop: Collection[Case] = ()) -> None:
        """Drop the cases in `drop`, then store `entries`; all other cases stay. A mode without cases loses its files.

        What is stored is `rounded(entry)`. Files that would not change are not touched. After an error, and after a
        kill, every mode is wholly as before or wholly as wanted: see files.py.
        """
        new = {case: rounded(entry) for case, entry in entries.items()}
        for case, entry in new.items():
            check(case, entry)
        modes = _modes_by_file_name([*new, *drop], model, device)
        folder = self.folder(model, device)
        self.devices(model)  # another model's folder, and values without their figures, are noticed here
        if not new and not (drop and exists(folder)):
            return
        make_folder(folder)
        with locked(folder):
            settle(folder)
            steps = Steps()
            for stem, mode in sorted(modes.items()):
                old = load_mode(folder, stem) if exists(folder / f"{stem}.json") else None
                kept: dict[Case, Entry] = {}
                if old:
                    _check_names(folder / f"{stem}.json", old.figures, model=model, device=device, mode=mode)
                    kept = {case: entry for case, entry in old.entries.items() if case not in drop}
                kept |= {case: entry for case, entry in new.items() if case.mode == mode}
                data = figures_to_json(model, device, mode, kept) if kept else None
                steps.add(folder / stem, old, data, kept)
            steps.carry_out(folder)

    def environment(self, model: str) -> dict[str, str] | None:
        """What a model's baselines were made with, or None where that was never written."""
        file = self._environment_file(model)
        if not exists(file):
            return None
        with reading(file):
            document = document_from_json(file.read_bytes(), {"environment", "model", "version"})
            facts = document["environment"]
            if not isinstance(facts, dict):
                raise DefectError("environment: expected texts by name")
            for name, fact in facts.items():
                if not isinstance(fact, str):
                    raise DefectError(f"environment.{name}: expected a text, found {fact!r}")
            if text_in(document["model"], "model") != model:
                raise _shared("model", document["model"], model, file)
            return facts

    def write_environment(self, model: str, facts: Mapping[str, str]) -> None:
        """Store what the baselines of a model are made with, in the place of what was there."""
        for name, fact in facts.items():
            if not isinstance(fact, str):
                raise BaselineError(f"environment of {model}: {name} is {fact!r}, expected a text.")
        self.devices(model)
        if self.environment(model) == facts:
            return
        file = self._environment_file(model)
        data = to_json({"environment": facts, "model": model, "version": VERSION})
        make_folder(file.parent)
        with locked(file.parent):
            replace_whole(file, data)

    def _environment_file(self, model: str) -> Path:
        return self.root / path_part(model) / "environment.json"

    def _modes(self, model: str, device: str) -> list[ModeFiles]:
        folder = self.folder(model, device)
        if not exists(folder):
            return []
        with locked(folder, shared=True):
            modes = {stem: load_mode(folder, stem) for stem in stems_in(folder)}
        for stem, mode in modes.items():
            _check_names(folder / f"{stem}.json", mode.figures, model=model, device=device)
        return list(modes.values())


def changes(old: Mapping[Case, Entry], new: Mapping[Case, Entry]) -> list[str]:
    """A line for each figure that differs at 6 digits, for each setting, and for each case that came, went or has other
    values.
    """
    lines: list[str] = []
    for case in sorted({*old, *new}, key=lambda case: [natural_key(part) for part in vars(case).values()]):
        if case not in old or case not in new:
            lines.append(f"{case}  {'new' if case in new else 'dropped'}")
            continue
        before, after = rounded(old[case]), rounded(new[case])
        for name in sorted({*before.figures, *after.figures}):
            told = _told(before.figures.get(name), after.figures.get(name))
            lines += [f"{case}  {name}  {told}"] if told else []
        for name in sorted({*before.settings, *after.settings}):
            then, now = (entry.settings.get(name, "none") for entry in (before, after))
            lines += [f"{case}  {name}  {then} -> {now}"] if then != now else []
        moved = [one != other for one, other in zip_longest(before.values, after.values)]
        if any(moved):
            lines.append(f"{case}  golden values  {sum(moved)} of {len(moved)} changed")
    return lines


def natural_key(text: str) -> list[tuple[str, int]]:
    """A key that sorts numbers by their size: layer_2 before layer_10."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", text)
    return [*((word, int(number or -1)) for word, number in parts), (text, 0)]


def _told(old: Stored | None, new: Stored | None) -> str:
    if old is None or new is None:
        return f"new {_short(new.value, 3)}" if new else "dropped"
    for digits in (3, 4, 5, 6):  # as few as show the difference
        before, after = _short(old.value, digits), _short(new.value, digits)
        if before != after:
            return f"{before} -> {after}"
    return ""


def _short(x: float, digits: int) -> str:
    return f"{x:.{digits - 1}e}" if 0 < abs(x) < 1e-3 else f"{x:.{min(digits + 2, 6)}g}"


def _modes_by_file_name(cases: Collection[Case], model: str, device: str) -> dict[str, str]:
    modes: dict[str, str] = {}
    for case in cases:
        if not model or case.device != device:
            raise BaselineError(f"{case} is of device {case.device!r}: not to be written for {model!r} on {device!r}.")
        stem = path_part(case.mode)
        if modes.setdefault(stem, case.mode) != case.mode:
            raise _shared("mode", modes[stem], case.mode, f"{stem}.json")
    return modes


def _one_per_device(model_folder: Path) -> list[Figures]:
    found: list[Figures] = []
    for folder in folders_in(model_folder):
        with locked(folder, shared=True):
            found += [load_mode(folder, stem).figures for stem in stems_in(folder)[:1]]
    return found


def _check_names(file: Path, figures: Figures, **expected: str) -> None:
    for kind, name in expected.items():
        found = getattr(figures, kind)
        if found != name:
            raise _shared(kind, found, name, file)


def _shared(kind: str, one: str, other: str, file: Path | str) -> BaselineError:
    return BaselineError(
        f"{kind}s {one!r} and {other!r} would share {file}, which belongs to the first. "
        "Rename one of them, or keep its baselines elsewhere with --baselines-dir."
    )
