"""What the choice of a scale costs a tensor: a sweep over scales, what to make of it, and what blocks really do.

    tensors (inputs) -> sweep (levels, by distinct values or in pieces) -> ScalingResult -> recommend -> grid
                     -> compare_rules: the scale rules side by side

`probe.report.scaling` writes what was found, `batch` runs it over many tensors.
"""
