"""Modes as a table: where grids are applied and which scan runs.

A new mode is a new row of MODES; its groups follow from the row. A user's own mode is a row that `register_mode` or
`declare_modes` adds for the rest of the process; `checkpoint:FOLDER` adds its row when it is first named. No mode
depends on environment variables or on the modes that ran before it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from probe.files.paths import safe_name
from probe.models.factories import check_factory
from probe.models.libraries import torchao_int8
from probe.running.calibration import Calibration
from probe.running.declarations import DeclaredMode, check_mode_name, checked_patterns
from probe.settings import FUNCTION, ConfigurationError
from probe.words import first_few, look_up

#: What the name of a mode starts with that is a checkpoint.
CHECKPOINT = "checkpoint:"
#: The name that stands for the checkpoint mode of the model itself, where `reference` names its float original.
GIVEN = "given"
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
    equals: str | None = None  # the mode that gives the same bits by definition
    equals_but_sums: str | None = None  # the mode that differs only in the order of sums, so that it may be identical
    keep_float: tuple[str, ...] = ()  # modules that stay float, as patterns of declarations.py
    base: str | None = None  # of a declared mode: the mode that it is but for `keep_float`
    source: str = ""  # the checkpoint that another tool quantized, of which the mode is

    @property
    def id(self) -> str:
        """The spelling of test ids and file names: 2-1 is mode_2_1, checkpoint:out/q4 is checkpoint_q4."""
        if self.name.startswith(CHECKPOINT):
            return _checkpoint_id(self.source)
        return f"mode_{self.name.replace('-', '_')}" if self.name[0].isdigit() else self.name

    @property
    def is_quantized(self) -> bool:
        """Whether the mode quantizes."""
        return self.kind != "float"

    @property
    def takes_format(self) -> bool:
        """Whether the mode quantizes to a format of probe; a checkpoint has formats of its own."""
        return self.is_quantized and not self.source


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
        Mode(
            "0",
            "baseline, all on the grid",
            conv_gives="codes",
            scan="fast",
            is_essential=True,
            equals_but_sums="2-1",
        ),
        Mode("2-0", "dequantize, then requantize", conv_gives="grid", scan_reads="again", scan="fast", equals="0"),
        Mode("2-1", "grid straight through, reference scan", conv_gives="codes", is_essential=True),
        Mode("2-2", "grid values in float arithmetic", conv_gives="grid", is_essential=True, equals="2-1"),
        Mode("2-3", "unrounded conv, requantized for the scan", scan_reads="grid", equals="2-1"),
        Mode("2-4", "unrounded conv and unrounded scan input", is_essential=True),
        Mode("3", "hybrid: conv1d input on a dynamic scale, the rest as 2-4", conv_input="dynamic", scan="fast"),
        Mode("linear_w", "weights of every linear layer", "linear"),
        Mode("linear_wa", "weights and inputs of every linear layer", "linear", inputs=True),
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
    if isinstance(name, str) and name in MODES:
        return MODES[name]
    if isinstance(name, str) and name.startswith(CHECKPOINT):
        return _checkpoint_mode(name.removeprefix(CHECKPOINT))
    if name == GIVEN:
        raise ValueError(
            "mode given is the model itself, quantized already, beside its float original. Name that one: "
            'reference = "package.module:factory" in [tool.probe], or --reference.'
        )
    plain = name.removeprefix("mode_") if isinstance(name, str) else name
    named = next((mode.name for mode in MODES.values() if mode.id == name), plain)
    return look_up("mode", named if named in MODES else name, MODES, see="List them with: probe modes")


def _checkpoint_mode(source: str) -> Mode:
    """The row of a checkpoint, added to the table if it is new. Nothing is loaded."""
    is_factory = FUNCTION.fullmatch(source) is not None
    source = source if is_factory else str(Path(source)) if source.strip() else ""
    if not any(map(str.isalnum, _checkpoint_id(source).removeprefix("checkpoint_"))):
        raise ValueError(
            f"mode {CHECKPOINT}{source} names no checkpoint. Expected {CHECKPOINT}FOLDER, a .gguf file, or "
            "package.module:factory. Test ids have the last name of the path: give one that ends in a name."
        )
    row = Mode(f"{CHECKPOINT}{source}", f"quantized by another tool: {source}", "user", source=source)
    if row.name in MODES:
        return MODES[row.name]
    for other in MODES.values():
        if other.id == row.id:
            raise ValueError(f"modes {other.name} and {row.name} are both {row.id} in test ids. Rename one of the two.")
    MODES[row.name] = row
    return row


def _checkpoint_id(source: str) -> str:
    """checkpoint_q4 of /data/out/q4, checkpoint_q4_gguf of q4.gguf, checkpoint_quantized of package:quantized.

    Where the folder lies is no part of it, so that it is the same on all machines.
    """
    made = FUNCTION.fullmatch(source)
    last = made[2] if made else Path(source).name
    return f"checkpoint_{safe_name(last).replace('.', '_').replace('-', '_')}"


def given_modes(names: Sequence[str], model: str, reference: str | None, *, narrowed: bool = False) -> list[str]:
    """The names with the checkpoint mode of the model for `given`, which is all there is if no mode is named.

    Only where `reference` names the float original of the model: names without the model itself are then refused,
    unless they are `narrowed`, a part of all that are compared.
    """
    if reference is None:
        return list(names)
    found = [f"{CHECKPOINT}{model}" if name == GIVEN else name for name in names or (GIVEN,)]
    if not narrowed and f"{CHECKPOINT}{model}" not in found:
        raise ValueError(
            f"{reference} is the reference of {model}, and the modes {', '.join(names)} leave that model out. Add the "
            "mode given, which is the model itself, or leave the reference out."
        )
    return found


def is_mode(name: str) -> bool:
    """Whether there is such a mode, in either spelling."""
    return any(name in (mode.name, mode.id) for mode in MODES.values())


def expand_modes(names: list[str]) -> list[Mode]:
    """Modes and groups, in order, each mode once."""
    plain = [mode for name in names for mode in GROUPS.get(name, (name,))]
    return list(dict.fromkeys(find_mode(name) for name in plain))


def equal_to(name: str, *, up_to_sums: bool = False) -> str:
    """The id of the mode that gives the same bits by definition, `mode_0` for `mode_2_0`; else the mode's own.

    `up_to_sums`: of the mode that gives the same but for the order of sums, `mode_2_1` for both.
    A name that is not in the table, such as that of a mode recorded elsewhere, stands for itself.
    """
    try:
        mode = find_mode(name)
    except ValueError:
        return name
    mode = find_mode(mode.equals) if mode.equals else mode
    return find_mode(mode.equals_but_sums).id if up_to_sums and mode.equals_but_sums else mode.id


def register_mode(name: str, build: Build, *, what: str = "a user's mode", keep_float: Sequence[str] = ()) -> Mode:
    """Add a mode to MODES: `build(model, format, calibration)` returns the quantized model.

    It is given a float copy, which it may change and return; Mamba mixers are SiteMixers in it. `keep_float` names the
    modules that it leaves float, which is checked: layers that it names must not change, and all others must.
    """
    _check_new(name)
    if not callable(build):
        raise ValueError(
            f"mode {name!r} was given a {type(build).__name__}, expected a function of model, format, calibration."
        )
    try:
        patterns = checked_patterns(keep_float) if keep_float != () else ()
    except ValueError as problem:
        raise ValueError(f"keep_float of mode {name!r} is {keep_float!r}; expected {problem}.") from None
    MODES[name] = Mode(name, what, "user", build=build, keep_float=patterns)
    return MODES[name]


def declare_modes(declared: Mapping[str, DeclaredMode], *, where: str) -> None:
    """Add declared modes to MODES; one that is there already must be the same. `where` is their file."""
    for name in declared:
        _declare(name, declared, where, ())


def _declare(name: str, declared: Mapping[str, DeclaredMode], where: str, before: tuple[str, ...]) -> None:
    here, wanted = f"[tool.probe.modes.{name}] of {where}", declared[name]
    if wanted.base in (name, *before):
        raise ConfigurationError(f"{here}: base is {wanted.base!r}, which leads back to {name!r}. Name another mode.")
    if wanted.base in declared:
        _declare(wanted.base, declared, where, (*before, name))
    try:
        if wanted.base.startswith(CHECKPOINT):
            allow = "call it in a function of your own, and name that"
            check_factory(wanted.base.removeprefix(CHECKPOINT), where="the checkpoint of base", allow=allow)
        base = find_mode(wanted.base)
        if not base.is_quantized:
            raise ValueError(
                f"base is {base.name}, a float mode: there is nothing to keep float in it. Name a mode that quantizes."
            )
        patterns = (*base.keep_float, *wanted.keep_float)
        origin = base.base or base.name
        what = f"{origin}, but {first_few(patterns, most=3)} stay float"
        row = replace(base, name=name, what=what, keep_float=patterns, base=origin)
        row = replace(row, equals=None, equals_but_sums=None, is_essential=False)
        if MODES.get(name) == row:
            return
        _check_new(name)
    except ValueError as problem:
        raise ConfigurationError(f"{here}: {problem}") from None
    MODES[name] = row


def check_declarable(name: str) -> None:
    """Refuse a name that a declared mode cannot have; that of another declared mode is fine."""
    if name not in MODES or not MODES[name].base:
        _check_new(name)


def _check_new(name: str) -> None:
    check_mode_name(name)
    known = {*MODES, *GROUPS, GIVEN, *(mode.id for mode in MODES.values())}
    if {name, f"mode_{name}", Mode(name, "").id} & known:
        raise ValueError(f"there is a {'group' if name in GROUPS else 'mode'} {name!r} already. Choose another name.")


def unregister_mode(name: str) -> None:
    """Remove a mode that `register_mode` or `declare_modes` added, or that of a checkpoint."""
    mode = find_mode(name)
    if not (mode.base or mode.source) and (mode.kind != "user" or mode.library):
        raise ValueError(f"mode {name!r} is built in and stays.")
    del MODES[mode.name]
