"""Outputs of a step: sampled tokens (`sampler.py`), and others: functions, and their table in
`aux_outputs.py`."""
