"""A listener of the prefix cache that publishes its changes, and an implementation that does not.

    tree ─▶ inserted, split, trimmed, removed, emptied ─▶ (a step ends) publish ─▶ others

No call waits, and none raises: nothing in the engine depends on subscribers. Implementations:
`weft/kv_events/` (ZeroMQ), `NoCacheEvents`.
"""

from __future__ import annotations

from typing import Protocol

from weft.memory.prefix_cache import CacheListener, Handle


class CacheEvents(CacheListener, Protocol):
    """All methods are called from one thread."""

    is_on: bool  # False: it need not be notified

    def publish(self) -> None:
        """The changes since the last call are complete and may be published."""
        ...

    def stop(self) -> None:
        """Publish nothing more."""
        ...


class NoCacheEvents:
    """Publishes nothing."""

    is_on = False

    def inserted(self, leaf: Handle) -> None:
        pass

    def split(self, upper: Handle, lower: Handle) -> None:
        pass

    def trimmed(self, leaf: Handle) -> None:
        pass

    def removed(self, leaf: Handle) -> None:
        pass

    def emptied(self) -> None:
        pass

    def publish(self) -> None:
        pass

    def stop(self) -> None:
        pass
