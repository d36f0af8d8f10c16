"""The grammar libraries, by name: the class of each compiler, and how to install the library."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from weft.grammar.protocol import Compiler

# Name of the library's module: (class of the compiler, what to install)
BACKENDS = {
    "llguidance": ("weft.grammar.llg:LlgCompiler", "llguidance"),
    "xgrammar": ("weft.grammar.xgr:XgrCompiler", "xgrammar"),
}


def missing(name: str) -> str:
    """The package to install before this library can be used; "" if none."""
    if find_spec(name) is not None:
        return ""
    _, package = BACKENDS[name]
    return package


def make_compiler(
    name: str,
    tokenizer: Path,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    num_threads: int = 1,
) -> Compiler:
    """A compiler for the tokenizer in a file tokenizer.json.

    Raises InvalidGrammar if its vocabulary cannot be used, ImportError (with advice) without the
    library.
    """
    path, package = BACKENDS[name]
    module, _, class_name = path.partition(":")
    make = getattr(import_module(module), class_name)
    try:
        return cast(Compiler, make(tokenizer, vocab_size, eos_token_ids, num_threads))
    except ImportError as exc:
        raise ImportError(f"structured output needs {name}: pip install {package}") from exc
