"""The functions on the way through a layer, called alone at corner values: norms, activations, softplus, gate, scan.

The expected result is the formula in float64 with the constants of the float model, such as the epsilon of a norm. The
error is in ulps of the result: the distance of neighbouring numbers of its dtype there.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from probe.models.mamba import SiteMixer
from probe.models.offload import at_hand
from probe.models.scans import REFERENCE_SCAN, SCANS

#: Steps, channels and states of the slice on which scans are compared; the last chunk is not full.
SCANNED = (40, 8, 4)

Formula = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FunctionError:
    """The largest error of one function: where, in ulps of the result, and what was expected there."""

    name: str  # mixer.softplus
    ulps: float
    given: float
    made: float
    expected: float

    def __str__(self) -> str:
        values = f"{self.made:.9g} instead of {self.expected:.9g}"
        return f"function {self.name} at {self.given:.6g}: {values}, {self.ulps:.3g} ulps off"


@torch.no_grad()
def function_errors(layer: nn.Module, stock: nn.Module | None) -> list[FunctionError]:
    """Of every norm, activation and Mamba mixer inside a layer; `stock` is the layer of the float model."""
    floats = [x for x in layer.parameters() if x.is_floating_point()]
    dtype = floats[0].dtype if floats else torch.float32
    device = next((x.device for x in floats if not x.is_meta), torch.device("cpu"))
    plain = dict(stock.named_modules()) if stock is not None else {}
    found = []
    for name, module in layer.named_modules():
        with at_hand(module):
            if isinstance(module, SiteMixer):
                found += list(_of_mixer(name, module))
                continue
            own = plain.get(name) or plain.get(name.replace("activation", "act"), module)
            given = _inputs(own)
            if given is not None:
                given = given.to(device, dtype)
                expected = _formula(own, module)(given.double())
                least = _least(own, given.double(), expected)
                found.append(_error(name, given, module.forward(given.clone()), expected, least))
    return found


def scan_error(layer: nn.Module) -> float | None:
    """The relative error of the fast scans of a layer against the sequential one on a short slice; None without any."""
    errors = []
    for module in layer.modules():
        if isinstance(module, SiteMixer) and module.scan_name != REFERENCE_SCAN:
            inputs = _scan_inputs()
            expected = _scanned(SCANS[REFERENCE_SCAN])
            made = SCANS[module.scan_name](*(x.to(module.D.device) for x in inputs))
            pairs = zip(made, expected, strict=True)
            errors += [float((one.cpu() - other).norm() / other.norm()) for one, other in pairs]
    return max(errors, default=None)


def _of_mixer(name: str, mixer: SiteMixer) -> Iterator[FunctionError]:
    """delta, A and the gate of a Mamba mixer."""
    start = f"{name}." if name else ""
    width, device = mixer.intermediate_size, mixer.D.device
    with mixer.weights_at_hand():
        bias = mixer.step_bias.float()
        x = _spread(len(bias), device)
        shifted = (x + bias).double()
        yield _error(f"{start}softplus", shifted, mixer.delta(x), _softplus(shifted))
    A_log, D = mixer.A_log.detach().float(), mixer.D.detach().double()
    A_log, D = _by_channel(A_log, width * mixer.state_size).reshape(width, -1), _by_channel(D, width)
    yield _error(f"{start}A", A_log, mixer.rates(), -torch.exp(A_log.double()))
    x = _spread(width, device)
    one, none = torch.ones_like(x), torch.zeros_like(x)
    for y, u, factor in ((one, none, torch.ones_like(D)), (none, one, D)):
        yield _error(f"{start}gate", x, mixer.gated(y, u, x), factor * _silu(x.double()))


def _by_channel(x: Tensor, size: int) -> Tensor:
    """A number a channel, or a channel and state, of tensors that may have one a head."""
    return x.flatten().repeat_interleave(size // x.numel())


def _inputs(module: nn.Module) -> Tensor | None:
    """Corner values for a norm or an activation; None for every other module."""
    if _is_rms_norm(module) or isinstance(module, nn.LayerNorm):
        return _rows(module.get_parameter("weight").shape[-1]) if getattr(module, "weight", None) is not None else None
    is_activation = type(module) in ACTIVATIONS or type(module).__module__ == "transformers.activations"
    has_state = any(True for _ in module.state_dict()) or any(True for _ in module.children())
    return _values() if is_activation and not has_state else None


def _is_rms_norm(module: nn.Module) -> bool:
    """torch's RMSNorm, or one of transformers: those with the plain formula keep `variance_epsilon` and take one input.

    One that a gate is given too (Qwen3-Next) has another formula.
    """
    if not isinstance(module, nn.RMSNorm) and not (hasattr(module, "variance_epsilon") and hasattr(module, "weight")):
        return False
    needed = [one for one in inspect.signature(module.forward).parameters.values() if one.default is one.empty]
    return len(needed) == 1


def _formula(own: nn.Module, module: nn.Module) -> Formula:
    """The definition of a module in float64: constants of the float model's `own`, weights of `module`."""
    if _is_rms_norm(own) or isinstance(own, nn.LayerNorm):
        return _norm(own, module)
    known: Any = ACTIVATIONS.get(type(own)) or NAMED_ACTIVATIONS.get(type(own).__name__)
    if known is not None and getattr(own, "approximate", "none") == "none":
        return known  # type: ignore[no-any-return]
    return copy.deepcopy(own).double().cpu().forward


