"""Scheduling under xdist: the cases of one recipe go to one worker and share its run; all other tests go anywhere.

xdist's own `--dist loadgroup` would do, but groups nothing under pytest 9.2 (pytest-xdist issue 1386). Its schedulers
that hand out groups of tests do not survive a crashed worker, so ours take their place.
"""

from typing import Any

from xdist.scheduler import LoadFileScheduling, LoadGroupScheduling, LoadScopeScheduling

from probe.running.environment import DEVICES, is_recorded


class ScopeScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """`--dist loadscope` that survives a crash.

    After a crash xdist 3.8 would run the test that crashed again and again, and could wait forever: for units that are
    done, or with a worker that has one test left (its issues 1189, 1323, 1327 and pull request 1371).
    """

    def remove_node(self, node: Any) -> str | None:
        """A worker is gone: what it left undone goes to the others, but for the test that it died of."""
        units: dict[str, dict[str, bool]] = self.assigned_work.pop(node)
        left = [(unit, nodeid) for unit in units.values() for nodeid, done in unit.items() if not done]
        if not left:
            return None
        unit, crashed = left[0]
        unit[crashed] = True
        self.workqueue.update({name: unit for name, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        if node not in self.registered_collections:  # a new one, which is still collecting
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)  # a worker starts a test when it knows the next, or that there is none


class FileScheduling(ScopeScheduling, LoadFileScheduling):  # type: ignore[misc]
    """`--dist loadfile` that survives a crash."""


class GroupScheduling(ScopeScheduling, LoadGroupScheduling):  # type: ignore[misc]
    """`--dist loadgroup` that survives a crash."""


class RecipeScheduling(ScopeScheduling):
    """Load scheduling in which a recipe is a unit."""

    def _split_scope(self, nodeid: str) -> str:
        return recipe_of(nodeid)


#: By --dist. All others (each, worksteal) are left to xdist.
SCHEDULERS = {
    "load": RecipeScheduling,
    "loadscope": ScopeScheduling,
    "loadfile": FileScheduling,
    "loadgroup": GroupScheduling,
}


def recipe_of(nodeid: str) -> str:
    """`test_gate.py::test[mode_2_1-*-cpu-int8]` of any case of that recipe; the nodeid itself of any other test."""
    head, bracket, rest = nodeid.partition("[")
    parts = rest.removesuffix("]").split("-")
    for index, part in enumerate(parts):
        if index >= 2 and bracket and (part.partition(":")[0] in DEVICES or is_recorded(part)):
            return f"{head}[{'-'.join([*parts[: index - 1], '*', *parts[index:]])}]"
    return nodeid
