"""Releases unused memory: Python's garbage collector, and memory that the C library keeps.

Objects that exist when a process has warmed up stay, so the collector need never examine them
again.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
from collections.abc import Callable

from weft.observe.log import EventLog

# New objects before a collection. Python's default of 700 is one request, without any garbage.
YOUNG_OBJECTS = 20_000
TRIM_AFTER_S = 1.0  # a request's memory is free by then

log = EventLog("garbage")


def freeze() -> None:
    """Collect once, then exclude all living objects from later collections.

    New objects are collected as before, but in larger batches. The time depends on the number of
    objects since the last call: for all modules, a fifth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    if log.is_enabled_for(logging.DEBUG):
        log.debug("frozen", objects=gc.get_freeze_count())


def freeze_modules() -> None:
    """Exclude all existing objects from later collections, without collecting first.

    For processes that have only imported modules: the garbage of imports is not worth the time to
    find it.
    """
    gc.freeze()


class Trim:
    """Returns memory to the system, shortly after a caller reported that much became free.

    The C library keeps freed memory for the next allocation, separately per thread. glibc can
    release it on request; with other libraries this does nothing.
    """

    def __init__(self, trim: Callable[[], object] | None = None) -> None:
        self._trim = trim or _malloc_trim
        self._is_due = False

    def soon(self) -> None:
        """Call from an event loop. All calls within `TRIM_AFTER_S` cause one release."""
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
