"""Marks a model while a process computes with it, so that nobody removes its files meanwhile.

The mark is a shared lock (flock) on the first of its weight files. It ends with the process,
however that ends, and needs no file of its own.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from weft.config.model import ModelError
from weft.weights.fetch import weight_files

TRIES = 10
MOMENT_S = 0.005  # many times as long as a look takes


def mark_in_use(folder: Path) -> Callable[[], None]:
    """Mark the model in a folder. Returns what ends the mark. A file system without locks, and a
    model without weight files, get none."""
    try:
        file = os.open(weight_files(folder)[0], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ModelError):
        return _nothing
    with suppress(OSError):
        _lock(file, fcntl.LOCK_SH)
    return lambda: os.close(file)


def is_in_use(files: Iterable[Path]) -> bool:
    """Whether a process computes with the model that has these files. A file with a second name
    does not count: its bytes stay when the first one is removed."""
    return any(map(_is_locked_alone, files))


def _is_locked_alone(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if os.fstat(file).st_nlink == 1:
            _lock(file, fcntl.LOCK_EX)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


def _lock(file: int, kind: int) -> None:
    """Lock a file. Others that look whether it is in use lock it for a moment, too. Raises
    BlockingIOError if it stays locked, and OSError."""
    for _ in range(TRIES):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(MOMENT_S)
    fcntl.flock(file, kind | fcntl.LOCK_NB)


def _nothing() -> None:
    pass
