"""Steps on a CPU with weft's own kernels."""
