"""Faults of the quantized block: what is left out, weights, rotations, the convolution, the scan, the gate."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.models.mamba import SiteMixer
from probe.numerics.grids import weight_on_grid
from probe.numerics.hadamard import hadamard_transform
from probe.numerics.quantize import fake_quantize
from tests.faults.breaking import Damage, Patient, calls, during, grid, scanning, submodule, weight, with_functions
from tests.faults.catalogue import (
    FP4,
    FP8,
    INT8,
    MXINT8,
    NOT_APPLIED,
    NOT_FINITE,
    NVFP4,
    UNCOVERED,
    VALUES,
    Fault,
)
from tests.faults.grid_faults import scaled

LLAMA_W, LLAMA_WA = "linear_w-fp8_e4m3", "linear_wa-int8"


def made_again(name: str, make: Callable[[Tensor, str], Tensor], *, gamma: bool = True, rotate: bool = True) -> Damage:
    """A weight folded and put on the grid in another way."""

    def damage(patient: Patient) -> None:
        healthy = SiteMixer(patient.stock.mixer)
        healthy.fold(patient.stock.norm.weight if gamma else None, rotate=rotate)
        patient.mixer.get_parameter(name).copy_(make(healthy.get_parameter(name), patient.format))

    return damage


def unquantized(name: str) -> Damage:
    return made_again(name, lambda w, format: w)


def coarser(w: Tensor, format: str) -> Tensor:
    """int8 at a scale that is 1 % too large."""
    scale = 1.01 * w.abs().max().double() / 127
    return (torch.round(w.double() / scale) * scale).float()


def of_layer(other: int, name: str) -> Damage:
    def damage(patient: Patient) -> None:
        patient.mixer.get_parameter(name).copy_(patient.twin.backbone.layers[other].mixer.get_parameter(name))

    return damage


def one_nan(w: Tensor) -> Tensor:
    w[3, 5] = torch.nan
    return w


def linear(name: str, change: Callable[[Any, nn.Linear], None]) -> Damage:
    """A linear of a layer of a transformer; `change(quantized, float)`."""
    return lambda patient: change(patient.block.get_submodule(name), patient.stock.get_submodule(name))


def as_float(quantized: Any, plain: nn.Linear) -> None:
    quantized.weight.copy_(plain.weight)


def transposed(quantized: Any, plain: nn.Linear) -> None:
    quantized.weight.copy_(quantized.weight.T.clone())


def without_grid(quantized: Any, plain: nn.Linear) -> None:
    quantized.input.grid = None


def skipped(patient: Patient) -> None:
    mixer: Any = patient.mixer
    mixer.forward = lambda hidden_states, **_: torch.zeros_like(hidden_states)


def left_float(patient: Patient) -> None:
    patient.block.mixer = SiteMixer(patient.stock.mixer)
    patient.block.norm.weight.copy_(patient.stock.norm.weight)


def fused(patient: Patient) -> None:
    """The layer is computed without a call of its module, as a compiled or fused one is."""
    kind = type(patient.block)
    patient.block.__class__ = type(kind.__name__, (kind,), {"__call__": kind.forward})


def unrotated(call: int) -> Damage:
    """Of the two rotations of the mixer, this one is left out."""
    return lambda patient: during(patient.mixer, hadamard_transform=calls(call, hadamard_transform))


def reads_float(patient: Patient) -> None:
    """Mode 2-1 as 2-4: the scan is given F, x_proj its rounded values."""
    kept: list[Tensor] = []
    patient.mixer.site("conv1d.output").register_forward_hook(lambda module, args, output: kept.append(args[0]))
    patient.mixer.site("scan.u").grid = lambda x: kept.pop()


def state_in(dtype: torch.dtype) -> Damage:
    """The state of the scan is kept in a narrower dtype from token to token."""

    def scan(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
        h = torch.zeros(u.shape[0], u.shape[2], A.shape[1])
        outputs = []
        for t in range(u.shape[1]):
            now = slice(t, t + 1)
            h = real(u[:, now], delta[:, now], A, B[:, now], C[:, now], h)[1].to(dtype).float()
            outputs.append((h * C[:, t, None, :]).sum(-1))
        return torch.stack(outputs, 1), h

    return scanning(scan)


def forgetful(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    """The state is not carried from one chunk to the next."""
    pieces = [slice(start, start + 32) for start in range(0, u.shape[1], 32)]
    parts = [real(u[:, piece], delta[:, piece], A, B[:, piece], C[:, piece], None) for piece in pieces]
    return torch.cat([y for y, _ in parts], 1), parts[-1][1]


def swapped(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    return real(u, delta, A, C, B, state)


def growing(real: Any, u: Tensor, delta: Tensor, A: Tensor, *rest: Any) -> Any:
    return real(u, delta, -A, *rest)


def a_twice(real: Any, u: Tensor, delta: Tensor, A: Tensor, *rest: Any) -> Any:
    return real(u, delta, weight_on_grid(A, "fp8_e4m3"), *rest)


def late(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The convolution sees the token before instead of this one."""
    return functional.conv1d(functional.pad(x, (1, -1)), *args, **kwargs)


