"""Lazy bitmasks: a thread fills them while the model computes the logits.

    advance ─▶ LazyBitmasks ─▶ thread: fills them     meanwhile the engine's thread goes on
                    └── words ─▶ sampler              waits for the thread, or fills them itself,
                                                      if the thread has not begun

A mask is a row of packed bits: token t is allowed if bit t % 32 of word t // 32 is 1. This module
knows nothing of grammars: a function fills the words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int32]
# Rows without a valid mask, with the reason why their outputs cannot continue.
Faults: TypeAlias = Mapping[int, str]


class LazyBitmasks:
    """The allowed next tokens of M outputs.

    `fill` writes them into `words` [M, W] and returns the faults; without `fill`, the words are
    complete. `fill` is called once, by the thread that needs the words first; pickling waits for
    it, too.
    """

    def __init__(
        self,
        words: Words,
        fill: Callable[[Words], Faults] | None = None,
        faults: Faults | None = None,
    ):
        self._words = words
        self._fill = fill  # None: done
        self._faults: Faults = faults or {}
        self._lock = Lock()

    def finish(self) -> None:
        """Return when the words are complete."""
        if self._fill is None:
            return
        with self._lock:
            # Another thread may have filled them while this one waited for the lock.
            if self._fill is not None:
                self._faults = self._fill(self._words)
                self._fill = None

    @property
    def words(self) -> Words:
        """[M, W]. Waits for them."""
        self.finish()
        return self._words

    @property
    def faults(self) -> Faults:
        """Waits for the words."""
        self.finish()
        return self._faults

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyBitmasks, (self.words, None, self.faults)


class LazyBitmaskRow(NamedTuple):
    """The mask of one output."""

    masks: LazyBitmasks
    row: int = 0
    also: int | None = None  # one more allowed token

    @property
    def words(self) -> Words:
        """[W]. Waits for them."""
        words: Words = self.masks.words[self.row]
        also = self.also
        if also is None or also >= 32 * len(words):
            return words
        words = words.copy()  # other rows and steps read the original
        words.view(np.uint32)[also // 32] |= np.uint32(1 << also % 32)
        return words


class LazyBitmaskRows(NamedTuple):
    """The masks of one step, as its plan carries them."""

    rows: Sequence[LazyBitmaskRow]

    @property
    def words(self) -> Words:
        """[M, W]. Fills the masks that no thread has begun, then waits for the others."""
        # In reverse order, because the thread begins with the first: so both fill at the same time.
        from_last = [row.words for row in reversed(self.rows)]
        return np.stack(from_last[::-1])

    @property
    def faults(self) -> Faults:
        """Waits for the words."""
        found: dict[int, str] = {}
        for i, row in enumerate(self.rows):
            fault = row.masks.faults.get(row.row)
            if fault is not None:
                found[i] = fault
        return found
