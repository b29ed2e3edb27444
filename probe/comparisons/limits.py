"""When a comparison of modes is a failure."""

from collections.abc import Mapping

from probe.comparisons.results import ModeComparison

#: Limits by option: the figure that is limited, and whether it may be at most or must be at least so much.
LIMITS: dict[str, tuple[str, bool]] = {
    "max_mse": ("mse", True),
    "max_mae": ("mae", True),
    "max_abs": ("max_abs", True),
    "max_relative_mse": ("relative_mse", True),
    "max_relative_mae": ("relative_mae", True),
    "min_correlation": ("correlation", False),
    "min_cosine": ("cosine", False),
}


def failures(comparison: ModeComparison, limits: Mapping[str, float] | None = None) -> list[str]:
    """What is wrong, layer by layer: not finite, identical with the reference, or beyond a limit of LIMITS."""
    for name in limits or {}:
        if name not in LIMITS:
            raise ValueError(f"there is no limit {name!r}. Known: {', '.join(LIMITS)}.")
    mode, reference = comparison.compared_mode, comparison.reference_mode
    found = []
    for name, layer in comparison.layers.items():
        m = layer.metrics
        if not m.finite:
            first = f", first at {layer.first_nonfinite}" if layer.first_nonfinite else ""
            found.append(
                f"{name} is not finite: {m.nan_output} NaN and {m.inf_output} Inf in {mode}{first}; "
                f"{m.nan_reference} NaN and {m.inf_reference} Inf in {reference}"
            )
        if m.identical:
            found.append(f"{name} is identical with {reference}, to the bit: was {mode} applied?")
        for limit, bound in (limits or {}).items():
            figure, at_most = LIMITS[limit]
            value = getattr(m, figure)
            if value is None:
                found.append(f"{name}: {figure} is undefined, and the limit is {bound:g}")
            elif not (value <= bound if at_most else value >= bound):
                found.append(f"{name}: {figure} {value:.6g} is {'above' if at_most else 'below'} the limit {bound:g}")
    return found
