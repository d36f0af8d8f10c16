"""Counts calls of functions."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def num_calls(action: Callable[[], object]) -> int:
    """How many functions, also of C, are called on the way."""
    num = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    gc.disable()  # what earlier tests have left would be finalized on the way
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return num