def without_bias(x: Tensor, taps: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    return functional.conv1d(x, taps, None, groups=groups)


def one_code(w: Tensor) -> Tensor:
    """One int8 weight is off by one code."""
    levels = torch.unique(w)
    step = float(levels.diff()[levels.diff() > 0].min())
    w[3, 5] += step if w[3, 5] < w.max() else -step
    return w


def rows_swapped(w: Tensor) -> Tensor:
    w[[3, 7]] = w[[7, 3]]
    return w


def rows_rolled(w: Tensor) -> Tensor:
    return w.roll(1, 0)


def halves_swapped(w: Tensor) -> Tensor:
    """x and z change places."""
    return w.roll(w.shape[0] // 2, 0)


def one_row_zero(w: Tensor) -> Tensor:
    w[9] = 0
    return w


def one_sign(w: Tensor) -> Tensor:
    """The sign bit of the largest value is lost."""
    flat = w.reshape(-1)
    flat[flat.abs().argmax()] *= -1
    return w


def nibbles_swapped(w: Tensor) -> Tensor:
    """Codes are unpacked in the wrong order: neighbours change places."""
    return w.reshape(*w.shape[:-1], -1, 2).flip(-1).flatten(-2)


def one_column_stale(w: Tensor) -> Tensor:
    w[:, 17] *= 0.5
    return w


def dt_bias_twice(patient: Patient) -> None:
    bias = patient.mixer.dt_proj.bias.detach().float()
    with_functions(softplus=lambda x: functional.softplus(x + bias))(patient)


def matmul_in(dtype: torch.dtype) -> Callable[..., Tensor]:
    """A linear multiplies in a narrower dtype."""

    def call(real: Any, module: Any, x: Tensor) -> Tensor:
        weight = module.matrix if hasattr(module, "matrix") else module.weight
        if hasattr(module, "input"):
            x = module.input(x)
        return functional.linear(x.to(dtype), weight.to(dtype)).float()

    return call


def carried_over(patient: Patient) -> None:
    """The state of one forward is where the next one starts."""
    kept: list[Tensor] = []

    def scan(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
        same = kept and kept[-1].shape[0] == u.shape[0]
        y, last = real(u, delta, A, B, C, kept[-1] if same and state is None else state)
        kept[:] = [last]
        return y, last

    scanning(scan)(patient)


def c_late(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    """The output is read with C of the token before."""
    return real(u, delta, A, B, C.roll(1, 1), state)


def euler(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    """exp(delta A) is replaced by 1 + delta A."""
    h = torch.zeros(u.shape[0], u.shape[2], A.shape[1])
    outputs = []
    for t in range(u.shape[1]):
        step = delta[:, t, :, None]
        h = (1 + step * A).clamp(min=0) * h + step * u[:, t, :, None] * B[:, t, None, :]
        outputs.append((h * C[:, t, None, :]).sum(-1))
    return torch.stack(outputs, 1), h


def softplus_rough(x: Tensor) -> Tensor:
    """max(x, 0) + log(2) at 0, a cheap softplus."""
    return torch.where(x > 0, x, 0.0) + torch.log1p(torch.exp(-x.abs())).bfloat16().float()


def early_threshold(x: Tensor) -> Tensor:
    """softplus is taken for the identity above 2, not 20."""
    return functional.softplus(x, threshold=2.0)


def norm_epsilon(value: float, name: str = "norm") -> Damage:
    return lambda patient: setattr(patient.block.get_submodule(name), "variance_epsilon", value)


def gelu(patient: Patient) -> None:
    patient.block.mlp.act_fn = nn.GELU()


def attention_scale(patient: Patient) -> None:
    patient.block.self_attn.scaling *= 32**0.5 / 64**0.5


def no_residual(patient: Patient) -> None:
    real = patient.block.forward

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return cast(Tensor, real(hidden_states, **kwargs)) - hidden_states

    patient.block.forward = forward


def heads_rolled(quantized: Any, plain: nn.Linear) -> None:
    """The columns of o_proj belong to the next head."""
    quantized.weight.copy_(quantized.weight.roll(32, 1))


LEFT_OUT = (
    Fault("layer skipped", INT8, skipped, "layer_1; it returns its input: the layer is skipped"),
    Fault(
        "mode not applied to one layer",
        INT8,
        left_float,
        "layer_2; its output is the float layer's: the mode was not applied to it",
        NOT_APPLIED,
        layer=2,
    ),
    Fault(
        "site skipped", INT8, grid("x_proj.output", lambda _: None), "site x_proj.output; not quantized", NOT_APPLIED
    ),
    Fault(
        "site skipped, fp8",
        FP8,
        grid("dt_proj.output", lambda _: None),
        "site dt_proj.output; not quantized",
        NOT_APPLIED,
    ),
    Fault(
        "weight not quantized", INT8, unquantized("x_proj.weight"), "weight x_proj.weight; not quantized", NOT_APPLIED
    ),
    Fault(
        "weight not quantized, fp8",
        FP8,
        unquantized("out_proj.weight"),
        "weight out_proj.weight; not quantized",
        NOT_APPLIED,
    ),
    Fault("D not quantized", FP8, unquantized("D"), "weight D; not quantized", NOT_APPLIED),
    Fault(
        "the hook never fires",
        INT8,
        fused,
        "layer_1 gave nothing in the propagated run: 1 of 4 selected layers never ran: layer_1. *",
        UNCOVERED,
    ),
    Fault(
        "one linear skipped",
        LLAMA_W,
        linear("mlp.up_proj", as_float),
        "weight mlp.up_proj.weight; not quantized",
        NOT_APPLIED,
        model="tiny-llama",
    ),
    Fault(
        "one input skipped",
        LLAMA_WA,
        linear("self_attn.o_proj", without_grid),
        "site self_attn.o_proj.input; not quantized",
        NOT_APPLIED,
        model="tiny-llama",
    ),
)
WEIGHTS = (
    Fault(
        "weight scale + 1 %",
        INT8,
        weight("out_proj.weight", lambda w: w * 1.01),
        "weight out_proj.weight; the scale is off by +1.00%",
    ),
    Fault(
        "weight rounded at scale + 1 %",
        INT8,
        made_again("in_proj.weight", coarser),
        "weight in_proj.weight; the scale is off by +1.00%",
    ),
    Fault(  # 1.01 is no power of two, so no value is on the grid any more
        "weight scale + 1 %, fp8",
        FP8,
        weight("x_proj.weight", lambda w: w * 1.01),
        "weight x_proj.weight; the scale is off by +1.00%",
        NOT_APPLIED,
    ),
    Fault(
        "weight blocks of 16",
        FP8,
        made_again("out_proj.weight", lambda w, format: fake_quantize(w, format, block_size=16)),
        "weight out_proj.weight; blocks of 16 instead of 32",
    ),
    Fault(
        "weight blocks along the wrong axis",
        FP4,
        made_again("in_proj.weight", lambda w, format: fake_quantize(w, format, axis=0)),
        "weight in_proj.weight; blocks run along the wrong axis",
    ),
    Fault(
        "transposed weight",
        LLAMA_W,
        linear("self_attn.o_proj", transposed),
        "weight self_attn.o_proj.weight; transposed",
        model="tiny-llama",
    ),
    Fault(
        "weight of another layer",
        INT8,
        of_layer(2, "out_proj.weight"),
        "weight out_proj.weight; no known cause: unrelated to the expected values (correlation #)",
    ),
    Fault(
        "one NaN",
        INT8,
        weight("in_proj.weight", one_nan),
        "weight in_proj.weight; NaN in 1 of 65536 values, the first at [3, 5]",
        NOT_FINITE,
    ),
    Fault("D left out", INT8, weight("D", torch.zeros_like), "weight D; zero"),
    Fault("dt bias dropped", INT8, weight("dt_proj.bias", torch.zeros_like), "weight dt_proj.bias; zero"),
    Fault(
        "gamma not folded",
        INT8,
        made_again("in_proj.weight", weight_on_grid, gamma=False),
        "weight in_proj.weight; the norm's gamma is not folded in",
    ),
    Fault(
        "Hadamard not folded into out_proj",
        FP8,
        made_again("out_proj.weight", weight_on_grid, rotate=False),
        "weight out_proj.weight; the Hadamard rotation is not folded in",
    ),
)
BLOCK = (
    Fault(
        "Hadamard left out at in_proj", INT8, unrotated(1), "rotation before in_proj; the Hadamard rotation is left out"
    ),
    Fault(
        "Hadamard left out at out_proj", INT8, unrotated(2), "D u, gate and rotation; the Hadamard rotation is left out"
    ),
    Fault("conv bias dropped", INT8, with_functions(conv1d=without_bias), "conv1d and SiLU; the bias is left out"),
    Fault("conv one token late", INT8, with_functions(conv1d=late), "conv1d and SiLU; it is one token late"),
    Fault(
        "softplus left out",
        INT8,
        with_functions(softplus=lambda x: x),
        "the scan; softplus is left out",
        (*VALUES, *NOT_FINITE),
    ),
    Fault("B and C swapped", INT8, scanning(swapped), "the scan; B and C are swapped"),
    Fault(
        "A without its minus", INT8, scanning(growing), "the scan; A has lost its minus sign", (*VALUES, *NOT_FINITE)
    ),
    Fault("A on the grid twice", FP8, scanning(a_twice), "the scan; A is put on the grid again, after exp"),
    Fault("bf16 state", INT8, state_in(torch.bfloat16), "the scan; the state is rounded to bfloat16"),
    Fault("fp16 state", INT8, state_in(torch.float16), "the scan; the state is rounded to float16"),
    Fault(
        "state lost between chunks",
        "mode_0-int8",
        scanning(forgetful),
        "the scan; the state is lost every 32 tokens, or at token 32",
    ),
    Fault(
        "the scan reads F",
        INT8,
        reads_float,
        "site scan.u; it reads the unrounded conv1d output",
        (*NOT_APPLIED, *VALUES),
    ),
    Fault(
        "SiLU gate left out",
        INT8,
        with_functions(silu=torch.ones_like),
        "D u, gate and rotation; the gate SiLU(z) is left out",
    ),
)
ISSUED = (
    Fault(
        "one int8 weight off by one code",
        INT8,
        weight("out_proj.weight", one_code),
        "weight out_proj.weight; one value, at [3, 5]: # instead of #",
    ),
    Fault(
        "two rows of a weight swapped",
        INT8,
        weight("in_proj.weight", rows_swapped),
        "weight in_proj.weight; rows 3 and 7 are swapped",
    ),
    Fault("dt bias twice", INT8, dt_bias_twice, "the scan; the bias of dt_proj is added twice"),
    Fault(
        "bf16 arithmetic in one matmul",
        FP8,
        submodule("mixer.in_proj", matmul_in(torch.bfloat16)),
        "in_proj; computed in bfloat16, or its result is rounded to bfloat16",
    ),
    Fault(
        "state carried between forwards",
        INT8,
        carried_over,
        "layer_1 is not a function of its input: its second run differs by # (a carried state, or chance)",
    ),
)
MORE_WEIGHTS = (
    Fault(
        "rows of a weight rolled by one",
        FP8,
        weight("x_proj.weight", rows_rolled),
        "weight x_proj.weight; rows are permuted: shifted by 1",
    ),
    Fault(
        "x and z swapped in the weight",
        FP4,
        weight("in_proj.weight", halves_swapped),
        "weight in_proj.weight; rows are permuted: shifted by -256",
    ),
    Fault(
        "one row of a weight lost",
        NVFP4,
        weight("out_proj.weight", one_row_zero),
        "weight out_proj.weight; only row 9: zero",
    ),
    Fault(
        "one sign flipped",
        MXINT8,
        weight("in_proj.weight", one_sign),
        "weight in_proj.weight; one value, at [106, 97]: # instead of #",
    ),
    Fault(
        "codes unpacked in the wrong order",
        FP4,
        weight("out_proj.weight", nibbles_swapped),
        "weight out_proj.weight; columns are permuted, 256 of 256: column 0 is column 1",
    ),
    Fault(
        "one column of a weight stale",
        INT8,
        weight("x_proj.weight", one_column_stale),
        "weight x_proj.weight; only column 17: the scale is off by a factor of 2^-1",
    ),
    Fault("A_log in bf16", INT8, weight("A_log", lambda w: w.bfloat16().float()), "weight A_log; rounded to bfloat16"),
    Fault(
        "one weight off by one code, llama",
        LLAMA_WA,
        linear("mlp.down_proj", lambda quantized, plain: quantized.weight.copy_(one_code(quantized.weight.clone()))),
        "weight mlp.down_proj.weight; one value, at [3, 5]: # instead of #",
        model="tiny-llama",
    ),
    Fault(
        "heads of o_proj rolled",
        LLAMA_W,
        linear("self_attn.o_proj", heads_rolled),
        "weight self_attn.o_proj.weight; columns are permuted: shifted by 32",
        model="tiny-llama",
        layer=2,
    ),
    Fault(
        "two rows swapped, llama",
        LLAMA_W,
        linear("mlp.up_proj", lambda quantized, plain: quantized.weight.copy_(rows_swapped(quantized.weight.clone()))),
        "weight mlp.up_proj.weight; rows 3 and 7 are swapped",
        model="tiny-llama",
    ),
)
FUNCTIONS = (
    Fault("norm eps 1e-3", INT8, norm_epsilon(1e-3), "the norm; eps 0.001 instead of 1e-05"),
    Fault("norm eps 1e-6", FP8, norm_epsilon(1e-6), "the norm; eps 9.98e-07 instead of 1e-05", layer=0),
    Fault("softplus by pieces", FP8, with_functions(softplus=softplus_rough), "the scan; delta is rounded to bfloat16"),
    Fault(
        "softplus linear above 2",
        INT8,
        with_functions(softplus=early_threshold),
        "layer_1; function mixer.softplus at 2.18008: 2.18008041 instead of 2.28716863, 4.49e+# ulps off",
    ),
    Fault("exp(delta A) by Euler", FP8, scanning(euler), "the scan; exp(delta A) is replaced by 1 + delta A"),
    Fault("C one token late", INT8, scanning(c_late), "the scan; C is one token late"),
    Fault(
        "x_proj in bf16",
        FP4,
        submodule("mixer.x_proj", matmul_in(torch.bfloat16)),
        "x_proj; computed in bfloat16, or its result is rounded to bfloat16",
    ),
    Fault(
        "out_proj in fp16",
        INT8,
        submodule("mixer.out_proj", matmul_in(torch.float16)),
        "out_proj; computed in float16",
        layer=3,
    ),
    Fault(
        "mlp.up_proj in bf16",
        LLAMA_W,
        submodule("mlp.up_proj", matmul_in(torch.bfloat16)),
        "mlp.up_proj; computed in bfloat16",
        model="tiny-llama",
    ),
    Fault(
        "gelu in the place of silu",
        LLAMA_W,
        gelu,
        "layer_1; mlp.act_fn is GELU, not SiLUActivation",
        model="tiny-llama",
    ),
    Fault(
        "attention scale 1/8",
        LLAMA_WA,
        attention_scale,
        "layer_2; self_attn.scaling is 0.125, not 0.1768",
        model="tiny-llama",
        layer=2,
    ),
    Fault(
        "residual counted off",
        LLAMA_W,
        no_residual,
        "layer_3; -1 times its input is added to its output",
        model="tiny-llama",
        layer=3,
    ),
    Fault(
        "post-attention norm eps 1e-3",
        LLAMA_WA,
        norm_epsilon(1e-3, "post_attention_layernorm"),
        "layer_1; post_attention_layernorm.variance_epsilon is 0.001, not 1e-06",
        model="tiny-llama",
    ),
    Fault(
        "state scale doubled",
        INT8,
        grid("scan.state", scaled(2.0)),
        "site scan.state; the scale is off by a factor of 2^1 (at corner values)",
    ),
)
