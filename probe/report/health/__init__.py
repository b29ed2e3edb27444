"""The report of `probe check`."""
