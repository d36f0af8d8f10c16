"""A separate process that compiles each grammar first, and that can be killed.

A grammar can be written such that its compilation takes minutes or gigabytes, or crashes the
library. A grammar that this process has compiled once, in bounded time and memory, may be compiled
in the engine. The process starts at the first grammar, and again after it was killed.
`sandbox_process.py` is the code of that process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from weft.config.helper import Helper, HelperFailed
from weft.grammar.protocol import InvalidGrammar, Key


class SandboxFailed(Exception):
    """The trial of the grammar was not completed, but may succeed another time.

    The message is for the user.
    """


class CompileSandbox(Protocol):
    def run(self, key: Key) -> None:
        """Compile the grammar and discard the result. Raises InvalidGrammar or SandboxFailed."""
        ...

    def close(self) -> None: ...


class NoSandbox:
    """For compilers that need no sandbox."""

    def run(self, key: Key) -> None:
        pass

    def close(self) -> None:
        pass


class SandboxProcess:
    """The sandbox of one thread."""

    def __init__(
        self,
        backend: str,
        tokenizer: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        """`timeout_s` limits the processor time for one grammar."""
        vocabulary = [backend, str(tokenizer), vocab_size, list(eos_token_ids)]
        self._timeout_s = timeout_s
        self._helper = Helper("weft.grammar.sandbox_process", _encoded(vocabulary), _check)

    def run(self, key: Key) -> None:
        try:
            self._helper.start()
            answer = self._helper.ask(_encoded([self._timeout_s, *key]), self._timeout_s)
        except HelperFailed as exc:
            if exc.out_of_time:
                too_long = f"the grammar takes longer than {self._timeout_s:g} s to compile"
                raise SandboxFailed(too_long) from None
            raise SandboxFailed("the grammar takes too much memory to compile") from None
        _check(answer)

    def close(self) -> None:
        self._helper.close()


def _encoded(question: list[object]) -> bytes:
    return json.dumps(question).encode()


def _check(answer: bytes) -> None:
    """Raise InvalidGrammar for an answer that is an error."""
    message = str(json.loads(answer))
    if message:
        raise InvalidGrammar(message)
