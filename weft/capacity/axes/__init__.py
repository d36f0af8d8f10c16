"""The settings that are searched: an axis each, in the list of `table.py`."""
