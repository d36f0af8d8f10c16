"""Distinguishes exceptions that end only the work that raised them from those that end the process.

A panic of a library written in Rust reaches Python as `pyo3_runtime.PanicException`. It is not an
`Exception`, and its class cannot be imported. Code from outside of weft may call `sys.exit`: that
is a fault of the code, and no wish of the operator.
"""

from __future__ import annotations


class Survived(RuntimeError):
    """An exception that is not an `Exception`, and ends only the work that raised it."""


def is_survivable(exc: BaseException) -> bool:
    """True for exceptions, panics and `sys.exit`; False for exceptions that should end a task or
    the process."""
    return isinstance(exc, Exception | SystemExit) or type(exc).__name__ == "PanicException"


def survived(exc: BaseException) -> Exception:
    """`exc` as an `Exception`. Raises `exc` itself if it should end a task or the process."""
    if isinstance(exc, Exception):
        return exc
    if not is_survivable(exc):
        raise exc
    found = Survived(f"{type(exc).__name__}: {exc}")
    found.__cause__ = exc
    return found
