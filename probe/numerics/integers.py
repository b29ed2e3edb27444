"""Plain integer grids of 2 to 8 bits: codes, scales and zero points."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack, cast

import torch
from torch import Tensor

from probe.numerics.blocks import Blocks, resolve_axis
from probe.numerics.native import can_read, check_out, new_tensor, numba_twin, written
from probe.numerics.rounding import draw_noise, narrow, require_float, require_tensor, round_integer
from probe.words import look_up

#: No scale taken from data is below this (the float32 nearest to it).
SMALLEST_SCALE = 1e-6

IntegerImplementation = Literal["auto", "reference"]
INTEGER_IMPLEMENTATIONS: dict[str, str] = {
    "auto": "the kernel on the CPU, else the definition",
    "reference": "the readable definition",
}


def code_range(bits: int, symmetric: bool) -> tuple[int, int]:
    """The first and last code: -2^(b-1) .. 2^(b-1)-1 if symmetric, else 0 .. 2^b-1."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"bits is {bits!r}. An integer grid has from 2 to 8 bits: give a whole number from 2 to 8.")
    if not isinstance(symmetric, bool):
        raise ValueError(f"symmetric is {symmetric!r}. Give True or False.")
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)


@dataclass(frozen=True, eq=False)
class IntegerParameters:
    """The grid scale * (code - zero_point); `scale` and `zero_point` broadcast against the tensor."""

    scale: Tensor  # float32, finite and above 0
    zero_point: Tensor  # int32, of the shape of `scale`: the code of 0.0; zeros if symmetric
    bits: int
    symmetric: bool

    def __post_init__(self) -> None:
        low, high = code_range(self.bits, self.symmetric)
        if self.scale.dtype != torch.float32 or self.zero_point.dtype != torch.int32:
            raise ValueError(
                f"scale is {self.scale.dtype} and zero_point is {self.zero_point.dtype}. "
                "Give a float32 scale and an int32 zero_point, as integer_parameters does."
            )
        if self.scale.shape != self.zero_point.shape:
            raise ValueError(
                f"scale has shape {list(self.scale.shape)} and zero_point {list(self.zero_point.shape)}. "
                "Give both the same shape."
            )
        _refuse(
            ~(self.scale.isfinite() & (self.scale > 0)),
            "scales are not finite numbers above 0. Take them with integer_parameters from data that fits float32.",
        )
        first, last = (0, 0) if self.symmetric else (low, high)
        _refuse(
            (self.zero_point < first) | (self.zero_point > last),
            f"zero points are outside {first} .. {last}, the range of {'' if self.symmetric else 'a'}symmetric grids "
            f"of {self.bits} bits. Take them with integer_parameters.",
        )

    @property
    def code_range(self) -> tuple[int, int]:
        """The first and last code."""
        return code_range(self.bits, self.symmetric)

    @property
    def code_dtype(self) -> torch.dtype:
        """int8 for symmetric grids, uint8 for asymmetric ones, whatever the bits."""
        return torch.int8 if self.symmetric else torch.uint8


def integer_parameters(minimum: Tensor, maximum: Tensor, *, bits: int = 8, symmetric: bool = True) -> IntegerParameters:
    """The grid of the range `minimum` .. `maximum`, element by element.

        symmetric    scale = max(|minimum|, |maximum|) / (2^(b-1) - 1),  zero_point = 0
        asymmetric   lo = min(minimum, 0), hi = max(maximum, 0)
                     scale = (hi - lo) / (2^b - 1)
                     zero_point = clip(round_half_even(-lo / scale), 0, 2^b - 1)

    Computed in float64; the scale is rounded once to float32 and is never below 1e-6 nor above the largest
    float32. 0.0 is always on the grid. A range of zeros gives the smallest scale. NaN and Inf are refused.
    """
    low, high = code_range(bits, symmetric)
    require_tensor(minimum)
    require_tensor(maximum)
    if minimum.shape != maximum.shape:
        raise ValueError(
            f"minimum has shape {list(minimum.shape)} and maximum {list(maximum.shape)}. Give both the same shape."
        )
    lo, hi = minimum.detach().double(), maximum.detach().double()
    _refuse(
        ~(lo.isfinite() & hi.isfinite()),
        "ranges have an end that is NaN or Inf, which give no scale. Observe finite data.",
    )
    _refuse(lo > hi, "ranges have a minimum above their maximum. Pass the minimum first and the maximum second.")
    if symmetric:
        scale = _scale(torch.maximum(lo.abs(), hi.abs()), high)
        return IntegerParameters(scale, torch.zeros_like(scale, dtype=torch.int32), bits, True)
    lo, hi = lo.clamp(max=0.0), hi.clamp(min=0.0)
    scale = _scale(hi - lo, high)
    zero_point = torch.round(-lo / scale.double()).clamp(low, high).to(torch.int32)
    return IntegerParameters(scale, zero_point, bits, False)


