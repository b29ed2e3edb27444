"""The errors that every format makes on one made-up tensor, as a table."""

import math
import warnings

import torch

from probe.formats import FORMATS
from probe.numerics.quantize import SCALE_RULES, fake_quantize
from probe.numerics.underflow import UnderflowWarning, analyze_underflow
from probe.words import look_up


def error_table(
    shape: list[int], formats: list[str], seed: int, outliers: float, scale_rule: str
) -> list[dict[str, object]]:
    """One row per format: errors of `fake_quantize` against the float32 original, in float64."""
    if not shape or min(shape) < 1:
        raise ValueError(f"shape {' '.join(map(str, shape))} has no elements. Give sizes of at least 1.")
    if not 0 <= outliers <= 1:
        raise ValueError(f"outliers {outliers} is not a share. Give a number from 0 to 1.")
    if math.prod(shape) > 2**28:
        raise ValueError(f"shape {' '.join(map(str, shape))} has {math.prod(shape)} elements. Give at most {2**28}.")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed {seed} is out of range. Give a whole number from 0 to {2**63 - 1}.")
    look_up("scale rule", scale_rule, SCALE_RULES)
    chosen = [look_up("format", name, FORMATS, see="List them with: probe formats") for name in formats]
    if scale_rule != "floor" and not any(fmt.scale == "e8m0" for fmt in chosen):
        raise ValueError(f"scale rule {scale_rule!r} was given, but none of these formats has a power-of-two scale.")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < outliers, 50 * x, x)
    return [_row(x, name, scale_rule) for name in formats]


def _row(x: torch.Tensor, name: str, scale_rule: str) -> dict[str, object]:
    fmt = FORMATS[name]
    rule = scale_rule if fmt.scale == "e8m0" else "floor"
    error = (fake_quantize(x, name, scale_rule=rule).double() - x.double()).flatten()
    reference = x.double().flatten()
    mse = float(error.square().mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnderflowWarning)
        lost = analyze_underflow(x, name, scale_rule=rule)
    return {
        "format": name,
        "block": fmt.block_size or "tensor" if fmt.scale else "-",
        "rule": rule if fmt.scale == "e8m0" else "-",
        "mse": mse,
        "max abs error": float(error.abs().max()),
        "sqnr dB": round(10 * math.log10(float(reference.square().mean()) / mse), 2) if mse else None,
        "cosine": float(torch.nn.functional.cosine_similarity(reference + error, reference, dim=0)),
        "saturated %": round(100 * lost.share(lost.overflow), 4),
        "flushed %": round(100 * lost.share(lost.flushed), 4),
    }
