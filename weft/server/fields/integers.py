"""Integers that a client writes with a fraction of zero: `2.0` for `2`.

To JSON both are the same number, and languages that have only one kind of number write either.
"""

from __future__ import annotations

import re

_NUMBER_OR_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"|(-?[0-9]+)\.0+(?![0-9.eE])', re.DOTALL)


def with_integers(body: bytes) -> bytes:
    """The JSON text with `2.0` as `2`, outside of strings."""
    return _NUMBER_OR_STRING.sub(lambda match: match[1] or match[0], body)
