"""Compiled grammars and the reasons of invalid ones, as many as fit in some bytes, the least recently used dropped."""

from __future__ import annotations

from collections import OrderedDict

from weft.grammar.protocol import Compiled, InvalidGrammar, Key

ENTRY_BYTES = 512  # for the books


class GrammarCache:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, tuple[Compiled | InvalidGrammar, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Compiled | InvalidGrammar | None:
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: Key, value: Compiled | InvalidGrammar) -> None:
        """One that is larger than the whole cache is not kept."""
        size = ENTRY_BYTES + len(key.text)
        size += (
            value.num_bytes + value.mask.nbytes if isinstance(value, Compiled) else len(str(value))
        )
        self._drop(key)
        if size > self._max_bytes:
            return
        self._entries[key] = value, size
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        if key in self._entries:
            self.num_bytes -= self._entries.pop(key)[1]
