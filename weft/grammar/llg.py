"""Grammars with llguidance: JSON schemas, regular expressions, Lark, GBNF, structural tags.

The library's own limits bound the cost of one step of a matcher; the process that compiles each
grammar first (`sandbox.py`) bounds the cost of compiling.
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
from weft.grammar.protocol import Compiled, GrammarMatcher, InvalidGrammar, Key
from weft.grammar.tags import LarkWriter, as_format
from weft.json_types import JsonObject

# White space between the tokens of JSON: bounded, because a weak model would never end it.
WHITESPACE = r" |\n( {0,16}|\t{0,8})"
COMPACT: JsonObject = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
FEW = 64  # masks times threads; above it, several threads fill the masks
MAX_LEXER_STATES = 50_000  # of 1 to 2 kB each: this bounds the memory of one grammar
MAX_STEP_ITEMS = 25_000  # a step of one matcher takes about 40 ms at most
MAX_STEP_FUEL = 100_000
MAX_MESSAGE_LEN = 500
BASE_BYTES = 60_000  # of a small compiled grammar, measured
BYTES_PER_CHARACTER = 64  # of a larger grammar, approximately
_LIMIT = re.compile("too many|limit|fuel", re.IGNORECASE)  # words of the library's messages


class LlgMatcher:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def error(self) -> str:
        if not self.inner.is_error():
            return ""
        return _with_limits(self.inner.get_error())

    @property
    def is_complete(self) -> bool:
        return bool(self.inner.is_stopped())

    def fork(self) -> LlgMatcher:
        return LlgMatcher(self.inner.deep_copy())

    def consume(self, token: int) -> bool:
        return bool(self.inner.consume_token(token)) and not self.inner.is_stopped()

    def forced(self) -> list[int]:
        tokens: list[int] = self.inner.compute_ff_tokens()
        return tokens


class LlgCompiler:
    """The compiler for the tokenizer in a file tokenizer.json. Loading takes 5 µs per token.

    Raises InvalidGrammar if it cannot be used, ImportError without llguidance.
    """

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_threads: int = 1,
    ) -> None:
        import llguidance

        self._library = llguidance
        try:
            self._tokenizer = llguidance.LLTokenizer(
                str(tokenizer),
                n_vocab=vocab_size,
                eos_token=list(eos_token_ids) or None,
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # a panic of the library is not an Exception
            raise InvalidGrammar(
                f"this model's tokenizer cannot be used with grammars: {_plain(str(exc))}"
            ) from exc
        self._num_threads = num_threads
        self._executor = llguidance.LLExecutor(num_threads)
        self._num_words = -(-vocab_size // 32)
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            step_max_items=MAX_STEP_ITEMS,
            step_lexer_fuel=MAX_STEP_FUEL,
            verbose_errors=False,
        )

    def compile(self, key: Key) -> Compiled:
        try:
            return self._compile(key)
        except (InvalidGrammar, MemoryError):
            raise
        except (Exception, RecursionError) as exc:
            raise InvalidGrammar(_plain(str(exc))) from exc

    def fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
        # The caller's thread fills a few masks by itself: to wake other threads takes longer, and
        # they may be busy with the model.
        inner: list[tuple[Any, int]] = []
        for row, matcher in enumerate(matchers):
            assert isinstance(matcher, LlgMatcher)
            inner.append((matcher.inner, row))
        start = masks.ctypes.data
        row_bytes = 4 * masks.shape[1]
        if self._num_threads > 1 and len(inner) * self._num_threads > FEW:
            self._executor.unsafe_compute_mask_ptr(inner, start, row_bytes, len(masks))
            return
        for one, row in inner:
            one.unsafe_compute_mask_ptr(start + row * row_bytes, row_bytes)

    def _compile(self, key: Key) -> Compiled:
        # Strict first, because only then the library reports what it cannot enforce.
        matcher = self._matcher(self._grammar(key, lenient=False))
        if matcher.error and key.kind in ("json_schema", "structural_tag"):
            matcher = self._lenient(key, matcher)
        if matcher.error:
            raise InvalidGrammar(matcher.error)
        mask = np.zeros((1, self._num_words), dtype=np.int32)
        self.fill([matcher], mask)
        if matcher.error or not mask.any():
            raise InvalidGrammar(matcher.error or "nothing matches it")
        num_bytes = BASE_BYTES + BYTES_PER_CHARACTER * len(key.text)
        warnings = tuple(map(_plain, matcher.inner.get_grammar_warnings()))
        return Compiled(matcher, mask[0], num_bytes, warnings)

    def _lenient(self, key: Key, strict: LlgMatcher) -> LlgMatcher:
        """A matcher that leaves out what cannot be enforced, unless the request is strict."""
        lenient = self._matcher(self._grammar(key, lenient=True))
        if not key.strict:
            return lenient
        left_out = lenient.inner.get_grammar_warnings()
        if left_out:
            raise InvalidGrammar(
                f"strict is set, and this cannot be enforced: {'; '.join(left_out)}"
            )
        return strict

    def _matcher(self, grammar: str) -> LlgMatcher:
        make = self._library.LLMatcher
        return LlgMatcher(make(self._tokenizer, grammar, log_level=0, limits=self._limits))

    def _grammar(self, key: Key, *, lenient: bool) -> str:
        """The grammar in the library's own language."""
        make = self._library.LLMatcher
        match key.kind:
            case "json_schema":
                return self._schema(json.loads(key.text), lenient=lenient)
            case "regex":
                return str(make.grammar_from_regex(key.text))
            case "choice":
                escaped = map(re.escape, json.loads(key.text))
                return str(make.grammar_from_regex("|".join(escaped)))
            case "ebnf":
                return str(make.grammar_from_lark(_to_lark(key.text)))
            case "structural_tag":
                return self._tags(json.loads(key.text), lenient)
        raise InvalidGrammar(f"there is no kind of grammar {key.kind!r}")

    def _schema(self, schema: Any, *, lenient: bool) -> str:
        options: Any = {"lenient": lenient, **_space(schema)}
        text = "{}" if schema is True else json.dumps(closed(schema))
        make = self._library.LLMatcher
        return str(make.grammar_from_json_schema(text, overrides=options))

    def _tags(self, tag: JsonObject, lenient: bool) -> str:
        def with_options(schema: Any) -> JsonObject:
            kept = closed(schema) if isinstance(schema, dict) else {}
            return {**kept, "x-guidance": {"lenient": lenient, **_space(schema)}}

        writer = LarkWriter(
            schema=with_options,
            regex=self._library.regex_to_lark,
            special=self._special,
        )
        return str(self._library.LLMatcher.grammar_from_lark(writer.grammar(as_format(tag))))

    def _special(self, text: str) -> int | None:
        """The id of a text that is one special token, else None."""
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        if len(tokens) != 1 or not self._tokenizer.is_special_token(tokens[0]):
            return None
        token: int = tokens[0]
        return token


def _space(schema: Any) -> JsonObject:
    """The options for the white space that a schema allows."""
    return COMPACT if is_compact(schema) else {"whitespace_pattern": WHITESPACE}


def _to_lark(text: str) -> str:
    """Convert GBNF to Lark; Lark stays unchanged."""
    from llguidance import gbnf_to_lark

    return gbnf_to_lark.any_to_lark(text)


def _with_limits(error: str) -> str:
    """An error of a matcher. If a limit was reached, the limits are added."""
    plain = _plain(error)
    if not _LIMIT.search(plain):
        return plain
    return (
        f"{plain}. It is too hard: {MAX_LEXER_STATES:,} states, "
        f"and {MAX_STEP_ITEMS:,} items a step, are allowed"
    )


def _plain(message: str) -> str:
    """An error message of the library without its traces."""
    message = re.split(r"<(?:backtrace|state|grammar|non-verbose)", message)[0]
    return " ".join(message.split())[:MAX_MESSAGE_LEN]
