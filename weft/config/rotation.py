"""A queue in which tenants take turns, however many items each has. The items of one tenant keep
their order, except that long items may be skipped.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Rotation(Generic[T]):
    def __init__(self) -> None:
        self._waiting: dict[
            str, deque[tuple[T, bool]]
        ] = {}  # by tenant; the first tenant has the next turn

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, tenant: str, item: T, *, is_long: bool) -> None:
        self._waiting.setdefault(tenant, deque()).append((item, is_long))

    def take(self, *, with_long: bool) -> T | None:
        """Take the oldest item of the tenant that has the next turn; the tenant then moves to the
        end. None if there is no item. Without `with_long`, long items are skipped.
        """
        for tenant, queue in self._waiting.items():
            for index, (item, is_long) in enumerate(queue):
                if with_long or not is_long:
                    del queue[index]
                    del self._waiting[tenant]
                    if queue:
                        self._waiting[tenant] = queue
                    return item
        return None

    def remove(self, tenant: str, item: T) -> bool:
        """Remove an item. Returns whether it was in the queue."""
        queue = self._waiting.get(tenant, deque())
        for index, (other, _) in enumerate(queue):
            if other is item:
                del queue[index]
                if not queue:
                    del self._waiting[tenant]
                return True
        return False
