"""Devices by name: those of this machine, and recordings made on other machines."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from probe.words import look_up

RECORDED = "recorded:"


def _accelerator(name: str) -> bool:
    import torch

    found = getattr(torch, name, None) or getattr(torch.backends, name, None)
    return found is not None and bool(found.is_available())


#: Device -> whether this machine has it.
DEVICES: dict[str, Callable[[], bool]] = {
    "cpu": lambda: True,
    "cuda": lambda: _accelerator("cuda"),
    "mps": lambda: _accelerator("mps"),
    "xpu": lambda: _accelerator("xpu"),
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
