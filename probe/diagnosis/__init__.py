"""Which step of a layer disagrees with its definition, and what the difference looks like."""
