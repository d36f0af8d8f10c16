"""What a step computes besides tokens: a file for each kind, and their table, `aux_outputs.py`."""
