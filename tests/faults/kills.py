"""The kill table: what became of every fault, shown at the end of the run, whichever process judged it."""

from typing import Any

import pytest

HEAD = ("fault", "layer", "recipe", "verdict", "strongest figure", "cause")
KEY = "kill"


@pytest.fixture
def kill(record_property: Any) -> Any:
    """Adds a row to the table."""
    return lambda *row: record_property(KEY, "\t".join(row))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    rows = [
        value.split("\t") for report in reports for key, value in getattr(report, "user_properties", []) if key == KEY
    ]
    if not rows:
        return
    terminalreporter.section(f"{len(rows)} injected faults")
    table = [HEAD, *sorted(rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEAD) - 1)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        terminalreporter.write_line("  ".join([*cells, row[-1]]))
