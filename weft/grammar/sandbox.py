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

from weft.config.process import Child, ChildEnded
from weft.grammar.protocol import InvalidGrammar, Key

START_S = 60.0  # for the interpreter and the vocabulary to load
SLOW_S = 30.0  # wall time beyond the processor time, for a busy machine; then it counts as hung


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
        self._vocabulary = [backend, str(tokenizer), vocab_size, list(eos_token_ids)]
        self._timeout_s = timeout_s
        self._child: Child | None = None

    def run(self, key: Key) -> None:
        if self._child is None:
            self._start()
        answer = self._ask([self._timeout_s, *key], self._timeout_s + SLOW_S)
        if answer:
            raise InvalidGrammar(answer)

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _start(self) -> None:
        self._child = Child("weft.grammar.sandbox_process")
        answer = self._ask(self._vocabulary, START_S)
        if answer:
            self.close()
            raise InvalidGrammar(answer)

    def _ask(self, question: list[object], timeout_s: float) -> str:
        assert self._child is not None
        too_long = f"the grammar takes longer than {self._timeout_s:g} s to compile"
        try:
            answer = self._child.ask(json.dumps(question).encode(), timeout_s)
        except TimeoutError:
            self.close()
            raise SandboxFailed(too_long) from None
        except ChildEnded as exc:
            self.close()
            if exc.out_of_time:
                raise SandboxFailed(too_long) from None
            raise SandboxFailed("the grammar takes too much memory to compile") from None
        return str(json.loads(answer))
