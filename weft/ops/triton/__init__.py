"""Kernels for GPUs, in Triton, each beside the function that launches it.

Only what runs on a GPU imports these modules: they need the package `triton`. Each kernel has a
twin in plain torch that says what it computes; docs/guides/gpu.md tells how they are compared, and
what has run where.
"""
