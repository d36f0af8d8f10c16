"""Logit processors: code of the operator's that changes the logits of the requests that name it."""