def _refuse(wrong: Tensor, problem: str) -> None:
    """A ValueError where any is wrong: how many of how many, and the problem."""
    count = int(wrong.sum())
    if count:
        raise ValueError(f"{count} of {wrong.numel()} {problem}")


def _scale(extent: Tensor, steps: int) -> Tensor:
    return (extent / steps).clamp(SMALLEST_SCALE, torch.finfo(torch.float32).max).to(torch.float32)


def quantize_integer(
    x: Tensor,
    parameters: IntegerParameters,
    *,
    rounding: str = "half_even",
    generator: torch.Generator | None = None,
    implementation: IntegerImplementation = "auto",
) -> Tensor:
    """The codes of `x`, int8 if symmetric and uint8 if not.

        code = clip(round(x / scale) + zero_point, first code, last code)

    The exact quotient is rounded. It is computed in float64: among the codes, a quotient of two numbers of 24 bits is
    an integer or a tie, or at least 2^-26 away from one, far more than the float64 error of at most 2^-44. A float64
    `x` has 53 bits and can come closer; `_off_false_ties` corrects a quotient that became a tie by rounding.

    Inf becomes the last code, -Inf the first. -0.0 and 0.0 share one code. NaN has none: ValueError.

    `implementation` is a name of INTEGER_IMPLEMENTATIONS.
    """
    require_float(x, "Integer grids")
    _check_parameters(x, parameters, implementation)
    missing = int(x.isnan().sum())
    if missing:
        raise ValueError(
            f"x has {missing} NaN among {x.numel()} values and integer codes cannot hold NaN. "
            "Find where they come from, or replace them with torch.nan_to_num first."
        )
    noise = draw_noise(x.shape, x.device, rounding, generator)
    kernel = _kernel(x, parameters, implementation)
    if kernel is None:
        return _codes(x, parameters, rounding, noise).to(parameters.code_dtype)
    codes = new_tensor(x.shape, parameters.code_dtype)
    kernel(x, codes, rounding, noise)
    return codes


def _check_parameters(x: Tensor, parameters: IntegerParameters, implementation: str) -> None:
    if not isinstance(parameters, IntegerParameters):
        raise TypeError(
            f"parameters is a {type(parameters).__name__}, expected IntegerParameters. "
            "Make them with integer_parameters, dynamic_parameters or an observer."
        )
    look_up("implementation", implementation, INTEGER_IMPLEMENTATIONS)
    _check_broadcast(parameters.scale, x)


def _kernel(
    x: Tensor, parameters: IntegerParameters, implementation: str
) -> Callable[[Tensor, Tensor, str, Tensor | None], None] | None:
    """What writes the values of `x`, or its codes, to a tensor; None where torch does the work."""
    if implementation != "auto" or not x.numel() or not can_read(x) or not can_read(parameters.scale):
        return None
    calls = numba_twin("probe.numerics.kernels.calls", "values")
    sharing = None if calls is None else calls.sharing_of(tuple(x.shape), tuple(parameters.scale.shape))
    if calls is None or sharing is None:
        return None

    def write(x: Tensor, target: Tensor, rounding: str, noise: Tensor | None) -> None:
        grid = parameters.scale.detach().contiguous(), parameters.zero_point.contiguous()
        calls.integer_results(x.detach().contiguous(), target, *grid, sharing, parameters.code_range, rounding, noise)

    return write


