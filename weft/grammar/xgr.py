"""Grammars with xgrammar: JSON schemas, regular expressions, GBNF and Lark grammars, structural
tags.

It accepts more schemas than llguidance, and takes longer to compile them. It leaves out what it
cannot enforce without a warning, and it reports no forced tokens: there are no jumps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.grammar.closed import closed, is_compact
from weft.grammar.masks import Words
from weft.grammar.parts import before_error, wrong_part
from weft.grammar.protocol import Compiled, GrammarMatcher, InvalidGrammar, Key
from weft.grammar.tags import as_format, with_schemas

# Consecutive white space between the tokens of JSON: without a bound, a weak model never ends it.
MAX_WHITESPACE = 16
MAX_MESSAGE_LEN = 500


class XgrMatcher:
    """`others` [W] is a tensor: the mask of all tokens that do not end the output."""

    def __init__(self, inner: Any, others: Any) -> None:
        self.inner = inner
        self.error = ""
        self._others = others

    @property
    def is_complete(self) -> bool:
        # The library terminates after an end token. Where an end token may come, it does not report
        # whether other tokens may.
        if self.inner.is_terminated():
            return True
        return bool(self.inner.is_completed() and not self._may_continue())

    def fork(self) -> XgrMatcher:
        return XgrMatcher(self.inner.fork(), self._others)

    def consume(self, token: int) -> bool:
        if not self.error and not self.inner.accept_token(token):
            self.error = f"token {token} is not allowed here"
        return not self.error and not self.is_complete

    def forced(self) -> list[int]:
        return []

    def _may_continue(self) -> bool:
        words = self._others.new_zeros(1, len(self._others))
        is_limited = self.inner.fill_next_token_bitmask(words, 0)
        return not is_limited or bool((words & self._others).any())


class XgrCompiler:
    """The compiler for the tokenizer in a file tokenizer.json.

    Raises InvalidGrammar if it cannot be used, ImportError without xgrammar.
    """

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_threads: int = 1,
    ) -> None:
        import tokenizers
        import torch
        import xgrammar

        backend = tokenizers.Tokenizer.from_file(str(tokenizer))
        pieces = [""] * vocab_size
        for piece, id in backend.get_vocab(with_added_tokens=True).items():
            if id < vocab_size:
                pieces[id] = piece
        is_byte_level = '"ByteLevel"' in backend.to_str()
        kind = xgrammar.VocabType.BYTE_FALLBACK
        if is_byte_level:
            kind = xgrammar.VocabType.BYTE_LEVEL
        self._library = xgrammar
        self._as_tensor = torch.from_numpy
        self._num_words = -(-vocab_size // 32)
        others = np.ones(32 * self._num_words, dtype=np.bool_)
        others[list(eos_token_ids)] = False
        self._others = torch.from_numpy(np.packbits(others, bitorder="little").view(np.int32))
        vocabulary = xgrammar.TokenizerInfo(
            pieces,
            kind,
            vocab_size=vocab_size,
            stop_token_ids=list(eos_token_ids) or None,
        )
        self._compiler = xgrammar.GrammarCompiler(
            vocabulary,
            max_threads=num_threads,
            cache_enabled=False,
        )

    def compile(self, key: Key) -> Compiled:
        try:
            grammar = self._grammar(key)
            matcher = XgrMatcher(self._library.GrammarMatcher(grammar), self._others)
        except (InvalidGrammar, MemoryError):
            raise
        except (Exception, RecursionError) as exc:
            raise InvalidGrammar(wrong_part(key, self._error_of) or _plain(str(exc))) from exc
        mask = np.zeros((1, self._num_words), dtype=np.int32)
        self.fill([matcher], mask)
        if not mask.any():
            raise InvalidGrammar("nothing matches it")
        return Compiled(matcher, mask[0], int(grammar.memory_size_bytes))

    def _error_of(self, key: Key) -> str:
        try:
            self._grammar(key)
        except MemoryError:
            raise
        except Exception as exc:
            return _plain(str(exc))
        return ""

    def fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
        tensor = self._as_tensor(masks)
        for row, matcher in enumerate(matchers):
            assert isinstance(matcher, XgrMatcher)
            if not matcher.error and not matcher.inner.fill_next_token_bitmask(tensor, row):
                masks[row] = -1  # everything is allowed

    def _grammar(self, key: Key) -> Any:
        compiler = self._compiler
        text = key.text
        match key.kind:
            case "json_schema":
                schema = json.loads(text)
                return compiler.compile_json_schema(
                    json.dumps(closed(schema)),
                    strict_mode=False,
                    any_whitespace=not is_compact(schema),
                    max_whitespace_cnt=MAX_WHITESPACE,
                )
            case "regex":
                return compiler.compile_regex(text)
            case "choice":
                return compiler.compile_regex("|".join(map(re.escape, json.loads(text))))
            case "ebnf":
                if "::=" in text:
                    return compiler.compile_grammar(text)
                return compiler.compile_lark(text)
            case "structural_tag":
                format = self._with_grammars(with_schemas(as_format(json.loads(text)), closed))
                return compiler.compile_structural_tag({"type": "structural_tag", "format": format})
        raise InvalidGrammar(f"there is no kind of grammar {key.kind!r}")

    def _with_grammars(self, format: Any) -> Any:
        """A format with the grammars inside it in the library's own language."""
        if isinstance(format, list):
            return [self._with_grammars(one) for one in format]
        if not isinstance(format, dict):
            return format
        if "syntax" not in format:
            return {
                key: value if key == "json_schema" else self._with_grammars(value)
                for key, value in format.items()
            }
        before = before_error(format.get("path"))
        if format.get("in_json"):
            raise InvalidGrammar(
                f"{before}xgrammar enforces no grammar of a text inside JSON, as this model "
                "writes its calls; --grammar-backend llguidance does"
            )
        if format["syntax"] == "regex":
            return {"type": "regex", "pattern": format["definition"]}
        try:
            return {
                "type": "grammar",
                "grammar": str(self._library.Grammar.from_lark(format["definition"])),
            }
        except RuntimeError as exc:
            raise InvalidGrammar(f"{before}{_plain(str(exc))}") from exc


def _plain(message: str) -> str:
    """An error message of the library without time and source line."""
    message = re.sub(r"^\[[0-9:]+\] \S+: ", "", message)
    return " ".join(message.split())[:MAX_MESSAGE_LEN]
