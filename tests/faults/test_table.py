"""The tables that benchmarks/kill_table.py wrote into the documentation are of the faults that there are now."""

import re
from pathlib import Path

from tests.faults.groups import FAULTS, GROUPS

ROOT = Path(__file__).parents[2]
AGAIN = "make it again with: python benchmarks/kill_table.py --write"


def test_the_table_counts_the_faults_of_every_group() -> None:
    rows = re.findall(
        r"^\| (?:\*\*)?([^|*]+?)(?:\*\*)? \| (?:\*\*)?(\d+)(?:\*\*)? \|", written("docs/gate.md", "kill table"), re.M
    )
    expected = {group: len(faults) for group, faults in GROUPS.items()} | {"all": len(FAULTS)}
    assert {name: int(count) for name, count in rows} == expected, AGAIN


def test_every_fault_is_listed_with_its_recipe_and_case() -> None:
    cells = [line.replace("\\", "").split(" | ") for line in written("docs/faults.md", "faults").splitlines()]
    listed = [(row[0].removeprefix("| "), row[1].partition(",")[0], row[2]) for row in cells if len(row) > 3]
    rows = [row for row in listed if row[0] != "fault"]
    assert rows == [(fault.name, fault.recipe, fault.label) for fault in FAULTS], AGAIN


def test_every_fault_is_caught_and_the_readme_says_of_how_many() -> None:
    line = " ".join(written("README.md", "kill line").split())
    found = re.match(r"Of (\d+) faults that were put into the code: probe (\d+),", line)
    assert found is not None, AGAIN
    assert [int(number) for number in found.groups()] == [len(FAULTS), len(FAULTS)], AGAIN


def written(file: str, name: str) -> str:
    """What the script wrote between the markers of a name."""
    text = (ROOT / file).read_text(encoding="utf-8")
    _, _, rest = text.partition(f"<!-- {name}: written by benchmarks/kill_table.py -->")
    return rest.partition(f"<!-- end of {name} -->")[0]
