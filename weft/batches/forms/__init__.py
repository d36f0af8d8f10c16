"""The APIs that batches have: how a line of work is read, and how its answer is written.

One module for each; `protocol.py` says what a form is.
"""
