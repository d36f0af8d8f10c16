"""A KV pool of bytes, and a store on it that tests wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from weft.arrays import IntArray
from weft.memory.prefix_cache import CacheKey
from weft.memory.tiers.protocol import Landed, Written
from weft.tiers.disk.store import DiskTiers

PAGE_SIZE = 4  # tokens
BLOCK_LEN = 8
NUM_PAGES = 64
PIECES = (24, 40)  # bytes of a page in each of two tensors
FINGERPRINT = b"f" * 32
HANG_S = 60.0


class BytesPool:
    """Two tensors of bytes."""

    page_bytes = sum(PIECES)

    def __init__(self) -> None:
        self.tensors = [np.zeros(size * NUM_PAGES, dtype=np.uint8) for size in PIECES]

    def pieces(self, page: int) -> list[memoryview]:
        return [
            tensor.data[page * size : (page + 1) * size]
            for tensor, size in zip(self.tensors, PIECES, strict=True)
        ]

    def fill(self, pages: IntArray, seed: int) -> bytes:
        """Random content of pages. Returns it."""
        rng = np.random.default_rng(seed)
        for page in pages.tolist():
            for piece in self.pieces(page):
                np.frombuffer(piece, dtype=np.uint8)[:] = rng.integers(0, 256, len(piece))
        return self.content(pages)

    def content(self, pages: IntArray) -> bytes:
        return b"".join(bytes(piece) for page in pages.tolist() for piece in self.pieces(page))


class WaitedTiers(DiskTiers):
    """A store whose news tests wait for. `floor_bytes`: None is that of servers."""

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: bytes = FINGERPRINT,
        max_bytes: int = 1_000_000_000,
        floor_bytes: int | None = 0,
        identify: Callable[[], bytes] | None = None,
    ) -> None:
        self.pool = BytesPool()
        self.fingerprint = fingerprint
        self.identify = identify
        self._rung = threading.Event()
        self._tickets = iter(range(1_000_000))
        floor = {} if floor_bytes is None else {"floor_bytes": floor_bytes}
        super().__init__(
            folder,
            self.pool,
            page_size=PAGE_SIZE,
            block_len=BLOCK_LEN,
            max_bytes=max_bytes,
            weights=lambda: self.identify or (lambda: self.fingerprint),
            notify=self._rung.set,
            **floor,
        )
        self.start()

    def opened(self) -> WaitedTiers:
        deadline = time.monotonic() + HANG_S
        while not self.take().has_opened:
            assert self._rung.wait(deadline - time.monotonic()), self.report()
            self._rung.clear()
        return self

    def write(self, key: CacheKey, pages: IntArray, start: int = 0) -> Written:
        ticket = next(self._tickets)
        self.keep(ticket, key, start, pages)
        (written,) = self._wait("written")
        assert written.ticket == ticket
        return written

    def read(self, key: CacheKey, pages: IntArray, start: int = 0) -> Landed:
        ticket = next(self._tickets)
        self.fetch(ticket, key, start, pages)
        (landed,) = self._wait("landed")
        assert landed.ticket == ticket
        return landed

    def _wait(self, what: str) -> tuple:  # type: ignore[type-arg]
        while True:
            news = self.take()
            if getattr(news, what):
                found: tuple = getattr(news, what)  # type: ignore[type-arg]
                return found
            assert self._rung.wait(HANG_S)
            self._rung.clear()


def key_of(num_tokens: int, seed: int = 0, namespace: str = "") -> CacheKey:
    tokens = np.random.default_rng(seed).integers(-1_000, 100_000, num_tokens).astype(np.int32)
    return CacheKey(namespace, tokens.tobytes())


def pages(first: int, num: int) -> IntArray:
    return np.arange(first, first + num, dtype=np.int32)
