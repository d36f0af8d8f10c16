"""Outputs of a step besides tokens: functions, and their table in `aux_outputs.py`."""
