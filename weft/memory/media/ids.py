"""Ids that replace the tokens of pictures, videos and sounds in cache keys.

They follow from the content: equal items share their K and V, also in part, and different ones
never do. They are below 0, so they never equal a token of the vocabulary.
"""

from __future__ import annotations

import hashlib

import numpy as np

BLOCK_IDS = 8  # in one SHA-256
COUNTER_BYTES = 8


def content_ids(content: bytes, length: int) -> bytes:
    """`length` packed int32 ids below 0 that follow from `content`: SHA-256 of the content and a
    counter, block by block. Each id has 31 bits of the digest."""
    blocks: list[bytes] = []
    for number in range(-(-length // BLOCK_IDS)):
        counter = number.to_bytes(COUNTER_BYTES, "little")
        blocks.append(hashlib.sha256(content + counter).digest())
    ids = np.frombuffer(b"".join(blocks), dtype="<i4")[:length]
    below_0 = ids | np.int32(-(2**31))
    return below_0.astype(np.int32).tobytes()
