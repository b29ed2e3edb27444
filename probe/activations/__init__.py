"""Activation analysis: magnitudes, outliers and distributions of chosen layers, in one pass over the data.

    Settings -> Plan -> Collector (hooks) -> LayerStatistics, LayerOutliers, ... -> Analysis -> tables, JSON

Only counts, extremes and sums of a tensor are kept, so memory does not grow with the number of samples.
"""
