"""Grammars by llguidance: JSON schemas, regular expressions, Lark and GBNF grammars, structural tags.

The library's own limits bound what one step of a matcher may cost; what compiling may cost is bounded by the process
in which it is tried first (`sandbox.py`).
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

WHITESPACE = r" |\n( {0,16}|\t{0,8})"  # between the tokens of JSON: bounded, or a weak model goes on with it for ever
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FEW = 64  # masks times threads: what is worth the others' help
MAX_LEXER_STATES = 50_000  # of 1 to 2 kB: the memory of one grammar
MAX_STEP_ITEMS = 25_000  # a step of one matcher takes 40 ms at most, about
MAX_STEP_FUEL = 100_000
MAX_MESSAGE_LEN = 500
BASE_BYTES = 60_000  # of a small compiled grammar, measured; a larger one has about so many bytes per character:
BYTES_PER_CHARACTER = 64
_LIMIT = re.compile("too many|limit|fuel", re.IGNORECASE)  # in the words of the library


class LlgMatcher:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def error(self) -> str:
        return _told(self.inner.get_error()) if self.inner.is_error() else ""

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
    """For the tokenizer in a file tokenizer.json. Loading it takes 5 µs a token. Raises InvalidGrammar if it cannot
    be used, ImportError without llguidance."""

    def __init__(
        self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int = 1
    ) -> None:
        import llguidance

        self._library = llguidance
        try:
            self._tokenizer = llguidance.LLTokenizer(
                str(tokenizer), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # a panic of the library is no Exception
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
            return self._compiled(key)
        except (InvalidGrammar, MemoryError):
            raise
        except (Exception, RecursionError) as exc:
            raise InvalidGrammar(_plain(str(exc))) from exc

    def fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
        """A few at once in the caller's thread: to wake others takes longer, and they may be busy with the model."""
        pairs = [
            (matcher.inner, row)
            for row, matcher in enumerate(matchers)
            if isinstance(matcher, LlgMatcher)
        ]
        start, size = masks.ctypes.data, 4 * masks.shape[1]
        if self._num_threads > 1 and len(pairs) * self._num_threads > FEW:
            self._executor.unsafe_compute_mask_ptr(pairs, start, size, len(masks))
            return
        for matcher, row in pairs:
            matcher.unsafe_compute_mask_ptr(start + row * size, size)

    def _compiled(self, key: Key) -> Compiled:
        matcher = self._matcher(self._grammar(key, lenient=False))
        if matcher.error and key.kind in ("json_schema", "structural_tag"):
            lenient = self._matcher(self._grammar(key, lenient=True))
            left_out = lenient.inner.get_grammar_warnings()
            if key.strict and left_out:
                raise InvalidGrammar(
                    f"strict is set, and this cannot be enforced: {'; '.join(left_out)}"
                )
            matcher = matcher if key.strict else lenient
        if matcher.error:
            raise InvalidGrammar(matcher.error)
        mask = np.zeros((1, self._num_words), dtype=np.int32)
        self.fill([matcher], mask)
        if matcher.error or not mask.any():
            raise InvalidGrammar(matcher.error or "nothing matches it")
        warnings = tuple(_plain(warning) for warning in matcher.inner.get_grammar_warnings())
        return Compiled(
            matcher, mask[0], BASE_BYTES + BYTES_PER_CHARACTER * len(key.text), warnings
        )

    def _matcher(self, grammar: str) -> LlgMatcher:
        return LlgMatcher(
            self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        )

    def _grammar(self, key: Key, *, lenient: bool) -> str:
        """In the library's own language."""
        make = self._library.LLMatcher
        match key.kind:
            case "json_schema":
                value = json.loads(key.text)
                space = COMPACT if is_compact(value) else {"whitespace_pattern": WHITESPACE}
                options = {"lenient": lenient, **space}
                schema = "{}" if value is True else json.dumps(closed(value))
                return str(make.grammar_from_json_schema(schema, overrides=options))  # type: ignore[arg-type]
            case "regex":
                return str(make.grammar_from_regex(key.text))
            case "choice":
                return str(make.grammar_from_regex("|".join(map(re.escape, json.loads(key.text)))))
            case "ebnf":
                return str(make.grammar_from_lark(_lark(key.text)))
            case "structural_tag":
                return self._tags(json.loads(key.text), lenient)
        raise InvalidGrammar(f"there is no kind of grammar {key.kind!r}")

    def _tags(self, tag: dict[str, Any], lenient: bool) -> str:
        options = {"lenient": lenient, "whitespace_pattern": WHITESPACE}
        lark = LarkWriter(
            schema=lambda schema: {
                **(closed(schema) if isinstance(schema, dict) else {}),
                "x-guidance": options,
            },
            regex=self._library.regex_to_lark,
            special=self._special,
        )
        return str(self._library.LLMatcher.grammar_from_lark(lark.grammar(as_format(tag))))

    def _special(self, text: str) -> int | None:
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        return (
            tokens[0] if len(tokens) == 1 and self._tokenizer.is_special_token(tokens[0]) else None
        )


def _lark(text: str) -> str:
    """GBNF as Lark; what is Lark already stays as it is."""
    from llguidance import gbnf_to_lark

    return gbnf_to_lark.any_to_lark(text)


def _told(error: str) -> str:
    """An error of a matcher. Where a limit was reached, with what the limits are."""
    plain = _plain(error)
    if not _LIMIT.search(plain):
        return plain
    return f"{plain}. It is too hard: {MAX_LEXER_STATES:,} states, and {MAX_STEP_ITEMS:,} items a step, are allowed"


def _plain(message: str) -> str:
    """An error of the library without its traces."""
    message = re.split(r"<(?:backtrace|state|grammar|non-verbose)", message)[0]
    return " ".join(message.split())[:MAX_MESSAGE_LEN]
