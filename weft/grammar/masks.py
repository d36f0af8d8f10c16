"""Masks that may still be on their way: a thread finds them out while the model computes the logits they are for.

    advance ─▶ Masks ─▶ thread: fills them      meanwhile the engine's thread plans and launches the next step
                 └───── words ─▶ sampler        waits for the thread, or fills them itself, if it has not begun

A mask is a row of packed bits: token t is allowed if bit t % 32 of word t // 32 is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int32]
Faults: TypeAlias = Mapping[
    int, str
]  # rows that mean nothing, and why the outputs cannot go on there


class LazyBitmasks:
    """What may come next at M places. `fill` writes it into `words` [M, W] and returns the faults; without it, it
    stands there already. It is called once, in whichever thread is first; one that pickles them waits for it, too."""

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
        """Return when they are filled."""
        if self._fill is None:
            return
        with self._lock:
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
        """Waits for them."""
        self.finish()
        return self._faults

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyBitmasks, (self.words, None, self.faults)


class LazyBitmaskRow(NamedTuple):
    """One of them."""

    masks: LazyBitmasks
    place: int = 0
    also: int | None = None  # a token that is allowed besides

    @property
    def words(self) -> Words:
        """[W]. Waits for them."""
        words: Words = self.masks.words[self.place]
        if self.also is not None and self.also < 32 * len(words):
            words = words.copy()
            words.view(np.uint32)[self.also // 32] |= np.uint32(1 << self.also % 32)
        return words


class LazyBitmaskRows(NamedTuple):
    """The masks of one step: the `Promise` that its plan carries."""

    rows: Sequence[LazyBitmaskRow]

    @property
    def words(self) -> Words:
        """[M, W]. Waits for them, after it has filled what nobody has begun: the thread comes from the other end."""
        return np.stack([row.words for row in reversed(self.rows)][::-1])

    @property
    def faults(self) -> Faults:
        """Waits for them."""
        found = ((i, row.masks.faults.get(row.place)) for i, row in enumerate(self.rows))
        return {i: fault for i, fault in found if fault is not None}
