"""The process of `sandbox.py`: reads a vocabulary, then grammars, each as a line of JSON.

It answers each with a line: empty if it compiles, else the reason. The process ends when its
standard input closes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from weft.config.process import limit_memory, limit_work, serve
from weft.grammar.backends import make_compiler
from weft.grammar.protocol import Compiler, InvalidGrammar, Key

MAX_MEMORY = 1 << 30  # bytes of address space, in addition to those used after the start


def main() -> None:
    serve(SandboxWorker())


class SandboxWorker:
    """Answers the vocabulary, and then each grammar."""

    def __init__(self) -> None:
        self._compiler: Compiler | None = None

    def __call__(self, line: bytes) -> bytes:
        return json.dumps(self._answer(json.loads(line))).encode()

    def _answer(self, question: list[Any]) -> str:
        """The error message; empty if the grammar compiles."""
        try:
            if self._compiler is None:
                self._begin(*question)
            else:
                timeout_s, *key = question
                limit_work(timeout_s)
                self._compiler.compile(Key(*key))
        except InvalidGrammar as exc:
            return str(exc) or "it is no grammar"
        except ImportError as exc:
            return str(exc)
        except MemoryError:
            os._exit(1)
        except BaseException as exc:  # a panic of the library is not an Exception
            return f"the grammar library failed on it: {exc}"
        finally:
            limit_work(0.0)
        return ""

    def _begin(
        self,
        backend: str,
        tokenizer: str,
        vocab_size: int,
        eos_token_ids: list[int],
    ) -> None:
        self._compiler = make_compiler(backend, Path(tokenizer), vocab_size, eos_token_ids)
        limit_memory(MAX_MEMORY)


if __name__ == "__main__":
    main()
