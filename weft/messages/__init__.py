"""What crosses a process boundary: plain values, encoded as msgpack, that import nothing else of weft but the ranges of
numbers (`config/numbers.py`)."""
