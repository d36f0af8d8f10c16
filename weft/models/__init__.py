"""Decoders: tokens in, hidden states and logits out. They know nothing of requests, batches or how
KV is kept."""
