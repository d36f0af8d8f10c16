"""Kernels for GPUs, in Triton, each beside the function that launches it.

Only code that runs on a GPU imports these modules, because they need the package `triton`. Each
kernel has a specification in plain torch; docs/guides/gpu.md describes how the two are compared.
No GPU has run them yet.
"""
