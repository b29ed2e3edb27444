"""The C scan as an autograd function: compiles scan.c on first use."""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("scan.c")
STATES, MAX_TIME = 16, 1024  # fixed in scan.c
FLAGS = ("-O3", "-march=native", "-ffast-math", "-shared", "-fPIC")


@cache
def library() -> ctypes.CDLL:
    """scan.c, compiled for this machine."""
    target = Path(tempfile.mkdtemp(prefix="scan-")) / "scan.so"
    subprocess.run(["gcc", *FLAGS, str(SOURCE), "-o", str(target), "-lm"], check=True)
    return ctypes.CDLL(str(target))


def call(function: str, tensors: list[Tensor], sizes: tuple[int, int, int]) -> None:
    """Call one C function with float32 tensors and the sizes (channels, batch, time)."""
    for i, tensor in enumerate(tensors):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"{function}: tensor {i} is {tensor.dtype}, strides {tensor.stride()}; expected contiguous float32"
            )
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    getattr(library(), function)(*pointers, *(ctypes.c_int(size) for size in sizes))


class Scan(torch.autograd.Function):
    """The gated selective scan; shapes and formula are in scan.c."""

    @staticmethod
    def forward(ctx, u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor) -> Tensor:
        """The output, shaped like u: (channels, batch, time)."""
        if a.shape[1] != STATES or u.shape[2] > MAX_TIME:
            raise ValueError(
                f"scan.c got {a.shape[1]} states over {u.shape[2]} steps; "
                f"expected {STATES} over at most {MAX_TIME}. Both are constants at its top"
            )
        inputs = [tensor.contiguous() for tensor in (u, dt, a, b, c, d, z)]
        ctx.save_for_backward(*inputs)
        y = torch.empty_like(inputs[0])
        call("scan_forward", [*inputs, y], tuple(u.shape))
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the seven inputs."""
        inputs = ctx.saved_tensors
        gradients = [torch.zeros_like(tensor) for tensor in inputs]
        call("scan_backward", [*inputs, dy.contiguous(), *gradients], tuple(dy.shape))
        return tuple(gradients)


def scan_reference(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor) -> Tensor:
    """The same scan as a plain loop over time: the definition Scan is checked against."""
    delta = torch.nn.functional.softplus(dt)
    h = u.new_zeros(*u.shape[:2], a.shape[1])
    outputs = []
    for t in range(u.shape[2]):
        decay = torch.exp(delta[:, :, t, None] * a[:, None, :])
        h = decay * h + (delta[:, :, t] * u[:, :, t])[..., None] * b[None, :, t]
        outputs.append((h * c[None, :, t]).sum(-1) + d[:, None] * u[:, :, t])
    return torch.stack(outputs, dim=-1) * torch.nn.functional.silu(z)


def check_gradients(*, channels: int = 8, batch: int = 2, time: int = 32, states: int = 16) -> float:
    """Largest difference between Scan (float32) and scan_reference (float64), outputs and all gradients.

    Each tensor's difference is divided by the largest magnitude of that tensor. Raises above 1e-4.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(channels, batch, time)] * 2 + [(channels, states)] + [(batch, time, states)] * 2
    shapes += [(channels,), (channels, batch, time)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values[2] = -values[2].exp()
    weight = torch.randn(shapes[0], generator=generator)

    def outcome(scan: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [value.detach().to(dtype).requires_grad_() for value in values]
        y = scan(*inputs)
        return [y.detach(), *torch.autograd.grad((y * weight.to(dtype)).sum(), inputs)]

    pairs = zip(outcome(Scan.apply, torch.float32), outcome(scan_reference, torch.float64), strict=True)
    worst = max(((got - want).abs().max() / want.abs().max()).item() for got, want in pairs)
    if worst > 1e-4:
        raise ValueError(f"scan.c and the reference loop differ by {worst:.1e} of the largest value, expected <= 1e-4")
    return worst
