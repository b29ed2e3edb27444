"""Where a measurement runs: devices by name, and the facts of a machine that are stored with a baseline.

The facts are package versions and the kind of machine, without host names or clock speeds.
"""

import importlib.util
import platform
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from probe.version import VERSION
from probe.words import look_up

RECORDED = "recorded:"


def _accelerator(name: str) -> bool:
    import torch

    found = getattr(torch, name, None) or getattr(torch.backends, name, None)
    return found is not None and bool(found.is_available())


#: Device -> whether this machine has it.
DEVICES: dict[str, Callable[[], bool]] = {
    "cpu": lambda: True,
    **{name: partial(_accelerator, name) for name in ("cuda", "mps", "xpu")},
    "xla": lambda: importlib.util.find_spec("torch_xla") is not None,
}


def is_recorded(device: str) -> bool:
    """Whether the device is a recording made elsewhere."""
    return device.startswith(RECORDED)


def recorded_folder(device: str, root: Path) -> Path:
    """The folder of the recording; a relative one lies in `root`."""
    return root / Path(device.removeprefix(RECORDED)).expanduser()


def check_device(device: str, root: Path) -> None:
    """Refuse an unknown device, and a recording whose folder does not exist."""
    if is_recorded(device):
        folder = recorded_folder(device, root)
        if not folder.is_dir():
            raise ValueError(f"device {device!r}: there is no folder {folder}. Give the folder of a recording.")
        return
    look_up("device", device.partition(":")[0], DEVICES, see=f"Or {RECORDED}<folder>, a recording made elsewhere.")


def is_present(device: str) -> bool:
    """Whether cases of this device can be measured here."""
    return is_recorded(device) or DEVICES[device.partition(":")[0]]()


PACKAGES = ("torch", "numpy", "transformers", "safetensors")
#: Facts about the input rather than the environment: where these differ, nothing can be compared.
INPUT = "input."
#: What linear modes put on a grid beside the layers; absent where that is nothing.
INCLUDE = f"{INPUT}include"
ANCHORS = "anchors"
#: The rows of formats that figures were made with.
FORMAT = "format."
#: Why a path had no case.
NOT_RUN = "not run."
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
    """The facts that may explain a drift: neither the sources, which are compared apart, nor the thread count."""
    return {
        name: fact for name, fact in facts.items() if not name.startswith((INPUT, ANCHORS, FORMAT, NOT_RUN, THREADS))
    }


def differences(then: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """The facts that changed, as `torch 2.12.0 -> 2.13.0`; none if no facts were stored."""
    if not then:
        return []
    pairs = [(name, then.get(name, "none"), now.get(name, "none")) for name in dict.fromkeys([*then, *now])]
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
