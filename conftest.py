"""Settings for every test of the project."""

import pytest
import torch
from hypothesis import settings

pytest_plugins = ["probe.plugin", "pytester"]  # the plugin also where the package is not installed

settings.register_profile("probe", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("probe")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # xdist runs one process per core already
        torch.set_num_threads(1)
