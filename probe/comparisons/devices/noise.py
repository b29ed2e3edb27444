"""How far two sound devices may differ: by rounding, by the order of sums, and by the effect of both on a layer.

What a layer adds differs between two sound devices, relative to what it adds, by less than its floor:

    floor^2 = (GAIN * given)^2 + (ROUNDINGS * unit)^2 + (RESIDUAL * unit / part)^2

    given   the relative difference of what the layer was given
    unit    the largest relative error of one rounding to the coarser of the two dtypes: 2^-24 for float32
    part    how much of the tensor the layer added: the rounding of the sum is relative to all of it

float32 has the order of sums in place of ROUNDINGS: SUMS at 128 channels, growing with the root of their number. On
a grid a difference in the last bit can flip a rounding, and a flip the next: what a recipe adds may differ by as much
as it differs from the float model, which is the least floor of such a recipe.

Sound runs stay well below: at 0.4 of the floor in bfloat16, 0.4 in float16, 0.4 in float32 (tests/comparisons/devices).
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from probe.formats import FORMATS

#: Half a step, relative: 2^-(mantissa bits + 1).
UNITS = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
GAIN = 4.0
ROUNDINGS = 8.0
RESIDUAL = 2.0
SUMS = 16.0
#: Layers that compute in a narrower dtype than they are recorded in differ by this much, in units of that dtype.
NARROWER = (0.25, ROUNDINGS)
#: The dtypes that devices compute in without reporting it, with the words for them.
HIDDEN = {"float16": "float16 or tf32", "bfloat16": "bfloat16"}
#: An integer with one scale for a whole tensor spends this many of its steps on outliers.
_OUTLIERS = 16.0


def unit_of(dtypes: Mapping[str, str]) -> float:
    """The unit of a device: the coarser of its dtypes up to the first layer and of the usual dtype of its layers.

    `dtypes` are by tensor in the order of the data flow. One narrow layer in the middle does not make a device narrow.
    """
    layers = [UNITS[dtype] for name, dtype in dtypes.items() if is_layer(name)]
    if not layers:
        return max(map(UNITS.__getitem__, dtypes.values()))
    before = []
    for name, dtype in dtypes.items():
        before.append(UNITS[dtype])
        if is_layer(name):
            break
    usual = sorted(layers)[len(layers) // 2]
    return max(*before, usual)


def is_layer(name: str) -> bool:
    """Whether a tensor is the output of a whole layer: `layer_3.output`."""
    return name.startswith("layer_") and name.count(".") == 1 and name.endswith(".output")


def floor_of(unit: float, *, given: float, part: float, channels: int, own: float = 0.0) -> float:
    """How far what a layer adds may differ between sound devices, relative to what it adds."""
    roundings = ROUNDINGS * unit
    if unit <= UNITS["float32"]:
        roundings = SUMS * unit * math.sqrt(max(1.0, channels / 128))
    residual = RESIDUAL * unit / max(part, 1e-6)
    return max(own, math.hypot(GAIN * given, roundings, residual))


def own_error_of(format: str | None) -> float:
    """About how far a layer of a recipe is from the float layer, from its format alone; 0 in float."""
    if format is None or format not in FORMATS:
        return 0.0
    row = FORMATS[format]
    step = 2.0 ** -(row.mantissa_bits + 1) if not row.is_integer else 2.0 ** -(row.bits - 1)
    return min(0.5, 2 * step * (_OUTLIERS / 2 if row.is_integer and row.block_size is None else 2))


def off_grid(x: npt.NDArray[np.float64], dtype: str) -> float:
    """Median distance from the grid in half steps: 0.5 by chance; a row of small values is as good as any."""
    some = x[np.abs(x) > 1e-30]
    if not len(some):
        return 0.5
    near = torch.from_numpy(some).to(getattr(torch, dtype)).double().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.abs(some - near) / (np.exp2(np.floor(np.log2(np.abs(some)))) * UNITS[dtype])
    return float(np.median(off))
