"""Which exceptions end the work that raised them, and not the process.

A panic of a library that is written in Rust reaches Python as `pyo3_runtime.PanicException`. It is
no `Exception`, and its class can be imported from nowhere.
"""

from __future__ import annotations


def is_survivable(exc: BaseException) -> bool:
    """True for exceptions and panics; false for what is to end a task or the process."""
    return isinstance(exc, Exception) or type(exc).__name__ == "PanicException"
