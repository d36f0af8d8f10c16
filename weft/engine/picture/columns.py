"""Numbers in the format of picture messages: packed, in the byte order of the machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ints(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def longs(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()


def floats(values: Sequence[float]) -> bytes:
    return np.array(values, dtype=np.float32).tobytes()
