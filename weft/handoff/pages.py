"""The memory that is sent and received, and a lock around pages that another thread may take away
at any time."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType

from weft.tiers.pages import PoolPages


@dataclass(frozen=True, kw_only=True)
class HandoffMemory:
    """`resume_states`: the memory of resume states, if sequences have some."""

    pool: PoolPages
    resume_states: PoolPages | None
    page_size: int  # tokens


class GateShut(Exception):
    """The pages have been taken away."""


class PageGate:
    """Use `with gate:` around each access, which must be short. After `shut` returns, no thread
    accesses the pages any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_shut = False

    def shut(self) -> None:
        with self._lock:
            self.is_shut = True

    def __enter__(self) -> PageGate:
        """Raises GateShut."""
        self._lock.acquire()
        if self.is_shut:
            self._lock.release()
            raise GateShut
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
