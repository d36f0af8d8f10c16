"""Sampling parameters: how the tokens of one request are chosen, and when the request ends.

Users create them (`weft.SamplingParams`), HTTP requests are translated to them, and the engine gets
them unchanged. They check their own ranges, and know nothing of models except the size of the
vocabulary. Journals store the fields under their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from weft.config.numbers import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_CHOICE_LEN,
    MAX_CHOICES,
    MAX_CHOICES_LEN,
    MAX_GRAMMAR_LEN,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PROCESSOR_PARAMS,
    MAX_PROCESSORS,
    MAX_STOP_LEN,
    MAX_STOP_REGEX,
    MAX_STOP_REGEX_LEN,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBERS,
    TOKEN,
    Number,
    shown,
)
from weft.json_types import JsonObject


class InvalidParam(ValueError):
    """A value of the user is out of range. `param` is the field's name in the user's interface."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


HiddenStatesOf = Literal["last", "all"]
GrammarKind = Literal["json_schema", "regex", "choice", "ebnf", "structural_tag"]


class ThinkingMarks(msgspec.Struct, frozen=True, array_like=True):
    """The marks of a model's reasoning, as token ids, and whether the prompt opens it."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint on the output.

    `text` is a JSON schema (kind json_schema), a regular expression, a JSON list of strings
    (choice), a grammar in the notation of Lark or GBNF (ebnf), or a structural tag as JSON.
    """

    kind: GrammarKind
    text: str
    strict: bool = False  # refuse parts that cannot be enforced; False: give a warning
    # The constraint applies from the end of the reasoning on; None: from the first token on.
    behind: ThinkingMarks | None = None

    @property
    def name(self) -> str:
        """A short name, such as "json_schema 5f2b9a07c1d3e864". Requests with the same name share
        one compiled grammar."""
        packed = f"{self.kind}\0{self.strict}\0{self.text}".encode("utf-8", "surrogatepass")
        return f"{self.kind} {hashlib.blake2b(packed, digest_size=8).hexdigest()}"

    def check(self) -> None:
        """Raise `InvalidParam` for errors that can be found without compiling the grammar."""
        if not 0 < len(self.text) <= MAX_GRAMMAR_LEN:
            message = (
                f"the grammar has {len(self.text):,} characters; "
                f"1 to {MAX_GRAMMAR_LEN:,} are allowed"
            )
            raise InvalidParam(self.kind, message)
        if self.behind is not None and not self.behind.end:
            message = "reasoning before a grammar must have an end; no token is given"
            raise InvalidParam("thinking_marks", message)
        if self.kind == "choice":
            self._check_choices()

    def _check_choices(self) -> None:
        try:
            choices = msgspec.json.decode(self.text, type=list[str])
        except msgspec.DecodeError as exc:
            message = f"choice is {shown(self.text)}; a JSON list of texts is needed"
            raise InvalidParam("choice", message) from exc
        if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
            message = (
                f"{len(choices):,} choices; 1 to {MAX_CHOICES:,} are allowed, and none may be empty"
            )
            raise InvalidParam("choice", message)
        longest = max(map(len, choices))
        if longest > MAX_CHOICE_LEN:
            message = f"a choice has {longest:,} characters; {MAX_CHOICE_LEN:,} are allowed"
            raise InvalidParam("choice", message)
        total = sum(map(len, choices))
        if total > MAX_CHOICES_LEN:
            message = f"the choices have {total:,} characters; {MAX_CHOICES_LEN:,} are allowed"
            raise InvalidParam("choice", message)


