"""Admission to a batch if layers with windows have pages of their own: a request needs room in both
pools, and memory is reserved for it in both.

    windows:  | running rows | what they grow by | promised here | rem_window_tokens |

In the pool of windows a row does not grow beyond its window and the tokens of a step. So less
memory is reserved there: the growth until the window is full.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.scheduler.admission import (
    CLIP_MAX_NEW_TOKENS,
    AddResult,
    Lack,
    PrefillAdder,
    Shortage,
)
from weft.scheduler.prefill import PrefillScheduler
from weft.scheduler.request import Request
from weft.scheduler.windows.kv import WindowedKv


def expected_growth(kv: WindowedKv, rows: IntArray, ratio: float) -> int:
    """Tokens by which running requests are expected to grow in their windows."""
    columns = kv.columns
    left = columns.max_len[rows] - columns.seq_len[rows]
    left = np.clip(left, 0, CLIP_MAX_NEW_TOKENS)
    # Rounded before the sum, so that the sum is the same on every machine.
    at_eos = np.ceil(left * ratio).astype(np.int64)
    expected = np.where(columns.stops_at_eos[rows], at_eos, left)
    return int(np.minimum(expected, kv.growth(rows)).sum())


class WindowedAdder(PrefillAdder):
    """The budgets of a pass over a `WindowedKv`."""

    _window_offset = 0  # tokens of windows that are reserved, or taken by this step

    def promise(self, growth: int) -> None:
        """Set the expected growth of running requests in their windows. Called before any other
        method."""
        self._window_offset = self._current_offset + growth

    @property
    def rem_total_tokens(self) -> float:
        """Memory left in the pool with less memory."""
        return min(self._rem_tokens, self._rem_window_tokens)

    def lacking(self, request: Request) -> float:
        extend = request.remaining_prefill
        reserve = self._expected_new(request)
        own = self._pages_of(extend) + self._page_size + reserve
        in_windows = self._in_windows(request, extend, reserve) + self._page_size
        return max(own - self._rem_tokens, in_windows - self._rem_window_tokens)

    # Inside

    @property
    def _windowed(self) -> WindowedKv:
        assert isinstance(self._kv, WindowedKv)
        return self._kv

    @property
    def _rem_tokens(self) -> float:
        """Memory left in the pool of layers without windows."""
        return self._windowed.rest - self._total_offset

    @property
    def _rem_window_tokens(self) -> int:
        return self._windowed.windows.available - self._window_offset

    def _in_windows(self, request: Request, extend: int, reserve: int) -> int:
        """The largest number of tokens that a request has in its windows at once, while it computes
        `extend` tokens of its prompt and then generates `reserve` more."""
        full_row = self._windowed.windows.full_row
        chunk_len = self._windowed.chunk_len
        step = extend if chunk_len is None else min(extend, chunk_len)
        own = self._pages_of(extend)
        # While its prompt is computed it has a step besides its window, later only a window.
        in_prefill = min(own, full_row + self._pages_of(step))
        in_decode = min(own + reserve, full_row)
        return max(in_prefill, in_decode)

    def _fits(self, request: Request, extend: int, reserve: int) -> bool:
        charged = self._pages_of(extend)
        in_windows = self._in_windows(request, extend, reserve)
        if not reserve and self._is_alone and not self.can_run:
            return charged <= self._rem_tokens and in_windows <= self._rem_window_tokens
        fits = charged + self._page_size + reserve < self._rem_tokens
        return fits and in_windows + self._page_size < self._rem_window_tokens

    def _take(self, request: Request, extend: int, reserve: int) -> None:
        charged = self._pages_of(extend)
        # After this step the row frees the pages before its window.
        row_len = request.kv_len + extend
        growth = max(self._windowed.windows.full_row - row_len, 0)
        self._window_offset += charged + self._page_size + min(reserve, growth)
        super()._take(request, extend, reserve)

    def _no_token(self, request: Request, extend: int, reserve: int) -> AddResult:
        in_windows = self._in_windows(request, extend, reserve) + self._page_size
        if in_windows < self._rem_window_tokens:
            return super()._no_token(request, extend, reserve)
        self.shortage = self._window_shortage(in_windows + 1, self._rem_window_tokens)
        return AddResult.NO_TOKEN

    def _no_page(self) -> Shortage:
        left = self._windowed.windows.available - self._current_offset
        if left > self.cur_rem_tokens:
            return super()._no_page()
        return self._window_shortage(self._page_size, left)

    def _window_shortage(self, needed: int, available: int) -> Shortage:
        free = self._windowed.windows.available
        return Shortage(Lack.WINDOWS, needed, max(available, 0), free)


class WindowedPrefills(PrefillScheduler):
    """Admits waiting requests under the budgets of both pools."""

    adder_type = WindowedAdder

    def _new_adder(self, decode_rows: IntArray, now: float) -> PrefillAdder:
        adder = super()._new_adder(decode_rows, now)
        assert isinstance(adder, WindowedAdder)
        assert isinstance(self._kv, WindowedKv)
        adder.promise(expected_growth(self._kv, self._running.rows, self._ratio(now)))
        return adder
