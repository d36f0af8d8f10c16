"""Grammars with llguidance: JSON schemas, regular expressions, Lark, GBNF, structural tags.

The library's own limits bound the cost of one step of a matcher; the process that compiles each
grammar first (`sandbox.py`) bounds the cost of compiling.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.grammar.closed import circular_reference, closed, is_compact
from weft.grammar.ecma import from_ecma
from weft.grammar.enforceable import (
    COMPACT_SPACE,
    Enforceable,
    Space,
    exact_patterns,
    flexible_space,
)
from weft.grammar.masks import Words
from weft.grammar.parts import wrong_part
from weft.grammar.protocol import Compiled, GrammarMatcher, InvalidGrammar, Key
from weft.grammar.tags import LarkWriter, Pieces, as_format
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
_DIALECTS = (
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_GBNF_SYNTAX = '\\"[]^-'  # in a text or a class
_MAX_SHOWN = 80  # characters of a reference that a message shows
_NOTHING = "NoExtensionBias"  # the library's word for a grammar that no text follows
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
        except MemoryError:
            raise
        except (Exception, RecursionError) as exc:
            message = wrong_part(key, self._error_of)
            if message:
                raise InvalidGrammar(message) from exc
            if isinstance(exc, InvalidGrammar):
                raise
            raise InvalidGrammar(_plain(str(exc))) from exc

    def _error_of(self, key: Key) -> str:
        try:
            self._compile(key)
        except MemoryError:
            raise
        except Exception as exc:
            return str(exc) if isinstance(exc, InvalidGrammar) else _plain(str(exc))
        return ""

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
        kept = Enforceable(from_ecma)
        matcher = self._matcher(self._grammar(key, kept, lenient=False))
        if matcher.error and key.kind in ("json_schema", "structural_tag"):
            # Only now each pattern is compiled alone, to find those that the library refuses.
            kept = Enforceable(self._pattern)
            matcher = self._lenient(key, kept, matcher)
        left_out = list(dict.fromkeys(kept.left_out))
        if key.strict and left_out:
            raise InvalidGrammar(_refusal(left_out))
        if matcher.error:
            raise InvalidGrammar(matcher.error)
        mask = np.zeros((1, self._num_words), dtype=np.int32)
        self.fill([matcher], mask)
        if matcher.error or not mask.any():
            raise InvalidGrammar(_circular(key) or matcher.error or "nothing matches it")
        num_bytes = BASE_BYTES + BYTES_PER_CHARACTER * len(key.text)
        left_out += matcher.inner.get_grammar_warnings()
        warnings = tuple(map(_plain, left_out))
        return Compiled(matcher, mask[0], num_bytes, warnings)

    def _lenient(self, key: Key, kept: Enforceable, strict: LlgMatcher) -> LlgMatcher:
        """A matcher that leaves out what cannot be enforced, unless the request is strict."""
        lenient = self._matcher(self._grammar(key, kept, lenient=True))
        if not key.strict:
            return lenient
        left_out = [*kept.left_out, *lenient.inner.get_grammar_warnings()]
        if left_out:
            raise InvalidGrammar(_refusal(left_out))
        return strict

    def _pattern(self, pattern: str) -> str:
        """A pattern that the library takes. Raises InvalidGrammar."""
        translated = from_ecma(pattern)
        make = self._library.LLMatcher
        schema = json.dumps({"type": "string", "pattern": translated})
        error = self._matcher(str(make.grammar_from_json_schema(schema))).error
        if error:
            raise InvalidGrammar(error)
        return translated

    def _matcher(self, grammar: str) -> LlgMatcher:
        make = self._library.LLMatcher
        return LlgMatcher(make(self._tokenizer, grammar, log_level=0, limits=self._limits))

    def _grammar(self, key: Key, kept: Enforceable, *, lenient: bool) -> str:
        """The grammar in the library's own language."""
        make = self._library.LLMatcher
        match key.kind:
            case "json_schema":
                return self._schema(json.loads(key.text), kept, lenient=lenient)
            case "regex":
                return str(make.grammar_from_regex(from_ecma(key.text)))
            case "choice":
                escaped = map(re.escape, json.loads(key.text))
                return str(make.grammar_from_regex("|".join(escaped)))
            case "ebnf":
                return str(make.grammar_from_lark(_to_lark(key.text)))
            case "structural_tag":
                return self._tags(json.loads(key.text), kept, lenient)
        raise InvalidGrammar(f"there is no kind of grammar {key.kind!r}")

    def _schema(self, schema: Any, kept: Enforceable, *, lenient: bool) -> str:
        options: Any = {"lenient": lenient, **_space(schema)}
        make = self._library.LLMatcher
        patterns = exact_patterns(schema, _space_in_patterns(schema))
        if patterns:
            return str(make.grammar_from_regex("|".join(patterns)))
        text = "{}" if schema is True else json.dumps(_without_dialect(kept.copy(closed(schema))))
        return str(make.grammar_from_json_schema(text, overrides=options))

    def _tags(self, tag: JsonObject, kept: Enforceable, lenient: bool) -> str:
        def rule(schema: Any) -> str:
            patterns = exact_patterns(schema, _space_in_patterns(schema))
            if patterns:
                return f"/{self._library.regex_to_lark('|'.join(patterns))}/"
            inner: JsonObject = {}
            if isinstance(schema, dict):
                inner = _without_dialect(kept.copy(closed(schema)))
            options = {"lenient": lenient, **_space(schema)}
            return f"%json {json.dumps({**inner, 'x-guidance': options})}"

        writer = LarkWriter(
            schema=rule,
            regex=lambda pattern: self._library.regex_to_lark(from_ecma(pattern)),
            split=self._split,
        )
        return str(self._library.LLMatcher.grammar_from_lark(writer.grammar(as_format(tag))))

    def _split(self, text: str) -> Pieces:
        """The special tokens in a text, and the texts between them."""
        tokenizer = self._tokenizer
        pieces: Pieces = []
        run: list[int] = []  # of other tokens
        for token in tokenizer.tokenize_str(text, parse_special=True):
            if not tokenizer.is_special_token(token):
                run.append(token)
                continue
            if run:
                pieces.append(tokenizer.decode_str(run))
                run = []
            pieces.append(token)
        if not pieces:
            return [text]
        if run:
            pieces.append(tokenizer.decode_str(run))
        return pieces


