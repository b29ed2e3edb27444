"""Baselines on disk: the figures and golden values that a run is compared with."""
