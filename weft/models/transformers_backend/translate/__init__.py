"""Traces the forward pass of a transformers model as torch operations, and expresses them with
`Ops` as far as possible. It does not know the content of weights."""
