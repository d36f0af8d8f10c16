"""Heads that guess tokens from the hidden states of a model."""
