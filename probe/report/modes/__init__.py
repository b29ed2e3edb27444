"""The report of `probe compare`."""
