"""Steps that every quantized model has: a tensor put on a grid, a matrix product, a weight kept as it is."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.diagnosis.explanations import EXPLAINED
from probe.diagnosis.plain_grids import PlainGrid, other_scales, suspects
from probe.diagnosis.signatures import AXES_OF_WEIGHTS, SUMS, Replay, Step
from probe.formats import FORMATS, Format
from probe.models.grid_modules import GridConvolution, GridLinear
from probe.models.linear import linear_layers
from probe.running.corners import linear_amax
from probe.running.kept_float import keeps
from probe.running.traces import LayerTrace, Parts

Suspects = Mapping[str, Replay]
#: Floats that a step may have been computed in instead of float32.
NARROW = (torch.bfloat16, torch.float16)


def sums_step(name: str, actual: Tensor, expected: Tensor, replays: Suspects) -> Step:
    """A step of float arithmetic, exact up to the order of its sums; `replays` are the faults to try."""
    return Step(name, actual, expected.to(actual.dtype), suspects=lambda: iter(replays.items()))


def linear_step(name: str, module: Any, given: Tensor, made: Tensor, more: Suspects | None = None) -> Step:
    """x W^T + b with the weight that the module really has."""
    weight = (module.matrix if isinstance(module, GridLinear) else module.weight).detach().double()
    bias = None if module.bias is None else module.bias.detach().double()
    return product_step(name, weight, bias, given, made, more)


def convolution_step(name: str, module: Any, given: Tensor, made: Tensor) -> Step:
    """The convolution with the weight that the module really has, in float64; `given` has its channels last."""
    replays: dict[str, Replay] = {}
    if module.bias is not None:
        bias = module.bias.detach().double().reshape(-1, *[1] * len(module.kernel_size))
        replays["the bias is left out"] = lambda: module.exact(given) - bias
        replays["the bias is added twice"] = lambda: module.exact(given) + bias
    return sums_step(name, made, module.exact(given), replays)


def product_step(
    name: str, weight: Tensor, bias: Tensor | None, given: Tensor, made: Tensor, more: Suspects | None = None
) -> Step:
    """x W^T + b in float64, from the weight and the bias."""
    x, added = given.double(), 0.0 if bias is None else bias
    product = x @ weight.T
    replays: dict[str, Replay] = dict(more or {})
    if bias is not None:
        replays |= {"the bias is left out": lambda: product, "the bias is added twice": lambda: product + 2 * added}
    if weight.shape[0] == weight.shape[1]:
        replays["the weight is transposed"] = lambda: x @ weight + added
    for dtype in NARROW:
        replays |= _narrow_products(x, weight, bias, dtype)
    return sums_step(name, made, product + added, replays)


def _narrow_products(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> dict[str, Replay]:
    """x W^T + b with its operands, and perhaps its result, in a narrower float."""
    name = str(dtype).removeprefix("torch.")

    def operands() -> Tensor:
        product = x.to(dtype).double() @ weight.to(dtype).double().T
        return product if bias is None else product + bias

    def all_of_it() -> Tensor:
        return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).double()

    def result() -> Tensor:
        product = x @ weight.T
        return (product if bias is None else product + bias).to(dtype).double()

    return {
        f"computed in {name}": all_of_it,
        f"computed in {name}, its sums in float32": operands,
        f"its input is rounded to {name}": lambda: functional.linear(x.to(dtype).double(), weight, bias),
        f"its weight is rounded to {name}": lambda: functional.linear(x, weight.to(dtype).double(), bias),
        f"its result is rounded to {name}": result,
    }


def narrow(function: Callable[..., Tensor], *tensors: Tensor) -> dict[str, Replay]:
    """The function in narrower floats."""
    return {
        f"computed in {str(dtype).removeprefix('torch.')}": partial(
            lambda dtype: function(*(x.to(dtype) for x in tensors)).to(dtype).double(), dtype
        )
        for dtype in NARROW
    }


def norm_step(name: str, given: Tensor, made: Tensor, eps: float, gamma: Tensor | None, more: Suspects) -> Step:
    """gamma x / sqrt(mean x^2 + eps); the eps that was really used is found from the output."""
    x = given.double()
    weight = torch.ones(x.shape[-1], dtype=torch.float64) if gamma is None else gamma.detach().double()
    power = x.square().mean(-1, keepdim=True)

    def normed(eps: float) -> Tensor:
        return weight * x * torch.rsqrt(power + eps)

    plain, actual = x * weight, made.double()
    factor = (actual * plain).sum(-1, keepdim=True) / plain.square().sum(-1, keepdim=True).clamp(min=1e-300)
    found = float((factor.clamp(min=1e-300) ** -2 - power).nan_to_num(0.0).median())
    replays: dict[str, Replay] = dict(more)
    if found > 0 and abs(found / eps - 1) > 0.01:
        replays[f"eps {found:.3g} instead of {eps:g}"] = lambda: normed(found)
    replays["eps is left out"] = lambda: normed(0.0)
    if gamma is not None:
        replays["gamma is left out"] = lambda: x * torch.rsqrt(power + eps)
    for dtype in NARROW:
        replays |= _narrow_norms(x, weight, eps, dtype)
    return sums_step(name, made, normed(eps), replays)


def _narrow_norms(x: Tensor, gamma: Tensor, eps: float, dtype: torch.dtype) -> dict[str, Replay]:
    """The norm with its input, or all of it, in a narrower float."""

    def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
        return gamma * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))

    name = str(dtype).removeprefix("torch.")
    ones = torch.ones_like(gamma)
    return {
        f"computed in {name}": lambda: rms_norm(x.to(dtype), gamma.to(dtype)).double(),
        f"computed in {name}, gamma applied in float32": lambda: (
            gamma * rms_norm(x.to(dtype).double(), ones).to(dtype).double()
        ),
        f"its input is rounded to {name}": lambda: rms_norm(x.to(dtype).double(), gamma),
        f"its result is rounded to {name}": lambda: rms_norm(x, gamma).to(dtype).double(),
    }


def grid_step(
    name: str,
    grid: PlainGrid | None,
    given: Tensor,
    made: Tensor,
    *,
    largest: float | None = None,
    more: Suspects | None = None,
    noise: float = 0.0,
) -> Step:
    """A tensor that should be put on a grid, bit for bit, or, without a grid, pass unchanged."""
    if grid is None:
        return Step(name, made, given, suspects=lambda: iter((more or {}).items()), noise=0.0)

    def replays() -> Iterator[tuple[str, Replay]]:
        yield from (more or {}).items()
        yield "not quantized", lambda: given
        for sentence, other in suspects(grid, given, largest=largest):
            yield sentence, partial(other, given)
        for dtype in (torch.bfloat16, torch.float16):
            words = f"its input is rounded to {str(dtype).removeprefix('torch.')} first"
            yield words, partial(lambda dtype: grid(given.to(dtype).to(given.dtype)), dtype)

    def fits() -> Iterator[tuple[str, Replay]]:
        return ((sentence, partial(other, given)) for sentence, other in other_scales(grid, given, made))

    block = None if grid.per_sequence else grid.format.block_size
    return Step(name, made, grid(given), given, grid.unit(given), replays, fits, noise, block=block)


def weight_step(
    name: str, fmt: Format, plain: Tensor, actual: Tensor, more: Suspects | None = None, *, noise: float = 0.0
) -> Step:
    """A weight that should be on the grid of a format, with scales from the weight itself."""
    grid = PlainGrid(fmt)
    others: dict[str, Replay] = {"zero": lambda: torch.zeros_like(plain), **(more or {})}
    if plain.dim() == 2 and plain.shape[0] == plain.shape[1]:
        others["transposed"] = lambda: grid(plain).T
    step = grid_step(f"weight {name}", grid, plain, actual, more=others, noise=noise)
    return replace(step, axes=AXES_OF_WEIGHTS.get(plain.dim(), ()))


def kept_weights(stock: nn.Module, twin: nn.Module, dtype: torch.dtype | None = None) -> Iterator[Step]:
    """Parameters that should be those of the float model, in `dtype` or their own."""
    found = dict(twin.named_parameters())
    for name, parameter in stock.named_parameters():
        if name in found:
            plain = parameter.detach().to(dtype or parameter.dtype)
            yield Step(f"weight {name}", found[name].detach(), plain, noise=0.0)


def grid_of_weight(step: Step) -> str:
    """The format on whose grid a weight was put that should have stayed float; empty if there is none."""
    grids = {fmt.name: PlainGrid(fmt) for fmt in FORMATS.values() if fmt.scale is not None}
    left = {name: step.left_by(grid(step.expected)) for name, grid in grids.items()}
    best = min(left, key=left.__getitem__)
    return best if left[best] <= 1 - EXPLAINED else ""


def linear_steps(trace: LayerTrace, parts: Parts) -> Iterator[Step]:
    """Weights, inputs and product of every linear layer inside; all other parameters stay as they are.

    Of experts every matrix is a weight; their product depends on the router and is not a step.
    """
    model, twin, mode, layer = trace.model, trace.twin, trace.mode, trace.module
    fmt = FORMATS[str(trace.recipe.format)]
    kept, found = keeps(mode), linear_layers(model, trace.recipe.include).items()
    inside = {name: linear for name, linear in found if f"{name}.".startswith(f"{layer}.") and not kept(name)}
    for name, linear in inside.items():
        short = name.removeprefix(layer).removeprefix(".")
        module: Any = twin.get_submodule(name)
        for parameter in linear.weights:
            own, actual = (linear.matrices(side.get_parameter(parameter).detach()) for side in (linear.module, module))
            for expert, matrices in enumerate(zip(own, actual, strict=True)):
                index = f"[{expert}]" if len(own) > 1 else ""
                yield weight_step(f"{short}.{parameter}{index}".lstrip("."), fmt, *matrices)
        tensors = parts.get(short, {})
        for site in linear.inputs:
            if f"{site}.made" in tensors:
                amax = linear_amax(trace.calibration, fmt, name, site)
                grid = PlainGrid(fmt, amax) if mode.inputs else None
                where = f"{short}.{site}".lstrip(".")
                yield grid_step(f"site {where}", grid, tensors[f"{site}.given"], tensors[f"{site}.made"])
        if "linear.made" in tensors and "input.made" in tensors:
            product = convolution_step if isinstance(module, GridConvolution) else linear_step
            yield product(short or "product", module, tensors["input.made"], tensors["linear.made"])
    names = {f"{name}.{parameter}" for name, linear in inside.items() for parameter in linear.weights}
    for step in kept_weights(model.get_submodule(layer), twin.get_submodule(layer)):
        if f"{layer}.{step.name.removeprefix('weight ')}" not in names:
            yield step


def outside_step(label: str, stock: Any, given: Tensor, made: Tensor, expected: Tensor) -> Step:
    """The embedding, the final norm or the head; what the float one gave is expected where its kind is not known."""
    if label == "norm" and getattr(stock, "bias", None) is None and hasattr(stock, "variance_epsilon"):
        x, eps = given.double(), float(stock.variance_epsilon)
        centred = x - x.mean(-1, keepdim=True)
        unmean = stock.weight.double() * centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        more: Suspects = {"the norm is left out": lambda: x, "the mean is subtracted first": lambda: unmean}
        return norm_step(label, given, made, eps, stock.weight, more)
    if label == "head" and isinstance(stock, nn.Linear):
        return linear_step(label, stock, given, made)
    return Step(label, made, expected.to(made.dtype), noise=0.0 if label == "embedding" else SUMS)


def other_tokens(table: Tensor, tokens: Tensor, made: Tensor) -> str:
    """Which tokens an embedding was given instead, where every vector of its output is in its table; else empty."""
    rows = {row.tobytes(): index for index, row in reversed(list(enumerate(table.detach().float().numpy())))}
    found = [rows.get(vector.tobytes(), -1) for vector in made.float().reshape(-1, made.shape[-1]).contiguous().numpy()]
    seen, wanted = torch.tensor(found).reshape(tokens.shape), tokens.long()
    if bool((seen < 0).any()) or bool((seen == wanted).all()):
        return ""
    for later in range(len(seen)):
        for earlier in range(len(wanted)):
            if later != earlier and bool((seen[later] == wanted[earlier]).all()):
                return f"other tokens: sample {later} is sample {earlier}"
    offset = (seen - wanted).reshape(-1)
    if float((offset == offset.mode().values).double().mean()) > 0.9:
        return f"other tokens: ids are off by {int(offset.mode().values):+d}"
    return f"other tokens: {int((seen != wanted).sum())} of {wanted.numel()}"
