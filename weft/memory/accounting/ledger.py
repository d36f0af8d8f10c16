"""Remembers the last owner of each page, so that a fault is reported with a name."""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray, LongArray

NOBODY = -1


class PageLedger:
    def __init__(self, num_pages: int) -> None:
        self.last_owner: LongArray = np.full(num_pages, NOBODY)  # [page] id of a request

    def record(self, pages: IntArray, ids: int | LongArray) -> None:
        """Requests have been given `pages` [n]; `ids` is one for all or one for each page."""
        self.last_owner[pages] = ids
