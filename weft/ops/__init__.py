"""Functions on tensors. Each has a plain torch form, which is its specification; faster twins stand
beside it."""
