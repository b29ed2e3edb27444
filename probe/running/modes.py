"""Modes as a table: where grids are applied and which scan runs.

A new mode is a new row of MODES; its groups follow from the row. A user's own mode is a row that `register_mode` adds
for the rest of the process. No mode depends on environment variables or on the modes that ran before it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from probe.models.linear import torchao_int8
from probe.running.calibration import Calibration
from probe.words import look_up

Value = Literal["float", "codes", "grid", "again"]
Build = Callable[[nn.Module, str, Calibration | None], nn.Module]


@dataclass(frozen=True)
class Mode:
    """A row: what the mode is, and where its grids lie.

    conv_input   static: x lies on the grid of in_proj.output; dynamic: on one of its own, a scale per sequence
    conv_gives   codes: quantized and decoded; grid: fake-quantized; float: the unrounded result F
    scan_reads   float: what conv1d gives; grid: F rounded for the scan; again: the grid value rounded once more
    """

    name: str
    what: str
    kind: Literal["float", "ssm", "linear", "user"] = "ssm"  # user: made by its own function, `build`
    conv_input: Literal["static", "dynamic"] = "static"
    conv_gives: Value = "float"
    scan_reads: Value = "float"
    scan: str = "sequential"
    dtype: torch.dtype = torch.float32
    inputs: bool = False  # of linear modes: whether inputs are on the grid too
    build: Build | None = None  # of user modes
    library: str | None = None  # the package whose quantizer `build` calls; None: a user's function
    formats: tuple[str, ...] = ()  # the only formats that the mode takes; empty: all
    is_reference: bool = False  # the float model that every other mode is compared with
    is_essential: bool = False  # in the group `essential`

    @property
    def id(self) -> str:
        """The spelling of test ids and file names: 2-1 is mode_2_1."""
        return f"mode_{self.name.replace('-', '_')}" if self.name[0].isdigit() else self.name

    @property
    def is_quantized(self) -> bool:
        """Whether the mode takes a format."""
        return self.kind != "float"


def _torchao(name: str, what: str, *, dynamic: bool) -> Mode:
    def build(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
        return torchao_int8(model, format, dynamic=dynamic)

    return Mode(name, what, "user", build=build, library="torchao", formats=("int8",))


MODES: dict[str, Mode] = {
    m.name: m
    for m in (
        Mode(
            "fp32", "the reference: the float model, nothing quantized", "float", is_reference=True, is_essential=True
        ),
        Mode("fp16", "the float model in float16", "float", dtype=torch.float16),
        Mode("bf16", "the float model in bfloat16", "float", dtype=torch.bfloat16),
        Mode("0", "baseline, all on the grid", conv_gives="codes", scan="fast", is_essential=True),
        Mode("2-0", "dequantize, then requantize", conv_gives="grid", scan_reads="again", scan="fast"),
        Mode("2-1", "grid straight through, reference scan", conv_gives="codes", is_essential=True),
        Mode("2-2", "grid values in float arithmetic", conv_gives="grid", is_essential=True),
        Mode("2-3", "unrounded conv, requantized for the scan", scan_reads="grid"),
        Mode("2-4", "unrounded conv and unrounded scan input", is_essential=True),
        Mode("3", "hybrid: conv1d input on a dynamic scale, the rest as 2-4", conv_input="dynamic", scan="fast"),
        Mode("linear_w", "weights of every nn.Linear", "linear"),
        Mode("linear_wa", "weights and inputs of every nn.Linear", "linear", inputs=True),
        _torchao("torchao_w", "torchao's int8 weights (extra: torchao)", dynamic=False),
        _torchao("torchao_wa", "torchao's int8 weights and dynamic inputs", dynamic=True),
    )
}
_SSM = tuple(mode.name for mode in MODES.values() if mode.kind == "ssm")
GROUPS: dict[str, tuple[str, ...]] = {
    "all": _SSM,
    "essential": tuple(mode.name for mode in MODES.values() if mode.is_essential),
    "quant_only": _SSM,
    "fp_only": tuple(mode.name for mode in MODES.values() if mode.is_reference),
}


def find_mode(name: str) -> Mode:
    """The row of a mode in either spelling, `2-1` or `mode_2_1`."""
    plain = name.removeprefix("mode_").replace("_", "-") if name.startswith("mode_") else name
    return look_up("mode", plain if plain in MODES else name, MODES, see="List them with: probe modes")


def expand_modes(names: list[str]) -> list[Mode]:
    """Modes and groups, in order, each mode once."""
    plain = [mode for name in names for mode in GROUPS.get(name, (name,))]
    return list(dict.fromkeys(find_mode(name) for name in plain))


def register_mode(name: str, build: Build, *, what: str = "a user's mode") -> Mode:
    """Add a mode to MODES: `build(model, format, calibration)` returns the quantized model.

    It is given a float copy, which it may change and return; Mamba mixers are SiteMixers in it.
    """
    known = {*MODES, *GROUPS, *(mode.id for mode in MODES.values())}
    if name in known or f"mode_{name}" in known:
        raise ValueError(f"there is a mode {name!r} already. Choose another name, or unregister_mode({name!r}) first.")
    if not callable(build):
        raise ValueError(
            f"mode {name!r} was given a {type(build).__name__}, expected a function of model, format, calibration."
        )
    if not name or not all(part.isalnum() for part in name.replace("-", "_").split("_")):
        raise ValueError(f"mode name {name!r} cannot be part of a test id. Use letters, digits, '_' and '-'.")
    MODES[name] = Mode(name, what, "user", build=build)
    return MODES[name]


def unregister_mode(name: str) -> None:
    """Remove a mode that `register_mode` added."""
    mode = find_mode(name)
    if mode.kind != "user" or mode.library:
        raise ValueError(f"mode {name!r} is built in and stays.")
    del MODES[name]
