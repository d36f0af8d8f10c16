"""A queue in which tenants take turns, whatever each of them puts in. What one tenant puts in keeps
its order, but that long work may be passed over.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Rotation(Generic[T]):
    def __init__(self) -> None:
        self._waiting: dict[
            str, deque[tuple[T, bool]]
        ] = {}  # by tenant; the first tenant is the next

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, tenant: str, item: T, *, is_long: bool) -> None:
        self._waiting.setdefault(tenant, deque()).append((item, is_long))

    def take(self, *, with_long: bool) -> T | None:
        """The oldest item of the tenant that is next, which then moves to the end; None if there is
        no item. Without `with_long`, long items are skipped.
        """
        for tenant, queue in self._waiting.items():
            for place, (item, is_long) in enumerate(queue):
                if with_long or not is_long:
                    del queue[place]
                    del self._waiting[tenant]
                    if queue:
                        self._waiting[tenant] = queue
                    return item
        return None

    def remove(self, tenant: str, item: T) -> bool:
        """Whether it was there."""
        queue = self._waiting.get(tenant, deque())
        for place, (other, _) in enumerate(queue):
            if other is item:
                del queue[place]
                if not queue:
                    del self._waiting[tenant]
                return True
        return False
