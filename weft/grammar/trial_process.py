"""The process of `trial.py`: reads a vocabulary, then grammars, each a line of JSON; answers each with a line, which is
empty if it compiles and says why not otherwise. It ends with its standard input."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from weft.grammar.backends import make_compiler
from weft.grammar.protocol import Compiler, InvalidGrammar, Key

MAX_MEMORY = 1 << 30  # bytes of address space, on top of what the start has taken
NICENESS = 5  # the engine goes first
PR_SET_PDEATHSIG = 1


def main() -> None:
    with suppress(OSError, AttributeError):  # on Linux it does not outlive the engine, whatever it is doing
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    compiler: Compiler | None = None
    for line in sys.stdin.buffer:
        question, answer = json.loads(line), ""
        try:
            if compiler is None:
                backend, tokenizer, vocab_size, eos_token_ids = question
                compiler = make_compiler(backend, Path(tokenizer), vocab_size, eos_token_ids)
                _limit()
            else:
                compiler.compile(Key(*question))
        except InvalidGrammar as exc:
            answer = str(exc) or "it is no grammar"
        except ImportError as exc:
            answer = str(exc)
        except MemoryError:
            os._exit(1)
        except BaseException as exc:  # a panic of the library is no Exception
            answer = f"the grammar library failed on it: {exc}"
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _limit() -> None:
    with suppress(OSError, AttributeError):
        os.nice(NICENESS)
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
