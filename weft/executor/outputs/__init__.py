"""What a step computes besides tokens: a file for each kind, and the table of them in `aux.py`."""
