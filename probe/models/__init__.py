"""Models: loading, offload, layers, Mamba blocks with named sites, linears on a grid, quantizers of libraries."""