def _codes(x: Tensor, parameters: IntegerParameters, rounding: str, noise: Tensor | None) -> Tensor:
    """The codes as float64 numbers; NaN stays NaN."""
    wide, scale = x.detach().double(), parameters.scale.double()
    quotient = wide / scale
    if x.dtype == torch.float64:
        quotient = _off_false_ties(quotient, wide, scale)
    code = round_integer(quotient, rounding, noise) + parameters.zero_point
    return code.clamp_(*parameters.code_range)


def _off_false_ties(quotient: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """The quotient; where rounding to float64 made it a multiple of 1/2, the next float64 on its true side.

    For a multiple of 1/2 among the codes, quotient * scale is exact (at most 10 + 24 bits), so comparing it with x
    shows whether the quotient is exact. Beyond the codes, the clip decides.
    """
    back = quotient * scale
    on_half = torch.round(2 * quotient) == 2 * quotient
    toward = torch.where(x > back, torch.inf, -torch.inf).to(quotient.dtype)
    return torch.where(on_half & (back != x), torch.nextafter(quotient, toward), quotient)


def dequantize_integer(codes: Tensor, parameters: IntegerParameters, dtype: torch.dtype = torch.float32) -> Tensor:
    """The grid values of `codes`, rounded once to `dtype`.

        value = scale * (code - zero_point)

    The product (24 bits times 9) is exact in float64. Values beyond the range of `dtype` saturate at its largest finite
    value. Zero becomes +0.0.
    """
    if codes.dtype != parameters.code_dtype:
        raise ValueError(
            f"codes are {codes.dtype}, but these parameters go with {parameters.code_dtype}. "
            "Pass the codes that quantize_integer gave for the same parameters."
        )
    _check_broadcast(parameters.scale, codes)
    low, high = parameters.code_range
    if parameters.bits < 8:
        _refuse(
            (codes < low) | (codes > high),
            f"codes are outside {low} .. {high}, the range of {parameters.bits} bits. "
            "Pass the codes that quantize_integer gave for the same parameters.",
        )
    steps = codes.to(torch.int32) - parameters.zero_point
    return narrow(steps.double() * parameters.scale.double(), dtype)


@dataclass(frozen=True)
class Granularity:
    """Which elements share one scale."""

    axis: int | None  # the default axis; None if the granularity has no axis
    axis_is_free: bool  # whether the caller may choose another axis
    sharing: Callable[[int, int], tuple[int, ...]] | None
    """(number of dimensions, axis) -> the dimensions that share one scale; None: groups along the axis do."""


#: A new granularity is a new row.
GRANULARITIES: dict[str, Granularity] = {
    "tensor": Granularity(None, False, lambda ndim, axis: tuple(range(ndim))),
    "channel": Granularity(0, True, lambda ndim, axis: tuple(d for d in range(ndim) if d != axis)),
    "token": Granularity(-1, False, lambda ndim, axis: (axis,)),
    "group": Granularity(-1, True, None),
}


class GridOptions(TypedDict, total=False):
    """The types of the options that `dynamic_parameters` documents, all keyword-only."""

    bits: int
    symmetric: bool
    granularity: str
    axis: int | None
    group_size: int | None


def dynamic_parameters(
    x: Tensor,
    *,
    bits: int = 8,
    symmetric: bool = True,
    granularity: str = "tensor",
    axis: int | None = None,
    group_size: int | None = None,
) -> IntegerParameters:
    """The grids whose ranges are those of `x` itself; their shape broadcasts against `x`.

        tensor    one scale                                            shape [1, ..., 1]
        channel   one per index along `axis` (0 unless given)          shape [1, ..., n, ..., 1]
        token     one per vector along the last axis                   shape [..., 1]
        group     one per `group_size` neighbours along `axis` (-1 unless given), a shorter last group
                  being a group of its own; repeated per element       shape of x

    The formula is that of `integer_parameters`. A slice of zeros, or of nothing, gets the smallest scale.
    NaN and Inf are refused: they have no scale.
    """
    require_float(x, "Integer grids")
    row = look_up("granularity", granularity, GRANULARITIES)
    if axis is not None and not row.axis_is_free:
        raise ValueError(
            f"axis={axis} was given, but granularity {granularity!r} does not choose its axis. "
            "Leave axis out, or ask for granularity='channel' or 'group'."
        )
    if (row.sharing is None) != (group_size is not None):
        raise ValueError(
            f"group_size={group_size} was given, but granularity {granularity!r} has no groups. "
            "Leave group_size out, or ask for granularity='group'."
            if group_size is not None
            else f"granularity {granularity!r} needs a group_size: none was given. Pass e.g. group_size=32."
        )
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1):
        raise ValueError(f"group_size is {group_size!r}. A group holds a whole number of values, 1 or more.")
    wrong = int((~x.isfinite()).sum())
    if wrong:
        raise ValueError(
            f"x has {wrong} NaN or Inf among {x.numel()} values and no scale can be taken from those. "
            "Find where they come from, or pass parameters= from calibration (Inf then saturates)."
        )
    chosen = row.axis if axis is None else axis
    place = 0 if chosen is None else resolve_axis(chosen, x.ndim)
    if row.sharing is not None:
        minimum, maximum = _extremes(x.detach(), row.sharing(x.ndim, place))
        return integer_parameters(minimum, maximum, bits=bits, symmetric=symmetric)
    groups = Blocks.of(x, place, group_size)  # padded with zeros, which every range contains
    rows = groups.split(x.detach())
    minimum, maximum = groups.join_scales(rows.amin(-1)), groups.join_scales(rows.amax(-1))
    parameters = integer_parameters(minimum, maximum, bits=bits, symmetric=symmetric)
    scale, zero_point = (
        per_group.repeat_interleave(groups.size, dim=place).narrow(place, 0, x.shape[place])
        for per_group in (parameters.scale, parameters.zero_point)
    )
    return IntegerParameters(scale, zero_point, bits, symmetric)


