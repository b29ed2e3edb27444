"""Pure functions from tensor to tensor: grids, scales, rounding, observers, Hadamard."""
