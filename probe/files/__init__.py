"""Everything that touches the disk: atomic writes, locks, checked JSON, tensor files, safe names."""
