"""Prefills of which a step computes some layers. A runner without `--split-prefill-layers` enters
nothing of it."""
