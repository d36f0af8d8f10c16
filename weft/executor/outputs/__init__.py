"""What a step computes besides tokens: functions, and their table in `aux_outputs.py`."""
