"""Every figure in plain numpy, and streams of values to try."""

import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from probe.metrics import Comparison, Metrics

INF, NAN = math.inf, math.nan
PERCENTILES = ("p50", "p90", "p95", "p99")
EXACT = {
    *("count", "compared", "finite", "identical", "max_abs", "percentiles_exact", "zeroed", "saturated", "moved"),
    *("min_output", "max_output", "min_reference", "max_reference", *PERCENTILES),
    *("nan_output", "inf_output", "nan_reference", "inf_reference", "first_nonfinite"),
}


def expected(output: Tensor, reference: Tensor) -> dict[str, Any]:
    """Every figure in plain numpy, with everything in memory."""
    o, r = (x.double().numpy().ravel() for x in (output, reference))
    good = np.isfinite(o) & np.isfinite(r)
    lost = np.flatnonzero(~np.isfinite(o) & np.isfinite(r))
    moved = np.mean(o.view(np.int64) != r.view(np.int64))
    figures: dict[str, Any] = {
        "count": o.size,
        "compared": good.sum(),
        "finite": np.isfinite(o).all() and np.isfinite(r).all(),
        "identical": moved == 0,
        "nan_output": np.isnan(o).sum(),
        "inf_output": np.isinf(o).sum(),
        "nan_reference": np.isnan(r).sum(),
        "inf_reference": np.isinf(r).sum(),
        "first_nonfinite": lost[0] if lost.size else None,
        "moved": moved,
    }
    o, r = o[good], r[good]
    d = o - r
    if not o.size:
        return figures
    mse, power, peak = np.mean(d**2), np.mean(r**2), np.abs(r).max()
    norms = np.linalg.norm(o) * np.linalg.norm(r)
    varies = np.ptp(o) > 0 and np.ptp(r) > 0
    centred = [x - x.mean() for x in (o, r)]
    limit = np.abs(o).max()
    at_limit = np.sum(np.abs(o) == limit)
    lossless = not d.any()
    figures |= {
        "mse": mse,
        "rmse": np.sqrt(mse),
        "mae": np.abs(d).mean(),
        "max_abs": np.abs(d).max(),
        "relative_mse": mse / (power + 1e-8),
        "relative_mae": np.abs(d).mean() / (np.abs(r).mean() + 1e-8),
        "correlation": centred[0] @ centred[1] / np.sqrt((centred[0] @ centred[0]) * (centred[1] @ centred[1]))
        if varies
        else None,
        "cosine": o @ r / norms if norms else None,
        "psnr": INF if lossless else 20 * np.log10(peak / np.sqrt(mse)) if peak else None,
        "sqnr": INF if lossless else 10 * np.log10(np.sum(r**2) / np.sum(d**2)) if peak else None,
        "percentiles_exact": True,
        "zeroed": np.mean((o == 0) & (r != 0)),
        "saturated": at_limit / o.size if at_limit > 1 and limit > 0 else 0.0,
    }
    figures |= {name: np.percentile(np.abs(d), int(name[1:])) for name in PERCENTILES}
    for side, x in (("output", o), ("reference", r)):
        figures |= {f"mean_{side}": x.mean(), f"std_{side}": x.std() if np.ptp(x) else 0.0}
        figures |= {f"min_{side}": x.min(), f"max_{side}": x.max()}
    return figures | {"mean_difference": d.mean(), "std_difference": d.std() if np.ptp(d) else 0.0}


def assert_agrees(found: Metrics, output: Tensor, reference: Tensor, *, skip: tuple[str, ...] = ()) -> None:
    """Counts, extremes and percentiles to the bit; sums to 1e-12, times the condition where they are centred."""
    wanted = expected(output, reference)
    sides = {"output": output.double(), "reference": reference.double()}
    good = sides["output"].isfinite() & sides["reference"].isfinite()
    sides = {name: x[good].flatten() for name, x in sides.items()}
    sides["difference"] = sides["output"] - sides["reference"]
    assert list(found.as_dict()) == [*Metrics.__dataclass_fields__]
    for name, figure in found.as_dict().items():
        want = wanted.get(name)
        if name in skip:
            continue
        cancels = name in ("cosine", "correlation", "psnr", "sqnr") or name.startswith("mean_")  # 0 but for rounding
        if want is None or figure is None or name in EXACT or want == INF or (want == 0 and not cancels):
            assert figure == want, (name, figure, want)
            continue
        tolerance = 1e-12 * abs(want)
        side = name.partition("_")[2]
        if side in sides:
            tolerance += 1e-12 * float(sides[side].abs().max())
        elif name == "correlation":
            tolerance = 1e-12 * max(1 + float(x.abs().max() / x.std(correction=0)) for x in sides.values() if x.any())
        elif name == "cosine":
            tolerance = 1e-12
        elif name in ("psnr", "sqnr"):
            tolerance = 1e-10
        assert abs(figure - want) <= tolerance, (name, figure, want)


def seen(*batches: tuple[Tensor, Tensor], **options: Any) -> Comparison:
    comparison = Comparison(**options)
    for output, reference in batches:
        comparison.update(output, reference)
    return comparison


def figures(output: Any, reference: Any, **options: Any) -> Metrics:
    pair = (torch.as_tensor(x, dtype=torch.float32) for x in (output, reference))
    return seen(tuple(pair), **options).metrics()  # type: ignore[arg-type]


def pair(*shape: int, seed: int = 0, scale: float = 1.0, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    plain = torch.randn(shape, generator=g)
    output = (plain * 8).round().clamp(-12, 12) / 8
    return output * scale + offset, plain * scale + offset


floats = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e30, -1e30, 1e-30, 448.0]),
    st.floats(-1, 1, width=32),
)
odd = st.one_of(floats, st.sampled_from([NAN, INF, -INF]))


def stream(elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[tuple[float, float]]]:
    return st.lists(st.one_of(st.tuples(elements, elements), floats.map(lambda x: (x, x))), min_size=1, max_size=50)


def split(values: Any) -> tuple[Tensor, Tensor]:
    both = torch.tensor(values, dtype=torch.float32)
    return both[:, 0], both[:, 1]
