"""The messages between processes: plain values, encoded as msgpack.

They import nothing else of weft except the ranges of numbers (`config/numbers.py`).
"""
