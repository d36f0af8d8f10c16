"""Steps on a CPU with our kernels."""
