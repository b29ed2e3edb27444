"""A kill before any file event of an update: the next check works, the next update completes it, reasons survive."""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from probe.gate.baselines.format import ModeBaselines
from probe.gate.baselines.store import Store
from probe.running.noise import Anchors
from tests.files.accidents import killed_before
from tests.plugin.conftest import Run
from tests.plugin.test_lifecycle import snapshot

MODEL = "network:make"
UPDATE = "--update-baselines"
FIRST, SECOND = "the first reason", "the second reason"
#: Two modes, so two files to write.
MODES: dict[str, object] = {"modes": '["coarse", "linear_w"]', "formats": '["int8"]'}


@dataclass(frozen=True)
class Scenario:
    """An update that is killed: the project as it is stored, and as it is updated."""

    stored: dict[str, object] | None
    changed: dict[str, object]
    events: set[str]  # the kinds of events at which it was killed
    states: int  # how many states without temporary files a kill can leave
    has_reasons: bool = False  # whether what is stored was accepted though worse


WRITES = {"os.mkdir", "open", "fsync", "os.rename"}
SCENARIOS = {
    "nothing stored": Scenario(None, MODES, WRITES, states=4),
    # coarse gets worse than it was accepted to be, and both modes get new cases
    "over stored reasons": Scenario(
        {**MODES, "fault": "scale"},
        {**MODES, "fault": "everywhere", "formats": '["int8", "fp8_e4m3"]'},
        WRITES,
        states=3,
        has_reasons=True,
    ),
    "another input": Scenario(MODES, {**MODES, "seqlen": 32}, {*WRITES, "os.remove"}, states=4),
    "a mode that goes": Scenario(
        MODES, {**MODES, "modes": '["coarse"]', "fault": "better"}, {*WRITES, "os.remove"}, states=3
    ),
}


@contextmanager
def captured(updates: list[dict[str, Any]]) -> Iterator[None]:
    """Updates in this block write nothing; `updates` gets what they would have written."""

    def take(store: Store, model: str, entries: Any, **named: Any) -> list[str]:
        updates.append({"entries": entries, **named})
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("probe.gate.baselines.store.Store.write", take)
        yield


def modes_in(store: Store) -> dict[str, ModeBaselines]:
    """The stored modes, whose anchors must be there and be whole."""
    found = {mode.mode: mode for modes in store.inventory().values() for mode in modes}
    for mode in found.values():
        Anchors.from_bytes(store.anchors(MODEL, mode.environment["anchors"]))
    return found


def reasons_in(modes: dict[str, ModeBaselines]) -> set[str]:
    return {
        figure.reason for mode in modes.values() for entry in mode.entries.values() for figure in entry.figures.values()
    } - {""}


def put_back(root: Path, saved: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    if saved.exists():
        shutil.copytree(saved, root)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_before_any_file_event_needs_no_hand(
    name: str, project: Run, pytester: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scenario = SCENARIOS[name]
    root, saved = pytester.path / "baselines", tmp_path_factory.mktemp("saved") / "baselines"
    store = Store(root)
    if scenario.stored is not None:
        if scenario.has_reasons:
            assert project(UPDATE, **MODES).ret == 0
        assert project(UPDATE, "--allow-worse", FIRST, **scenario.stored).ret == 0
        shutil.copytree(root, saved)
    old = modes_in(store)
    assert reasons_in(old) == ({FIRST} if scenario.has_reasons else set())
    updates: list[dict[str, Any]] = []
    with captured(updates):
        assert project(UPDATE, "--allow-worse", SECOND, **scenario.changed).ret == 0
    (update,) = updates

    store.write(MODEL, **update)
    new, finished = modes_in(store), snapshot(root)
    assert SECOND in reasons_in(new) or not scenario.has_reasons
    seen: set[frozenset[tuple[str, bytes]]] = set()
    events = set()
    for moment in itertools.count():
        put_back(root, saved)
        event = killed_before(moment, lambda: store.write(MODEL, **update), folder=root)
        found = modes_in(store)
        for mode in {*old, *new}:
            assert found.get(mode) in (old.get(mode), new.get(mode)), f"{mode} is neither old nor new"
        if not event:
            break
        events.add(event)
        visible = frozenset((file, data) for file, data in snapshot(root).items() if not file.endswith(".tmp"))
        if visible not in seen:  # leftovers are in none of them, and each is looked at with one of its leftovers
            seen.add(visible)
            check_and_complete(project, scenario, new, found, finished, root)
        else:
            store.write(MODEL, **update)
            assert snapshot(root) == finished, "and no temporary file is left"
    assert events == scenario.events
    assert len(seen) == scenario.states


def check_and_complete(
    project: Run,
    scenario: Scenario,
    new: dict[str, ModeBaselines],
    found: dict[str, ModeBaselines],
    finished: dict[str, bytes],
    root: Path,
) -> None:
    """After a kill, as a user would: check, update without a reason, update."""
    result = project(**scenario.changed)
    text = result.stdout.str()
    old = [name for name, mode in new.items() if found.get(name) != mode]
    stored = sum(len(mode.entries) for name, mode in new.items() if name not in old)
    assert result.parseoutcomes().get("passed", 0) >= stored, text
    assert result.ret == (1 if old or found.keys() != new.keys() else 0), text
    for word in ("cannot be read", "git checkout", "Traceback", "INTERNALERROR", "delete "):
        assert word not in text, text
    worse = {name for name in old if SECOND in reasons_in({name: new[name]})}
    result = project(UPDATE, **scenario.changed)
    if worse:
        assert result.ret == 1, "a reason is asked for until the worse figures are stored"
        result.stdout.fnmatch_lines(["no baseline of network:make was written: *got worse*say why*"])
        result = project(UPDATE, "--allow-worse", SECOND, **scenario.changed)
    assert result.ret == 0, result.stdout.str()
    assert snapshot(root) == finished
    assert project(**scenario.changed).ret == 0