def _without_dialect(schema: Any) -> Any:
    """A schema that names a dialect unknown to the library is read as one that names none."""
    if not isinstance(schema, dict) or schema.get("$schema") in _DIALECTS:
        return schema
    return {key: value for key, value in schema.items() if key != "$schema"}


def _space(schema: Any) -> JsonObject:
    """The options for the white space that a schema allows."""
    return COMPACT if is_compact(schema) else {"whitespace_pattern": WHITESPACE}


def _space_in_patterns(schema: Any) -> Space:
    return COMPACT_SPACE if is_compact(schema) else flexible_space(WHITESPACE)


def _to_lark(text: str) -> str:
    """Convert GBNF to Lark; Lark stays unchanged."""
    from llguidance import gbnf_to_lark

    if "::=" in text:
        text = _ESCAPE.sub(_unescaped, text)
    return gbnf_to_lark.any_to_lark(text)


def _unescaped(escape: re.Match[str]) -> str:
    """The character of an escape of GBNF, where it needs none; other escapes stay."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code > sys.maxunicode or 0xD800 <= code <= 0xDFFF:
        raise InvalidGrammar(f"{escape[0]} is not a character")
    character = chr(code)
    if character in _CONTROLS:
        return _CONTROLS[character]
    if character in _GBNF_SYNTAX:
        return "\\" + character
    if not character.isprintable():
        return escape[0]
    return character


def _circular(key: Key) -> str:
    """What is wrong with a schema that asks only for itself, of which the library says little."""
    reference = circular_reference(json.loads(key.text)) if key.kind == "json_schema" else ""
    if not reference:
        return ""
    return f"$ref {reference[:_MAX_SHOWN]!r} leads only back to itself: no value fits it"


def _refusal(left_out: Sequence[str]) -> str:
    return f"strict is set, and this cannot be enforced: {'; '.join(left_out)}"


def _with_limits(error: str) -> str:
    """An error of a matcher. If a limit was reached, the limits are added."""
    plain = _plain(error)
    if plain == _NOTHING:
        return "nothing matches it"
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
