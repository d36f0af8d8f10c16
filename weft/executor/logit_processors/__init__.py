"""Logit processors: code of the operator that changes the logits of requests that name it."""
