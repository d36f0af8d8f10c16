"""Prefills of which a step computes only some layers. Without `--split-prefill-layers` a runner
does not use this code."""
