"""Prefills in pieces: a step computes only some of the layers. Without `--split-prefill-layers` a
runner does not use this code."""