class Processor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A logit processor that the engine was started with, by its name.

    The parameters are plain JSON values.
    """

    name: str
    params: JsonObject = {}

    @property
    def num_bytes(self) -> int:
        return len(msgspec.msgpack.encode(self.params))

    def check(self) -> None:
        """Raise `InvalidParam` for parameters that are too large, or cannot be sent."""
        try:
            size = self.num_bytes
        except (TypeError, OverflowError, RecursionError, UnicodeError) as exc:
            message = f"the parameters of {self.name!r} are not plain JSON values: {exc}"
            raise InvalidParam("custom_params", message) from exc
        if size > MAX_PROCESSOR_PARAMS:
            message = (
                f"the parameters of {self.name!r} have {size:,} bytes; "
                f"{MAX_PROCESSOR_PARAMS:,} are allowed"
            )
            raise InvalidParam("custom_params", message)


MAX_ALIGNMENT_HEADS = 640  # of the largest models in use: 32 layers of 20 heads


class SpeechRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model that writes down speech may sample, as Whisper was trained, and the weights of
    its attention to the sound.

    Ids from `first_timestamp` on are times, in order. Times come in pairs, the end of a segment and
    the beginning of the next, except before the end of the output; they do not fall; and if all
    times together are likelier than every other token, a time is sampled.
    """

    suppress: tuple[int, ...] = ()  # tokens that are never sampled
    begin_suppress: tuple[int, ...] = ()  # tokens that are not sampled first
    first_timestamp: int = 0  # 0: there are no times
    forbids_times: bool = False  # no time is sampled, and the rules about times do not apply
    end: int = 0  # the token that ends the output: all ids below it are text
    max_initial: int = -1  # greatest time that may be sampled first, as an index; -1: any
    # Heads (layer, head) whose weights of the tokens of the prompt from `align_from` on are
    # returned.
    alignment_heads: tuple[tuple[int, int], ...] = ()
    align_from: int = 0

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidParam` for the first value out of range."""
        if len(self.suppress) + len(self.begin_suppress) > MAX_LOGIT_BIAS:
            raise InvalidParam("speech", f"at most {MAX_LOGIT_BIAS:,} tokens can be suppressed")
        named = (*self.suppress, *self.begin_suppress, self.first_timestamp, self.end)
        check_token_ids("speech", named, vocab_size)
        if len(self.alignment_heads) > MAX_ALIGNMENT_HEADS:
            raise InvalidParam(
                "speech", f"at most {MAX_ALIGNMENT_HEADS} alignment heads are allowed"
            )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request.

    The defaults are those of the OpenAI API, except `max_new_tokens`.
    """

    # Length. None: as many tokens as the context allows; 0: only the prompt is computed.
    max_new_tokens: int | None = None
    min_new_tokens: int = 0  # end-of-sequence and stop tokens cannot be sampled before

    # Choice of a token.
    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = -1  # -1 and 0: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}  # token id -> added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # no other token is sampled; empty: all are allowed
    bad_words: tuple[str, ...] = ()  # forbidden texts, with or without a space before them
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # forbidden tokens; the client adds `bad_words`
    seed: int | None = None  # the same seed draws the same numbers, in any batch
    n: int = 1  # completions of the same prompt
    grammar: Grammar | None = None  # a constraint on the output
    processors: tuple[Processor, ...] = ()  # they change the logits, in this order

    # End.
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()  # a match of one of these patterns ends the completion
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the matched stop string or stop token in the text
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    # Reasoning.
    thinking_budget: int | None = None  # most tokens of reasoning; then its end is inserted
    thinking_marks: ThinkingMarks | None = None  # the marks of the model's reasoning format

    # Outputs besides tokens. k: log probabilities of the sampled token and of the k likeliest.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # k, for the tokens of the prompt
    prompt_logprobs_start: int = 0  # first position of these; the very first token has none
    logprob_token_ids: tuple[int, ...] = ()  # at every position, also of these tokens
    # "all" computed tokens, or the "last" one. Only with --enable-return-hidden-states.
    hidden_states: HiddenStatesOf | None = None
    speech: SpeechRules | None = None  # of models that write down speech

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidParam` for the first value out of range.

        The error names the value and what is allowed.
        """
        for name, shown_as, number, default in _NUMBERS:
            value = getattr(self, name)
            if value is default:
                continue  # most requests do not set most numbers
            wrong = number.wrong(shown_as, value)
            if wrong:
                raise InvalidParam(shown_as, wrong)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            message = (
                f"min_tokens is {self.min_new_tokens}, above max_tokens ({self.max_new_tokens})"
            )
            raise InvalidParam("min_tokens", message)
        # Plain requests set none of these fields, and skip their checks.
        if self.logprob_token_ids:
            self._check_logprobs(vocab_size)
        if self.grammar is not None:
            self.grammar.check()
            if self.grammar.behind is not None:
                _check_marks(self.grammar.behind, vocab_size)
        if self.stop or self.stop_regex or self.stop_token_ids:
            self._check_stops()
        if self.logit_bias:
            self._check_logit_bias(vocab_size)
        if self.allowed_token_ids or self.bad_words or self.bad_word_ids:
            self._check_words(vocab_size)
        if self.thinking_marks is not None:
            if not (self.thinking_marks.begin and self.thinking_marks.end):
                raise InvalidParam("thinking_marks", "a mark of the reasoning has no tokens")
            _check_marks(self.thinking_marks, vocab_size)
        if self.processors:
            self._check_processors()
        if self.speech is not None:
            self.speech.check(vocab_size)

    @property
    def recompute_from(self) -> int | None:
        """The position from which on the prompt must be computed, even if it is cached.

        None: all cached tokens can be used.
        """
        if self.hidden_states == "all":
            return 0
        if self.speech is not None and self.speech.alignment_heads:
            return self.speech.align_from
        if self.prompt_logprobs is None:
            return None
        return self.prompt_logprobs_start

    def _check_stops(self) -> None:
        """Check the strings, patterns and tokens that end a completion."""
        if len(self.stop) > MAX_STOP_STRINGS:
            message = f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS} are allowed"
            raise InvalidParam("stop", message)
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_LEN:
                message = (
                    f"a stop string has {len(text)} characters; 1 to {MAX_STOP_LEN:,} are allowed"
                )
                raise InvalidParam("stop", message)
        if len(self.stop_regex) > MAX_STOP_REGEX:
            message = f"{len(self.stop_regex)} patterns; at most {MAX_STOP_REGEX} are allowed"
            raise InvalidParam("stop_regex", message)
        for text in self.stop_regex:
            if not 0 < len(text) <= MAX_STOP_REGEX_LEN:
                message = (
                    f"a pattern has {len(text)} characters; 1 to {MAX_STOP_REGEX_LEN:,} are allowed"
                )
                raise InvalidParam("stop_regex", message)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            message = (
                f"{len(self.stop_token_ids):,} ids; at most {MAX_STOP_TOKEN_IDS:,} are allowed"
            )
            raise InvalidParam("stop_token_ids", message)
        for token in self.stop_token_ids:
            check_number("stop_token_ids", "stop_token_ids", token)

    def _check_logit_bias(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            message = f"{len(self.logit_bias):,} entries; at most {MAX_LOGIT_BIAS:,} are allowed"
            raise InvalidParam("logit_bias", message)
        check_token_ids("logit_bias", tuple(self.logit_bias), vocab_size)
        for token, bias in self.logit_bias.items():
            check_number("logit_bias", f"logit_bias[{token}]", bias)

    def _check_words(self, vocab_size: int) -> None:
        """Check the tokens that may be sampled, and the words that may not be generated."""
        allowed = self.allowed_token_ids
        if len(allowed) > MAX_ALLOWED_TOKEN_IDS:
            message = f"{len(allowed):,} ids; at most {MAX_ALLOWED_TOKEN_IDS:,} are allowed"
            raise InvalidParam("allowed_token_ids", message)
        if allowed:
            # If the least and the greatest id are tokens, all ids between them are.
            check_token_ids("allowed_token_ids", (min(allowed), max(allowed)), vocab_size)
        if len(self.bad_words) > MAX_BAD_WORDS:
            message = f"{len(self.bad_words):,} words; at most {MAX_BAD_WORDS:,} are allowed"
            raise InvalidParam("bad_words", message)
        for word in self.bad_words:
            if not 0 < len(word) <= MAX_STOP_LEN or not word.strip(" "):
                message = f"{word[:32]!r} is not a word of 1 to {MAX_STOP_LEN:,} characters"
                raise InvalidParam("bad_words", message)
        for ids in self.bad_word_ids:
            if not ids:
                raise InvalidParam("bad_word_ids", "a word has no tokens")
            check_token_ids("bad_word_ids", ids, vocab_size)

    def _check_processors(self) -> None:
        if len(self.processors) > MAX_PROCESSORS:
            message = (
                f"{len(self.processors)} logit processors; at most {MAX_PROCESSORS} are allowed"
            )
            raise InvalidParam("custom_logit_processor", message)
        for processor in self.processors:
            processor.check()

    def _check_logprobs(self, vocab_size: int) -> None:
        ids = self.logprob_token_ids
        if self.logprobs is None and self.prompt_logprobs is None:
            message = "logprob_token_ids needs logprobs or prompt_logprobs"
            raise InvalidParam("logprob_token_ids", message)
        if len(ids) > MAX_LOGPROB_TOKEN_IDS:
            message = f"{len(ids):,} ids; at most {MAX_LOGPROB_TOKEN_IDS:,} are allowed"
            raise InvalidParam("logprob_token_ids", message)
        check_token_ids("logprob_token_ids", ids, vocab_size)


# Fields of `SamplingParams` that are one number each, and their names in the user's interface.
NUMERIC = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "prompt_logprobs_start": "prompt_logprobs_start",
    "thinking_budget": "thinking_budget",
}

_DEFAULTS = SamplingParams()


class _NumericField(NamedTuple):
    """A field of `SamplingParams` that is one number."""

    name: str
    shown_as: str
    number: Number
    default: Any


def _numeric_fields() -> tuple[_NumericField, ...]:
    fields: list[_NumericField] = []
    for name, shown_as in NUMERIC.items():
        fields.append(_NumericField(name, shown_as, NUMBERS[name], getattr(_DEFAULTS, name)))
    return tuple(fields)


_NUMBERS = _numeric_fields()


def check_number(name: str, shown_as: str, value: Any) -> None:
    """Raise `InvalidParam` if the number of the field `name` is out of its range.

    `shown_as` is the name of the field in the message.
    """
    wrong = NUMBERS[name].wrong(shown_as, value)
    if wrong:
        raise InvalidParam(shown_as, wrong)


def check_token_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise `InvalidParam` for the first id of a field that is not in the vocabulary."""
    number = TOKEN.within(vocab_size)
    for token in ids:
        wrong = number.wrong(param, token)
        if wrong:
            raise InvalidParam(param, wrong)


def _check_marks(marks: ThinkingMarks, vocab_size: int) -> None:
    check_token_ids("thinking_marks", marks.begin + marks.end, vocab_size)
