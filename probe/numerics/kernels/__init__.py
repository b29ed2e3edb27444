"""The numba kernels of the quantizers, loaded by `probe.numerics.native`: one pass over memory on the CPU."""