def _least(own: nn.Module, x: Tensor, expected: Tensor) -> Tensor | None:
    """What a result cancels from where it is small: in LayerNorm the rms of its row, in most activations the input."""
    if isinstance(own, nn.LayerNorm):
        return expected.square().mean(-1, keepdim=True).sqrt()
    is_precise = _is_rms_norm(own) or type(own).__name__ in PRECISE
    return None if is_precise else x.abs()


def _norm(own: Any, module: nn.Module) -> Formula:
    """x / sqrt(mean x^2 + eps) * weight, of LayerNorm about the mean and with its bias."""
    weight = module.get_parameter("weight").detach().double()
    bias: Any = getattr(module, "bias", None)
    eps = own.variance_epsilon if hasattr(own, "variance_epsilon") else own.eps
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    about_mean = isinstance(own, nn.LayerNorm)

    def formula(x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if about_mean else x
        y: Tensor = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
        return y if bias is None else y + bias.detach().double()

    return formula


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return x * torch.erfc(-x / math.sqrt(2)) / 2


def _softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)."""
    return torch.where(x > 40, x, torch.log1p(torch.exp(x.clamp(max=40))))


#: The formulas of activations; any other is compared with the float model's own in float64.
ACTIVATIONS: dict[type[nn.Module], Formula | None] = {
    nn.SiLU: _silu,
    nn.GELU: _gelu,
    nn.Sigmoid: lambda x: 1 / (1 + torch.exp(-x)),
    nn.ReLU: lambda x: x.clamp(min=0),
    **dict.fromkeys((nn.Tanh, nn.ELU, nn.Mish, nn.ReLU6, nn.LeakyReLU, nn.Softplus, nn.Hardswish)),
}
#: Activations whose small results are as precise as the large ones.
PRECISE = ("SiLU", "SiLUActivation", "Sigmoid", "ReLU")
NAMED_ACTIVATIONS: dict[str, Formula] = {"SiLUActivation": _silu, "GELUActivation": _gelu}


def _error(name: str, given: Tensor, made: Tensor, expected: Tensor, least: Tensor | None = None) -> FunctionError:
    """The worst element. Ulps are those of `least` where the result is smaller: there a difference cancelled."""
    limits = torch.finfo(made.dtype)
    expected = expected.to(made.device)
    size = expected.abs().clamp(min=limits.tiny)
    size = size if least is None else torch.maximum(size, least.to(made.device))
    unit = torch.ldexp(torch.full_like(expected, limits.eps), torch.frexp(size).exponent - 1)
    ulps = (made.double() - expected).abs() / unit
    ulps = torch.where(ulps.isnan(), torch.inf, ulps)
    worst = int(ulps.argmax())
    of = (float(x.expand(expected.shape).reshape(-1)[worst]) for x in (ulps, given, made, expected))
    return FunctionError(name, *of)


@cache
def _values() -> Tensor:
    """[2, 1, n]: both zeros, powers of two, and -60 to 60 with more values about 0; the second sequence is smaller."""
    powers = torch.ldexp(torch.ones(36), torch.arange(-30, 6))
    near, far = torch.linspace(-8, 8, 129), torch.linspace(-60, 60, 121)
    row = torch.cat([torch.tensor([0.0, -0.0]), powers, -powers, near, far])
    return torch.stack([row, row / 16])[:, None]


def _spread(channels: int, device: torch.device) -> Tensor:
    """The values [1, token, channel]."""
    values = _values().reshape(-1)
    tokens = -(-values.numel() // channels) + 1
    places = torch.arange(tokens * channels) % values.numel()
    return values[places].reshape(1, tokens, channels).to(device)


@cache
def _rows(width: int) -> Tensor:
    """[2, 4, width]: rows of unlike size, also so small that the epsilon decides, and one of zeros."""
    row = (torch.arange(width) * 797 % 1009).float() / 512 - 1
    return (torch.tensor([1.0, 1e-3, 1e-5, 0.0, 30.0, 1e3, 0.1, 1e-2])[:, None] * row).reshape(2, 4, width)


@cache
def _scan_inputs() -> tuple[Tensor, ...]:
    """u, delta, A, B, C and a state that is carried over, of a short slice."""
    time, channels, states = SCANNED
    random = torch.Generator().manual_seed(0)
    u, B, C = (torch.randn(2, time, size, generator=random) for size in (channels, states, states))
    delta = torch.rand(2, time, channels, generator=random) + 0.01
    A = -torch.arange(1.0, states + 1).expand(channels, states) / 4
    return u, delta, A, B, C, torch.randn(2, channels, states, generator=random)


@cache
def _scanned(scan: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return scan(*_scan_inputs())
