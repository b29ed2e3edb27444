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
    is_case = bracket and len(parts) in (3, 4) and (parts[2].partition(":")[0] in DEVICES or is_recorded(parts[2]))
    return f"{head}[{'-'.join([parts[0], '*', *parts[2:]])}]" if is_case else nodeid
