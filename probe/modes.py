"""Modes as a table: where grids are applied and which scan runs; and how a recipe turns a float model into its copy.

No environment variables and no global state: a mode works on a copy, and the model it was given stays as it was.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from probe.calibration import Calibration, rotated_twin
from probe.formats import FORMATS
from probe.grids import activation_grid, sequence_grid, weight_on_grid
from probe.models.foreign import torchao_int8
from probe.models.linear import grid_linears
from probe.models.load import fingerprint
from probe.models.mamba import WEIGHTS, SiteMixer, mamba_blocks, with_sites
from probe.names import look_up

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
    kind: Literal["float", "ssm", "linear", "user"] = "ssm"
    conv_input: Literal["static", "dynamic"] = "static"
    conv_gives: Value = "float"
    scan_reads: Value = "float"
    scan: str = "sequential"
    dtype: torch.dtype = torch.float32
    inputs: bool = False  # of linear modes: whether inputs are on the grid too
    build: Build | None = None  # of user modes

    @property
    def id(self) -> str:
        """The spelling of test ids and file names: 2-1 is mode_2_1."""
        return f"mode_{self.name.replace('-', '_')}" if self.name[0].isdigit() else self.name

    @property
    def is_quantized(self) -> bool:
        """Whether the mode takes a format."""
        return self.kind != "float"


def _torchao_weights(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
    return torchao_int8(model, format, dynamic=False)


def _torchao_dynamic(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
    return torchao_int8(model, format, dynamic=True)


MODES: dict[str, Mode] = {
    m.name: m
    for m in (
        Mode("fp32", "the reference: the float model, nothing quantized", "float"),
        Mode("fp16", "the float model in float16", "float", dtype=torch.float16),
        Mode("bf16", "the float model in bfloat16", "float", dtype=torch.bfloat16),
        Mode("0", "baseline, all on the grid", conv_gives="codes", scan="fast"),
        Mode("2-0", "dequantize, then requantize", conv_gives="grid", scan_reads="again", scan="fast"),
        Mode("2-1", "grid straight through, reference scan", conv_gives="codes"),
        Mode("2-2", "grid values in float arithmetic", conv_gives="grid"),
        Mode("2-3", "unrounded conv, requantized for the scan", scan_reads="grid"),
        Mode("2-4", "unrounded conv and unrounded scan input"),
        Mode("3", "hybrid: conv1d input on a dynamic scale, the rest as 2-4", conv_input="dynamic", scan="fast"),
        Mode("linear_w", "weights of every nn.Linear", "linear"),
        Mode("linear_wa", "weights and inputs of every nn.Linear", "linear", inputs=True),
        Mode("torchao_w", "torchao's int8 weights (extra: torchao)", "user", build=_torchao_weights),
        Mode("torchao_wa", "torchao's int8 weights and dynamic inputs", "user", build=_torchao_dynamic),
    )
}
GROUPS: dict[str, tuple[str, ...]] = {
    "all": ("0", "2-0", "2-1", "2-2", "2-3", "2-4", "3"),
    "essential": ("fp32", "0", "2-1", "2-2", "2-4"),
    "quant_only": ("0", "2-0", "2-1", "2-2", "2-3", "2-4", "3"),
    "fp_only": ("fp32",),
}

#: Quamba's CUDA kernels round these integers half away from zero, all others half to even.
HALF_AWAY = ("conv1d.output", "out_proj.input")


def find_mode(name: str) -> Mode:
    """The row of a mode in either spelling, `2-1` or `mode_2_1`."""
    plain = name.removeprefix("mode_").replace("_", "-") if name.startswith("mode_") else name
    return look_up("mode", plain if plain in MODES else name, MODES, see="List them with: probe modes")


def expand_modes(names: list[str]) -> list[Mode]:
    """Modes and groups, in order, each mode once."""
    plain = [mode for name in names for mode in GROUPS.get(name, (name,))]
    return list(dict.fromkeys(find_mode(name) for name in plain))


def register_mode(name: str, build: Build, *, what: str = "a user's mode") -> Mode:
    """Add a mode of one's own: `build(model, format, calibration)` returns the quantized model.

    It is given a float copy, which it may change and return; Mamba mixers are SiteMixers in it.
    """
    taken = {*MODES, *GROUPS, *(mode.id for mode in MODES.values())}
    if name in taken or f"mode_{name}" in taken:
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
    """Take a user's mode out again."""
    if find_mode(name).kind != "user" or name.startswith("torchao"):
        raise ValueError(f"mode {name!r} is built in and stays.")
    del MODES[name]


