"""What flows through a model: magnitudes, outliers and distributions of chosen layers, in one pass over the data.

    configuration -> data, model -> collecting (hooks) -> LayerStatistics, Outliers, ... -> Analysis -> export, report

Nothing of a tensor is kept but counts, extremes and sums, so that memory does not grow with the samples.
"""
