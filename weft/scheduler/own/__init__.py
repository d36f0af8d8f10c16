"""Policies of one's own: found by name (`load.py`), and kept from doing harm (`guarded.py`)."""
