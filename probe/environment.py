"""What a baseline was made with: versions and the kind of machine. Host names and clock speeds never matter."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from probe.version import VERSION

PACKAGES = ("torch", "numpy", "transformers", "safetensors")
#: Facts about the input rather than the environment: where these differ, nothing can be compared.
INPUT = "input."
ANCHORS = "anchors"


def environment() -> dict[str, str]:
    """The facts of this process."""
    facts = {"probe": VERSION, "python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    facts["cpu capability"] = str(torch.backends.cpu.get_cpu_capability())
    facts["threads"] = str(torch.get_num_threads())
    return facts


def differences(then: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """What is not as it was when the baselines were made, `torch 2.12.0 -> 2.13.0`; threads never matter."""
    if then is None:
        return []
    names = [name for name in now if name in then and name != "threads" and then[name] != now[name]]
    return [f"{name} {then[name]} -> {now[name]}" for name in names]
