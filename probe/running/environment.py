"""The environment of a baseline: package versions and the kind of machine, without host names or clock speeds."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from probe.version import VERSION

PACKAGES = ("torch", "numpy", "transformers", "safetensors")
#: Facts about the input rather than the environment: where these differ, nothing can be compared.
INPUT = "input."
ANCHORS = "anchors"
THREADS = "threads"


def environment() -> dict[str, str]:
    """The facts of this process."""
    import torch  # here, because reports use the rest of this file without torch

    facts = {"probe": VERSION, "python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    facts["cpu capability"] = str(torch.backends.cpu.get_cpu_capability())
    facts[THREADS] = str(torch.get_num_threads())
    return facts


def comparable(facts: Mapping[str, str]) -> dict[str, str]:
    """The facts that may explain a drift: not the input, which is checked by itself, nor how many threads ran."""
    return {name: fact for name, fact in facts.items() if not name.startswith((INPUT, ANCHORS, THREADS))}


def differences(then: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """The facts that changed, as `torch 2.12.0 -> 2.13.0`; none if no facts were stored."""
    if not then:
        return []
    pairs = [(name, then.get(name, "none"), now.get(name, "none")) for name in dict.fromkeys([*then, *now])]
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
