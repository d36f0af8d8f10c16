"""Memory that is not in use any more:
Python's garbage collector, and what the C library keeps for later.

What is there when a process has warmed up stays: it need not be looked at ever again.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
from collections.abc import Callable

from weft.observe.log import EventLog

# That are made before they are looked at; Python's 700 are one request, none of it garbage.
YOUNG_OBJECTS = 20_000
TRIM_AFTER_S = 1.0  # what a request has used is free by then

log = EventLog("garbage")


def freeze() -> None:
    """Collect once, then move every object that lives out of the collector's sight.

    What comes later is collected as before, but in larger portions. What has come since the last
    time decides how long it takes: of all modules, a fifth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    if log.is_enabled_for(logging.DEBUG):
        log.debug("frozen", objects=gc.get_freeze_count())


def freeze_modules() -> None:
    """Move what is there out of the collector's sight as it is.

    For processes that have done nothing but import: what modules leave behind is not worth the
    time to look for it.
    """
    gc.freeze()


class Trim:
    """Gives memory back to the system, soon after somebody has said that much became free.

    The C library keeps what was freed for the next allocation, of every thread by itself. Where it
    is glibc, it can be told to let go; elsewhere this does nothing.
    """

    def __init__(self, trim: Callable[[], object] | None = None) -> None:
        self._trim = trim or _malloc_trim
        self._is_due = False

    def soon(self) -> None:
        """From an event loop; once for all that say so within `TRIM_AFTER_S`."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, self._trim)


def _malloc_trim() -> None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return
    trim(0)
