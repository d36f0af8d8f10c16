"""What follows the changes of the prefix cache and tells others, and its twin that does not.

    tree ─▶ inserted, split, trimmed, removed, emptied ─▶ (a step ends) publish ─▶ others

No call waits, and none raises: nothing in the engine depends on who listens. Twins:
`weft/kv_events/` (ZeroMQ), `NoCacheEvents`.
"""

from __future__ import annotations

from typing import Protocol

from weft.memory.prefix_cache import CacheListener, Handle


class CacheEvents(CacheListener, Protocol):
    """Called from one thread."""

    is_on: bool  # False: it need not be told anything

    def publish(self) -> None:
        """What has changed since the last call is whole: others may be told."""
        ...

    def stop(self) -> None:
        """Nothing more will be published."""
        ...


class NoCacheEvents:
    """Nobody is told."""

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
