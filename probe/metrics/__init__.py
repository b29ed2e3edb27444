"""How far a tensor is from its reference: figures gathered in one pass, batch after batch, in float64.

An accumulator measures a stream of elements. `update` appends a batch to the stream and `merge` the whole stream of
another accumulator, so two halves of the data that are measured apart give the figures of the whole. Counts, extremes
and exact percentiles do not depend on how the stream is cut; sums do only by the order of their additions.

An element that is NaN or Inf on either side is counted, turns `finite` to False and is left out of every other
figure. A figure that has no meaning is None and never NaN; `Metrics` says when that is.
"""

from probe.metrics.comparison import Comparison, LogitComparison, LogitMetrics
from probe.metrics.embeddings import EmbeddingComparison, EmbeddingMetrics
from probe.metrics.figures import (
    CORRELATION_LABELS,
    MSE_LABELS,
    QUANTILES,
    RELATIVE_MSE_LABELS,
    Metrics,
    label_correlation,
    label_mse,
    label_relative_mse,
)
from probe.metrics.tally import KEPT, PERCENTILE_ERROR

__all__ = ["Comparison", "EmbeddingComparison", "EmbeddingMetrics", "LogitComparison", "LogitMetrics", "Metrics"]
__all__ += ["CORRELATION_LABELS", "KEPT", "MSE_LABELS", "PERCENTILE_ERROR", "QUANTILES", "RELATIVE_MSE_LABELS"]
__all__ += ["label_correlation", "label_mse", "label_relative_mse"]