@dataclass(frozen=True)
class Recipe:
    """A mode and, if it quantizes, a format: everything that turns the float model into the quantized one."""

    mode: str
    format: str | None = None

    def __post_init__(self) -> None:
        row = find_mode(self.mode)
        object.__setattr__(self, "mode", row.name)
        if row.is_quantized and self.format is None:
            raise ValueError(f"mode {row.name} quantizes and needs a format. Known: {', '.join(FORMATS)}.")
        if not row.is_quantized and self.format is not None:
            raise ValueError(f"mode {row.name} is a float mode and takes no format, but {self.format} was given.")
        if self.format is not None:
            look_up("format", self.format, FORMATS, see="List them with: probe formats")

    @property
    def needs_calibration(self) -> bool:
        """Whether it has static scales; modes of users may look at a calibration as well."""
        static = self.format is not None and FORMATS[self.format].scale in ("float32", "e4m3")
        return static or find_mode(self.mode).kind == "user"

    def __str__(self) -> str:
        row = find_mode(self.mode)
        return row.id if self.format is None else f"{row.id}-{self.format}"


def apply(model: nn.Module, recipe: Recipe, calibration: Calibration | None = None) -> nn.Module:
    """A copy of the float `model` under the recipe, ready to run; the model itself is not touched."""
    mode = find_mode(recipe.mode)
    if calibration is not None and calibration.model != fingerprint(model):
        raise ValueError(
            f"the calibration belongs to a model with fingerprint {calibration.model}, this one has "
            f"{fingerprint(model)}: the weights changed or it is another model. Use probe.calibrate_on again."
        )
    if mode.kind == "float":
        return _float_twin(model).to(mode.dtype)
    assert recipe.format is not None
    if mode.kind == "user":
        assert mode.build is not None
        built = mode.build(_float_twin(model), recipe.format, calibration)
        if not isinstance(built, nn.Module):
            raise ValueError(
                f"mode {mode.name!r} returned a {type(built).__name__}, expected the quantized torch.nn.Module. "
                "Return the model from the function given to register_mode."
            )
        return built.eval()
    if mode.kind == "linear":
        return grid_linears(_float_twin(model), recipe.format, calibration, inputs=mode.inputs)
    return _ssm(model, mode, recipe.format, calibration)


def _float_twin(model: nn.Module) -> nn.Module:
    """The float copy that every mode but the SSM ones starts from, and the reference itself: a mode that does
    nothing to it gives the very bits of the reference, and is found out."""
    has_blocks = any(True for _ in mamba_blocks(model))
    return with_sites(model) if has_blocks else copy.deepcopy(model).eval()


def _ssm(model: nn.Module, mode: Mode, format: str, calibration: Calibration | None) -> nn.Module:
    twin = rotated_twin(model, scan=mode.scan)
    for name, block in mamba_blocks(twin):
        mixer = block.mixer
        assert isinstance(mixer, SiteMixer)
        _put_weights_on_grid(mixer, format)
        _put_sites_on_grid(mixer, mode, format, _amax_of(calibration, f"{name}.mixer"))
    return twin


def _amax_of(calibration: Calibration | None, mixer: str) -> Callable[[str], float | None]:
    return lambda site: None if calibration is None else calibration.amax_of(f"{mixer}.{site}")


@torch.no_grad()
def _put_weights_on_grid(mixer: SiteMixer, format: str) -> None:
    tensors = dict(mixer.named_parameters())
    for name in WEIGHTS:
        if name in tensors:  # a convolution may have no bias
            tensors[name].copy_(weight_on_grid(tensors[name], format))


def _put_sites_on_grid(mixer: SiteMixer, mode: Mode, format: str, amax: Callable[[str], float | None]) -> None:
    """The rows of the table as grids at sites. One scale serves conv1d.output, x_proj.input and scan.u."""

    def put(site: str, *, like: str | None = None, by_codes: bool = False) -> None:
        source = like or site
        rounding = "half_away" if source in HALF_AWAY else "half_even"
        mixer.site(site).grid = activation_grid(format, amax(source), rounding=rounding, by_codes=by_codes)

    for site in ("in_proj.input", "in_proj.output", "x_proj.output", "dt_proj.output", "out_proj.input"):
        put(site)
    if FORMATS[format].scale == "float32":
        put("scan.state")  # what decode carries on; MX formats leave the state float
    if mode.conv_input == "dynamic":
        mixer.site("conv1d.input").grid = sequence_grid(format, amax("in_proj.output"))
    if mode.conv_gives == "float":
        put("x_proj.input", like="conv1d.output")
    else:
        put("conv1d.output", by_codes=mode.conv_gives == "codes")
    if mode.scan_reads != "float":
        put("scan.u", like="conv1d.output")
