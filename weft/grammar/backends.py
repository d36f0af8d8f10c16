"""The grammar libraries, by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from weft.grammar.protocol import Compiler

BACKENDS = {  # name, which is that of the library's module: class, and what is to be installed
    "llguidance": ("weft.grammar.llg:LlgCompiler", "llguidance"),
    "xgrammar": ("weft.grammar.xgr:XgrCompiler", "weft[xgrammar]"),
}


def missing(name: str) -> str:
    """What is to be installed before this one can be used; "" if nothing is."""
    return "" if find_spec(name) is not None else BACKENDS[name][1]


def make_compiler(
    name: str, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int = 1
) -> Compiler:
    """A compiler for the tokenizer in a file tokenizer.json.

    Raises InvalidGrammar if its vocabulary cannot be used, ImportError (with advice) without the library.
    """
    module, _, cls = BACKENDS[name][0].partition(":")
    make = getattr(import_module(module), cls)
    try:
        return cast(Compiler, make(tokenizer, vocab_size, eos_token_ids, num_threads))
    except ImportError as exc:
        raise ImportError(
            f"structured output needs {name}: pip install {BACKENDS[name][1]}"
        ) from exc
