"""The cache of weights that are packed for the kernels (`--weights-cache`)."""
