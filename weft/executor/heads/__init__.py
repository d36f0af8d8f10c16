"""Heads that guess the next tokens from hidden states of the model's own steps."""
