"""What the choice of a scale costs a tensor: a sweep over scales, the advice that follows, and real MX blocks.

    tensor -> scaling_sweep (levels; fast or blockwise, both held to reference) -> ScalingResult -> recommend -> grid_of
           -> compare_rules: the scale rules of MX blocks side by side

`probe scaling` runs it over many tensors, and `probe.report.scaling` writes the results.
"""
