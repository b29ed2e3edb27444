"""Recordings beside each other: modes against their reference, devices against each other, a layer against the rest."""
