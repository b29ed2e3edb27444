"""What a report calls a figure."""

#: What a report calls a figure: the first row whose limit the figure is inside of.
MSE_LABELS = ((1e-4, "excellent"), (1e-3, "good"), (1e-2, "fair"))
CORRELATION_LABELS = ((0.9999, "excellent"), (0.999, "good"), (0.99, "fair"))


def label_mse(mse: float | None) -> str:
    """Below 1e-4 excellent, below 1e-3 good, below 1e-2 fair, else poor (NaN too); None is undefined."""
    if mse is None:
        return "undefined"
    return next((label for limit, label in MSE_LABELS if mse < limit), "poor")


def label_correlation(correlation: float | None) -> str:
    """Above 0.9999 excellent, above 0.999 good, above 0.99 fair, else poor (NaN too); None is undefined."""
    if correlation is None:
        return "undefined"
    return next((label for limit, label in CORRELATION_LABELS if correlation > limit), "poor")
