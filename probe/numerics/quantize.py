"""`fake_quantize` and `quantize`: any float tensor in any format of the table."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from probe.formats import FORMATS, Format
from probe.numerics import compiled, fast, reference
from probe.numerics.blocks import Blocks
from probe.numerics.codes import Quantized, encode, scale_values
from probe.numerics.integers import code_range, dynamic_parameters, quantize_integer
from probe.numerics.native import can_read, check_out, new_tensor, numba_twin, share_memory, written
from probe.numerics.reference import combined_scale, nvfp4_blocks, tensor_scale_of
from probe.numerics.rounding import check_rounding, draw_noise, narrow, require_float
from probe.words import did_you_mean, look_up

Implementation = Literal["auto", "reference", "torch", "compiled"]

#: How the power-of-two scale of a block follows from its largest magnitude; formulas in `reference.py`.
SCALE_RULES: dict[str, str] = {
    "floor": "floor(log2 amax) - max_exponent: OCP MX v1.0; the largest values may saturate",
    "ceil": "ceil(log2 amax) - max_exponent: never saturates",
    "even": "as floor, after rounding amax to the mantissa bits of the format",
    "rceil": "the smallest exponent at which amax fits: ceil(log2(amax / max)), exact",
    "mse": "of floor and its two neighbours, the one with the smallest squared error of the block",
}
IMPLEMENTATIONS: dict[str, str] = {
    "auto": "the kernel on the CPU; on an accelerator torch operations, compiled for large tensors of MX formats",
    "reference": "the readable definition",
    "torch": "torch operations, one by one",
    "compiled": "torch operations through torch.compile",
}


@dataclass(frozen=True, eq=False)
class Job:
    """A checked request: every option is known to be valid and to have an effect."""

    x: Tensor
    format: Format
    blocks: Blocks
    rule: str
    rounding: str
    generator: torch.Generator | None
    tensor_scale: Tensor | None
    implementation: str

    @property
    def rows(self) -> Tensor:
        """x cut into blocks."""
        return self.blocks.split(self.x) if torch.compiler.is_compiling() else self._rows  # a lock cannot be traced

    @cached_property
    def _rows(self) -> Tensor:
        return self.blocks.split(self.x)

    def whole(self, rows: Tensor) -> Tensor:
        """Rows in the shape of x."""
        joined = self.blocks.join(rows)
        return joined if joined.shape == self.x.shape else joined.reshape(self.x.shape)

    @property
    def plan(self) -> fast.Plan:
        """The constants of the fast twins."""
        return fast.plan_for(self.format, self.x.dtype, self.rule)

    def draw_noise(self) -> Tensor | None:
        """Uniform numbers for stochastic rounding, one per element of the rows."""
        return draw_noise(self.blocks.rows_shape, self.x.device, self.rounding, self.generator)


@dataclass(frozen=True, eq=False)
class GridRows:
    """Rows on the grid: float64 elements times float64 scales, and the scales as they are stored."""

    elements: Tensor
    scales: Tensor | None
    stored_scales: Tensor | None

    @property
    def values(self) -> Tensor:
        """The products, exact in float64."""
        return self.elements if self.scales is None else self.elements * self.scales


class Options(TypedDict, total=False):
    """The types of the options that `fake_quantize` documents, all keyword-only."""

    axis: int
    block_size: int | None
    scale_rule: str
    rounding: str
    generator: torch.Generator | None
    tensor_scale: Tensor | float | None
    implementation: Implementation


def fake_quantize(
    x: Tensor, format: str, *, out: Tensor | None = None, check_underflow: bool = False, **options: Unpack[Options]
) -> Tensor:
    """`x` on the grid of `format`, in its own shape and dtype: quantized and dequantized.

        MX formats   value = 2^e * element,  e shared by blocks of 32 along `axis`
        nvfp4        value = element * e4m3 scale of a block of 16 * float32 scale of the tensor
        int8 ...     value = code * amax / max, one scale for the tensor (or per block, if block_size is given)
        bf16, fp16   a cast

    Options, with their defaults; one that has no effect on the format is an error:

        axis=-1                 the axis that blocks lie along
        block_size=None         elements that share a scale; None: as the format defines it
        scale_rule="floor"      a name of SCALE_RULES, for the MX formats
        rounding="half_even"    a name of ROUNDINGS
        generator=None          the torch.Generator that rounding="stochastic" needs
        tensor_scale=None       the second scale of nvfp4, from calibration; None: from `x`
        implementation="auto"   a name of IMPLEMENTATIONS

    `out` receives the result. `check_underflow` runs analyze_underflow first: one more pass, and a warning if more than
    0.1 % is lost. docs/numerics.md lists what happens to special values. The result has no gradient.
    """
    job = check_job(x, format, **options)
    if check_underflow:
        _analyze_underflow(job)
    if out is not None:
        check_out(out, x)
    if x.numel() == 0:
        return x.detach().clone() if out is None else out
    kernels = _kernels(job)
    if kernels is not None:
        return _by_kernel(kernels, job, out)
    if job.format.scale == "e8m0" and job.implementation != "reference":
        result = _by_torch(job, out)
    else:
        result = job.whole(narrow(on_grid(job).values, x.dtype))
    return result if out is None or result is out else out.copy_(result)


def quantize(x: Tensor, format: str, *, check_underflow: bool = False, **options: Unpack[Options]) -> Quantized:
    """The codes and scales of `x`, options as in `fake_quantize`; `.dequantize()` gives the same bits as it."""
    job = check_job(x, format, **options)
    if job.implementation == "compiled":
        raise ValueError(
            "implementation 'compiled' is for fake_quantize only; codes are not compiled. Leave implementation out."
        )
    if check_underflow:
        _analyze_underflow(job)
    kernels = _kernels(job) if x.numel() else None
    stored: Tensor | None
    if kernels is not None:
        codes, stored = _codes_by_kernel(kernels, job)
    else:
        grid = on_grid(job)
        codes = job.whole(encode(grid.elements, job.format))
        stored = None if grid.stored_scales is None else job.blocks.join_scales(grid.stored_scales)
    return Quantized(codes, stored, job.tensor_scale, job.format, job.blocks, x.dtype, x.shape)


def round_to(
    x: Tensor,
    format: str,
    *,
    rounding: str = "half_even",
    generator: torch.Generator | None = None,
    implementation: Literal["reference", "torch"] = "torch",
) -> Tensor:
    """The nearest value of the element grid, without a scale, saturating; same shape and dtype.

    The formula is in `reference.round_elements`. NaN stays NaN. Inf saturates, except in bf16 and fp16: IEEE casts.
    """
    fmt = _format(format)
    require_float(x, "Formats")
    if fmt.scale == "float32":
        raise ValueError(
            f"{format} is nothing without a scale. Use fake_quantize(x, {format!r}), or torch.round for scale 1."
        )
    look_up("implementation", implementation, {name: IMPLEMENTATIONS[name] for name in ("reference", "torch")})
    rounder = reference.round_elements if implementation == "reference" else fast.round_elements
    return narrow(rounder(x.detach(), fmt, rounding, draw_noise(x.shape, x.device, rounding, generator)), x.dtype)


def _format(name: str) -> Format:
    return look_up("format", name, FORMATS, see="List them with: probe formats")


def check_job(
    x: Tensor,
    format: str,
    *,
    axis: int = -1,
    block_size: int | None = None,
    scale_rule: str = "floor",
    rounding: str = "half_even",
    generator: torch.Generator | None = None,
    tensor_scale: Tensor | float | None = None,
    implementation: Implementation = "auto",
    **unknown: object,
) -> Job:
    """Check everything; refuse an option that does not exist or that this format would ignore."""
    for name in sorted(unknown):
        hint = did_you_mean(name, Options.__annotations__)
        raise TypeError(f"unexpected keyword {name!r}.{hint} Known: {', '.join(Options.__annotations__)}.")
    fmt = _format(format)
    require_float(x, "Formats")
    look_up("scale rule", scale_rule, SCALE_RULES)
    look_up("implementation", implementation, IMPLEMENTATIONS)
    check_rounding(rounding, generator)
    if fmt.scale != "e8m0":
        if scale_rule != "floor":
            raise ValueError(
                f"scale_rule {scale_rule!r} was given, but {format} has no power-of-two scale to choose. "
                f"Leave it out; it applies to {', '.join(f.name for f in FORMATS.values() if f.scale == 'e8m0')}."
            )
        if implementation == "compiled":
            raise ValueError(
                f"there is no compiled implementation of {format}. Use implementation='torch' or leave it out."
            )
    if implementation == "compiled" and x.dtype == torch.float64:
        raise ValueError(
            "there is no compiled implementation for float64: torch 2.13 miscompiles the 64-bit integer steps. "
            "Use implementation='torch' or leave it out."
        )
    if fmt.scale is None and block_size is not None:
        raise ValueError(f"block_size {block_size} was given, but {format} is a cast without blocks. Leave it out.")
    x = x.detach().resolve_neg()
    if fmt.scale is None or (fmt.scale == "float32" and block_size is None):
        if axis != -1:
            raise ValueError(
                f"axis {axis!r} was given, but {format} has no blocks here. "
                "Leave it out, or give a block_size to int8, int4 or int2."
            )
        blocks = Blocks((x.numel(),), 0, max(1, x.numel()))
    else:
        blocks = Blocks.of(x, axis, fmt.block_size if block_size is None else block_size)
    second_scale = _tensor_scale(x, fmt, tensor_scale)
    return Job(x, fmt, blocks, scale_rule, rounding, generator, second_scale, implementation)


def _tensor_scale(x: Tensor, fmt: Format, given: Tensor | float | None) -> Tensor | None:
    if fmt.scale != "e4m3":
        if given is not None:
            raise ValueError(f"tensor_scale was given, but {fmt.name} has no second scale. It belongs to nvfp4.")
        return None
    if given is None:
        return _tensor_scale_from(x)
    if not isinstance(given, int | float | Tensor) or isinstance(given, bool):
        raise TypeError(f"tensor_scale is a {type(given).__name__}, expected a number or a 0-d tensor.")
    scale = torch.as_tensor(given, dtype=torch.float32, device=x.device)
    if torch.compiler.is_compiling() and scale.ndim == 0:  # a graph has no values to check
        return scale
    if scale.ndim != 0 or not bool(scale.isfinite()) or not bool(scale > 0):
        raise ValueError(
            f"tensor_scale is {given!r}; nvfp4 takes one finite number above 0. "
            "Use amax / (448 * 6) of calibration data."
        )
    return scale


def _analyze_underflow(job: Job) -> None:
    from probe.numerics.underflow import analyze_job  # which builds on this module

    analyze_job(job, stacklevel=4)


def on_grid(job: Job) -> GridRows:
    """The rows of a job on their grid, for every kind of scale."""
    rounder = reference.round_elements if job.implementation == "reference" else fast.round_elements
    if job.format.scale == "e8m0":
        if job.implementation == "reference":
            elements, bytes_ = reference.mx_blocks(job.rows, job.format, job.rule, job.rounding, job.draw_noise())
        else:
            elements, bytes_ = fast.mx_blocks(job.rows, job.plan, job.rounding, job.draw_noise())
        return GridRows(elements.to(torch.float64), scale_values(bytes_), bytes_.to(torch.uint8))
    if job.format.scale == "e4m3":
        assert job.tensor_scale is not None
        elements, scales = nvfp4_blocks(job.rows, job.tensor_scale, job.format, job.rounding, job.draw_noise(), rounder)
        stored = encode(scales, FORMATS["fp8_e4m3"])
        return GridRows(elements, combined_scale(scales, job.tensor_scale), stored)
    if job.format.scale == "float32":
        finite = job.rows.isfinite().all(-1, keepdim=True)
        rows = torch.where(finite, job.rows, torch.zeros_like(job.rows))
        parameters = dynamic_parameters(rows, bits=job.format.bits, granularity="token")
        codes = quantize_integer(
            rows, parameters, rounding=job.rounding, generator=job.generator, implementation="reference"
        )
        scales = torch.where(finite, parameters.scale, torch.nan)
        return GridRows(codes.to(torch.float64), scales.to(torch.float64), scales)
    return GridRows(rounder(job.rows, job.format, job.rounding, job.draw_noise()), None, None)


def _kernels(job: Job) -> Any:
    """The kernels, where they are to be used; None where torch or the reference does the work."""
    if job.implementation != "auto" or job.format.scale is None or not can_read(job.x):
        return None
    if job.tensor_scale is not None and bool(job.tensor_scale < torch.finfo(torch.float32).tiny):
        return None  # a scale of a block times this one may be 0
    return numba_twin("probe.numerics.kernels.calls", "values")


def _by_kernel(kernels: Any, job: Job, out: Tensor | None) -> Tensor:
    x = job.x.contiguous()

    def write(target: Tensor) -> None:
        if job.format.scale == "e8m0":
            kernels.mx_values(x, target, job.blocks, job.plan, job.rounding, job.draw_noise())
        elif job.format.scale == "e4m3":
            kernels.nvfp4_values(x, target, job.blocks, job.tensor_scale, job.format, job.rounding, job.draw_noise())
        else:
            kernels.integer_results(x, target, *_integer_blocks(kernels, job, x))

    return written(out, x, write)


def _codes_by_kernel(kernels: Any, job: Job) -> tuple[Tensor, Tensor]:
    """(codes, stored scales)."""
    x = job.x.contiguous()
    if job.format.scale == "e8m0":
        found: tuple[Tensor, Tensor] = kernels.mx_codes(x, job.blocks, job.plan, job.rounding, job.draw_noise())
        return found
    if job.format.scale == "e4m3":
        found = kernels.nvfp4_codes(x, job.blocks, job.tensor_scale, job.format, job.rounding, job.draw_noise())
        return found
    codes, blocks = new_tensor(x.shape, torch.int8), _integer_blocks(kernels, job, x)
    kernels.integer_results(x, codes, *blocks)
    return codes, blocks[0].reshape(job.blocks.scales_shape)


def _integer_blocks(
    kernels: Any, job: Job, x: Tensor
) -> tuple[Tensor, Tensor, Any, tuple[int, int], str, Tensor | None]:
    """For the integer kernels: scales of the blocks, zero points, who shares them, the codes, the rounding, noise."""
    ends = code_range(job.format.bits, symmetric=True)
    scales, sharing = kernels.integer_scales(x, job.blocks, ends[1])
    noise = job.draw_noise()
    in_order = None if noise is None else job.blocks.join(noise).contiguous()
    return scales, torch.zeros_like(scales, dtype=torch.int32), sharing, ends, job.rounding, in_order


def _tensor_scale_from(x: Tensor) -> Tensor:
    """`tensor_scale_of` in one pass, where all is finite."""
    kernels = numba_twin("probe.numerics.kernels.calls", "values") if can_read(x) and x.numel() else None
    if kernels is None:
        return tensor_scale_of(x)
    amax = kernels.largest_magnitude(x.contiguous())
    return tensor_scale_of(amax if bool(amax.isfinite()) else x)


def _by_torch(job: Job, out: Tensor | None) -> Tensor:
    """MX blocks by torch operations, in pieces or compiled; writes to `out` directly where its memory is in rows."""
    noise = job.draw_noise()
    if torch.compiler.is_compiling():  # the caller compiles: let it fuse the plain expression
        return job.whole(fast.mx_values(job.rows, job.plan, job.rounding, noise))
    size = job.rows.shape[-1]
    is_free = out is not None and out.is_contiguous() and not share_memory(out, job.x)
    direct = is_free and job.blocks.in_rows
    target = out.detach().reshape(-1, size) if out is not None and direct else torch.empty_like(job.rows)
    if not _compiled_mx(job, target, noise):
        fast.fake_quantize_rows(job.rows, target, job.plan, job.rounding, noise)
    return out if out is not None and direct else job.whole(target)


def _compiled_mx(job: Job, target: Tensor, noise: Tensor | None) -> bool:
    """Run the compiled kernel if it was requested, or the tensor is large and on an accelerator; whether it was run."""
    forced = job.implementation == "compiled"
    x = job.x
    wanted = job.implementation == "auto" and not x.is_cpu and x.numel() >= compiled.LARGE
    if not forced and (not wanted or x.dtype == torch.float64):
        return False
    key = compiled.KernelKey(job.format, job.rule, job.rounding, job.rows.shape[-1], x.dtype, x.device.type)
    return compiled.run(key, job.rows, target, noise, required=forced)
