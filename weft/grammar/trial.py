"""Where a grammar is compiled first: a process of its own, which may be killed.

A grammar can be made so that compiling it takes minutes or gigabytes, or brings the library down. What has been
compiled here once, in bounded time and memory, may be compiled in the engine. The process is started at the first
grammar, and again after it had to be killed.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import IO, Protocol

from weft.config.process import module_command
from weft.grammar.protocol import InvalidGrammar, Key

START_S = 60.0  # for the interpreter and the vocabulary


class TrialFailed(Exception):
    """The grammar could not be tried to the end. Another time it may be. The message is for the user."""


class Trial(Protocol):
    def run(self, key: Key) -> None:
        """Raises InvalidGrammar, or TrialFailed."""
        ...

    def close(self) -> None: ...


class NoTrial:
    """For compilers that need none."""

    def run(self, key: Key) -> None:
        pass

    def close(self) -> None:
        pass


class TrialProcess:
    """`timeout_s` for one grammar. Used by one thread."""

    def __init__(
        self, backend: str, tokenizer: Path, vocab_size: int, eos_token_ids: tuple[int, ...], timeout_s: float
    ) -> None:
        self._vocabulary = [backend, str(tokenizer), vocab_size, list(eos_token_ids)]
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, key: Key) -> None:
        process = self._process or self._start()
        answer = self._ask(process, list(key), self._timeout_s)
        if answer:
            raise InvalidGrammar(answer)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        command = module_command("weft.grammar.trial_process")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the library tells there of its panics
            start_new_session=True,  # Ctrl-C is for the server
        )
        answer = self._ask(self._process, self._vocabulary, START_S)
        if answer:
            self.close()
            raise InvalidGrammar(answer)
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], question: list[object], timeout_s: float) -> str:
        """Send a line, return the line that answers it. A process that does not answer in time is killed."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = _line(process.stdout, time.monotonic() + timeout_s)
        except TimeoutError:
            self.close()
            raise TrialFailed(f"the grammar takes longer than {timeout_s:g} s to compile") from None
        except OSError:
            line = b""
        if not line:
            self.close()
            raise TrialFailed("the grammar takes too much memory to compile")
        return str(json.loads(line))


def _line(pipe: IO[bytes], until_s: float) -> bytes:
    """The next line; what was read of it if the pipe is closed before its end. Raises TimeoutError."""
    data, handle = b"", pipe.fileno()
    while not data.endswith(b"\n"):
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not select.select([handle], [], [], left_s)[0]:
            raise TimeoutError
        piece = os.read(handle, 1 << 16)
        if not piece:
            return b""
        data += piece
    return data
