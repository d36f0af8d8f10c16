"""A cache of compiled grammars, and of the errors of invalid ones, with a limit in bytes.

It drops the least recently used entries first. It is not thread-safe: one thread uses a cache.
"""

from __future__ import annotations

from collections import OrderedDict

from weft.grammar.protocol import Compiled, InvalidGrammar, Key

ENTRY_BYTES = 512  # memory of the table per entry


class GrammarCache:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, tuple[Compiled | InvalidGrammar, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Compiled | InvalidGrammar | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        value, _ = entry
        return value

    def put(self, key: Key, value: Compiled | InvalidGrammar) -> None:
        """Keep `value`, unless it is larger than the whole cache."""
        size = ENTRY_BYTES + len(key.text)
        if isinstance(value, Compiled):
            size += value.num_bytes + value.mask.nbytes
        else:
            size += len(str(value))
        self._drop(key)
        if size > self._max_bytes:
            return
        self._entries[key] = (value, size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        if key in self._entries:
            _, size = self._entries.pop(key)
            self.num_bytes -= size
