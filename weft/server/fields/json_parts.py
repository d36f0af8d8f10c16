"""Counts the parts of a JSON text before it is decoded.

The decoder holds the interpreter until it is done, and its cost depends on the number of parts that
it creates, not on the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

# Bytes per step: bounds the size of the arrays and the time of one step.
CHUNK = 1 << 20
_QUOTE = ord('"')
_BACKSLASH = ord("\\")
_OPENING = [ord("["), ord("{"), ord(":")]


def has_more_parts(text: bytes, most: int) -> bool:
    """Whether `text` has more than `most` lists, objects and members of objects together.

    The content of strings does not count. For invalid JSON, the result has no meaning.

    Uses numpy, which releases the interpreter.
    """
    # First count including the brackets and colons in strings: most texts stay below `most` even
    # so.
    at_most = 0
    for chunk in _chunks(text):
        for byte in _OPENING:
            at_most += int(np.count_nonzero(chunk == byte))
    return at_most > most and num_parts(text) > most


def num_parts(text: bytes) -> int:
    """Number of lists, objects and members of objects in `text`, outside of strings."""
    num = 0
    is_inside = False
    num_slashes = 0
    for chunk in _chunks(text):
        quotes = chunk == _QUOTE
        escaped, num_slashes = _escaped(chunk, num_slashes)
        quotes &= ~escaped
        # An opening quote counts as inside, a closing one as outside.
        inside = np.logical_xor.accumulate(quotes) ^ is_inside
        opening = np.isin(chunk, _OPENING)
        num += int(np.count_nonzero(opening & ~inside))
        is_inside = bool(inside[-1])
    return num


def _chunks(text: bytes) -> Iterator[NDArray[np.uint8]]:
    """The text as uint8 arrays [at most CHUNK]."""
    for begin in range(0, len(text), CHUNK):
        length = min(CHUNK, len(text) - begin)
        yield np.frombuffer(text, np.uint8, length, begin)


def _escaped(chunk: NDArray[np.uint8], num_before: int) -> tuple[NDArray[np.bool_], int]:
    """Which bytes follow an odd number of backslashes, and the number of backslashes at the end of
    the chunk.

    `num_before`: backslashes right before the chunk.
    """
    slashes = chunk == _BACKSLASH
    indices = np.arange(len(chunk), dtype=np.int32)
    # For each byte, the index of the last byte up to it that is no backslash:
    #
    #     byte     a  \  \  \  b
    #     others   0  0  0  0  4
    #     run      0  1  2  3  0     backslashes up to and including it
    before_chunk = np.int32(-1 - num_before)
    others = np.maximum.accumulate(np.where(slashes, before_chunk, indices))
    run = indices - others
    first = np.array([num_before], np.int32)
    before = np.concatenate([first, run[:-1]])
    return before % 2 == 1, int(run[-1])
