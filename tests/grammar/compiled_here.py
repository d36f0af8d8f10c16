"""Grammars that are compiled at once, for engines whose tests are not about that: each process that
would try one first takes a fifth of a second of a processor to start.

`tests/grammar/test_sandbox.py` has these processes, and `tests/e2e/test_grammar.py` a server with
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from weft.assemble import build
from weft.grammar.sandbox import NoSandbox


@contextmanager
def compiling_here() -> Iterator[None]:
    """Engines that are built in this block try no grammar in another process."""
    with mock.patch.object(build, "SandboxProcess", return_value=NoSandbox()):
        yield
