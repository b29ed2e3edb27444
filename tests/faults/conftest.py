"""The kill table is shown where this folder is named on the command line; a plugin of the root would show it always."""

from tests.faults.kills import kill, pytest_terminal_summary

__all__ = ["kill", "pytest_terminal_summary"]