def _extremes(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if not dims:  # torch would read () as "all of them"
        return x, x
    if x.numel() == 0:
        nothing = x.new_zeros([1 if d in dims else n for d, n in enumerate(x.shape)])
        return nothing, nothing
    return x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)


def fake_quantize_integer(
    x: Tensor,
    *,
    parameters: IntegerParameters | None = None,
    rounding: str = "half_even",
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
    implementation: IntegerImplementation = "auto",
    **options: Unpack[GridOptions],
) -> Tensor:
    """`x` on the grid, in its own shape and dtype: dequantize(quantize(x)).

    Static if `parameters` are given. Otherwise dynamic, with `dynamic_parameters(x, **options)`, whose options are
    bits=8, symmetric=True, granularity="tensor", axis=None and group_size=None. Options together with `parameters`,
    which decide all of them, are an error.

    -0.0 becomes +0.0: integers have one zero. On static grids Inf saturates and NaN stays NaN; dynamic grids refuse
    both, because they give no scale. An empty tensor gives an empty tensor. The result has no gradient.
    `out` receives the result. `implementation` is a name of INTEGER_IMPLEMENTATIONS.
    """
    given = cast(GridOptions, {name: value for name, value in options.items() if value is not None})
    if parameters is None:
        parameters = dynamic_parameters(x, **given)
    elif given:
        raise ValueError(
            f"parameters were given together with {', '.join(given)}, which the parameters already decide. "
            "Leave one or the other out."
        )
    require_float(x, "Integer grids")
    _check_parameters(x, parameters, implementation)
    if out is not None:
        check_out(out, x)
    noise = draw_noise(x.shape, x.device, rounding, generator)
    kernel = _kernel(x, parameters, implementation)
    if kernel is None:
        steps = _codes(x, parameters, rounding, noise) - parameters.zero_point
        values = narrow(steps * parameters.scale.double(), x.dtype)
        return values if out is None else out.copy_(values)
    return written(out, x, lambda target: kernel(x, target, rounding, noise))


def _check_broadcast(scale: Tensor, x: Tensor) -> None:
    try:
        scale.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"the parameters have shape {list(scale.shape)}, which does not broadcast to the tensor's "
            f"{list(x.shape)}. Take them from data of that shape."
        ) from None
