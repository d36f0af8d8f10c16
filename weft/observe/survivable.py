"""Distinguishes exceptions that end only the work that raised them from those that end the process.

A panic of a library written in Rust reaches Python as `pyo3_runtime.PanicException`. It is not an
`Exception`, and its class cannot be imported.
"""

from __future__ import annotations


def is_survivable(exc: BaseException) -> bool:
    """True for exceptions and panics; False for exceptions that should end a task or the
    process."""
    return isinstance(exc, Exception) or type(exc).__name__ == "PanicException"
