"""Room in a process whose address space is limited (`ulimit -v`): what might not fit is refused before it is begun.

A library that finds no memory ends the process (that of the tokenizer does), and with it every request there is. So
nobody may come that far. Limits on memory from outside of the process, such as a container's, cannot be seen this way.
"""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

from weft.server.errors import ApiError

LEAST_BYTES = 1_000_000_000  # beside what is loaded: threads, and what the allocator keeps for each, are to come
RESERVE_BYTES = 128_000_000  # for what is open already, and for a request of common size
BYTES_PER_BODY_BYTE = 16  # text, values, tokens and their offsets of one body
STATM = Path("/proc/self/statm")


def spare_bytes() -> float:
    """How much more address space this process may take; infinite where that is not limited or cannot be known."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    try:
        pages = int(STATM.read_bytes().split()[0])
    except OSError:
        return math.inf
    return float(limit - pages * os.sysconf("SC_PAGE_SIZE"))


def require_room(body_len: int) -> None:
    """Raise `ApiError` 503 unless a body of so many bytes can be worked on."""
    spare = spare_bytes()
    if spare < RESERVE_BYTES + BYTES_PER_BODY_BYTE * body_len:
        left = f"{spare / 1e6:.0f} MB are left (ulimit -v)"
        message = f"the server has no memory for a body of {body_len:,} bytes: {left}"
        raise ApiError(503, message, headers={"retry-after": "1"})
