"""Functions on tensors. Each has an implementation in plain torch, which is its specification, and
faster ones for CPUs and GPUs."""
