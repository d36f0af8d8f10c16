"""Remembers whom each page was given to last, so that a fault can be told with a name."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.memory.allocator import IntArray

NOBODY = -1


class PageLedger:
    def __init__(self, num_pages: int) -> None:
        self.last_owner: NDArray[np.int64] = np.full(num_pages, NOBODY)  # [page] id of a request

    def record(self, pages: IntArray, ids: int | NDArray[np.int64]) -> None:
        """Requests `ids`, one for all or one for each page, have been given `pages` [n]."""
        self.last_owner[pages] = ids
