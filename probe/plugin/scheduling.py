"""Scheduling under xdist: the cases of one recipe go to one worker and share its run; all other tests go anywhere.

xdist's own `--dist loadgroup` would do, but groups nothing under pytest 9.2 (pytest-xdist issue 1386).
"""

from xdist.scheduler import LoadScopeScheduling

from probe.devices import DEVICES, is_recorded


class RecipeScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Load scheduling in which a recipe is a unit."""

    def _split_scope(self, nodeid: str) -> str:
        return recipe_of(nodeid)


def recipe_of(nodeid: str) -> str:
    """`test_gate.py::test[mode_2_1-*-cpu-int8]` of any case of that recipe; the nodeid itself of any other test."""
    head, bracket, rest = nodeid.partition("[")
    parts = rest.removesuffix("]").split("-")
    for index, part in enumerate(parts):
        if index >= 2 and bracket and (part.partition(":")[0] in DEVICES or is_recorded(part)):
            return f"{head}[{'-'.join([*parts[: index - 1], '*', *parts[index:]])}]"
    return nodeid
