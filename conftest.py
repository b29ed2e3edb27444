"""Settings for every test of the project."""

import importlib.util

import pytest

pytest_plugins = ["probe.plugin", "pytester", "tests.faults.kills"]  # the first one also works if it is not installed

if importlib.util.find_spec("hypothesis"):  # the gate alone does not need it
    from hypothesis import settings

    settings.register_profile("probe", deadline=None, derandomize=True, max_examples=60)
    settings.load_profile("probe")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # xdist runs one process per core already
        import torch

        torch.set_num_threads(1)
