"""The report of `probe diff`."""
