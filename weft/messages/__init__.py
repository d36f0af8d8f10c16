"""What crosses a process boundary: plain values, encoded as msgpack.

They import nothing else of weft but the ranges of numbers (`config/numbers.py`).
"""
