"""How the next token of one request is chosen, and when the request is finished.

A value that users build (`weft.SamplingParams`), that HTTP requests are translated to, and that travels to the
engine unchanged. It checks its own ranges and knows nothing of models beyond the vocabulary size it is given.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

MAX_N = 64
MAX_STOP_STRINGS = 64
MAX_STOP_LEN = 1_024
MAX_STOP_TOKEN_IDS = 1_024
MAX_LOGIT_BIAS = 4_096
MAX_LOGPROBS = 64
MAX_LOGPROB_TOKEN_IDS = 1_024
MAX_GRAMMAR_LEN = 4_000_000
MAX_CHOICES = 100_000
MAX_STOP_REGEX = 16
MAX_STOP_REGEX_LEN = 1_024
MAX_BAD_WORDS = 1_024
MAX_ALLOWED_TOKEN_IDS = 1_000_000
MAX_PROCESSORS = 8
MAX_PROCESSOR_PARAMS = 16_384  # bytes


class InvalidParam(ValueError):
    """A value that the user gave is out of range. `param` is the field's name as the user knows it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


HiddenStatesOf = Literal["last", "all"]
GrammarKind = Literal["json_schema", "regex", "choice", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an output may be. `text` is a JSON schema (kind json_schema), a regular expression, a JSON list of strings
    (choice), a grammar as Lark or GBNF (ebnf) write it, or a structural tag as JSON."""

    kind: GrammarKind
    text: str
    strict: bool = False  # refuse what cannot be enforced, instead of leaving it out with a warning
    behind: ThinkingMarks | None = None  # it holds from the end of the reasoning on; None: from the first token on

    def __str__(self) -> str:
        return f"{self.kind} of {len(self.text):,} characters"

    def check(self) -> None:
        """Raise `InvalidParam` for what needs no compiler to see."""
        if not 0 < len(self.text) <= MAX_GRAMMAR_LEN:
            raise InvalidParam(
                self.kind, f"the grammar has {len(self.text):,} characters; 1 to {MAX_GRAMMAR_LEN:,} are allowed"
            )
        if self.behind is not None and not self.behind.end:
            raise InvalidParam("thinking_marks", "reasoning before a grammar must have an end; no token is given")
        if self.kind != "choice":
            return
        try:
            choices = msgspec.json.decode(self.text, type=list[str])
        except msgspec.DecodeError as exc:
            raise InvalidParam("choice", f"the choices are no list of strings: {exc}") from exc
        if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
            raise InvalidParam(
                "choice", f"{len(choices):,} choices; 1 to {MAX_CHOICES:,} are allowed, and none may be empty"
            )


class ThinkingMarks(msgspec.Struct, frozen=True, array_like=True):
    """How a model marks its reasoning, as token ids, and whether the prompt has opened it already."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool


class Processor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A logit processor that the engine was started with, by its name; the parameters are plain JSON values."""

    name: str
    params: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        return len(msgspec.msgpack.encode(self.params))

    def check(self) -> None:
        try:
            size = self.num_bytes
        except (TypeError, OverflowError, RecursionError) as exc:
            raise InvalidParam("custom_params", f"the parameters of {self.name!r} are no plain values: {exc}") from exc
        if size > MAX_PROCESSOR_PARAMS:
            message = f"the parameters of {self.name!r} have {size:,} bytes; {MAX_PROCESSOR_PARAMS:,} are allowed"
            raise InvalidParam("custom_params", message)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request. The defaults are those of the OpenAI API, except `max_new_tokens`."""

    max_new_tokens: int | None = None  # None: as many as the context allows; 0: the prompt is computed, and that is all
    min_new_tokens: int = 0  # end-of-sequence and stop tokens cannot be sampled before
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 and 0: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}  # token id -> added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # no other token is sampled; empty: all are allowed
    bad_words: tuple[str, ...] = ()  # texts that are not to be said, with or without a space before
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # the same as tokens: the client adds those of `bad_words`
    seed: int | None = None  # the same seed gives the same tokens, whatever the batch
    n: int = 1  # completions of the same prompt
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()  # what they match ends the completion, too
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the matched stop string or stop token in the text
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; k: log probability of the sampled token and of the k likeliest
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt,
    prompt_logprobs_start: int = 0  # from this one on; the first has none, for nothing asked for comes before it
    logprob_token_ids: tuple[int, ...] = ()  # log probabilities of these tokens, too, in every place of both
    grammar: Grammar | None = None  # what the output must be
    hidden_states: HiddenStatesOf | None = None  # of every token that is computed, or of the last one
    thinking_budget: int | None = None  # tokens of reasoning after which its end is put in; 0: none
    thinking_marks: ThinkingMarks | None = None  # which tokens that are; told by whoever knows the model's format
    processors: tuple[Processor, ...] = ()  # change the logits, one after the other

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidParam` for the first value out of range, naming the value and what is allowed."""
        self._check_lengths()
        self._check_logprobs(vocab_size)
        self._check_numbers()
        if self.grammar is not None:
            self.grammar.check()
            if (marks := self.grammar.behind) is not None:
                _check_token_ids("thinking_marks", marks.begin + marks.end, vocab_size)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParam("stop", f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_LEN:
                raise InvalidParam(
                    "stop", f"a stop string has {len(text)} characters; 1 to {MAX_STOP_LEN:,} are allowed"
                )
        if len(self.stop_regex) > MAX_STOP_REGEX:
            raise InvalidParam("stop_regex", f"{len(self.stop_regex)} patterns; at most {MAX_STOP_REGEX} are allowed")
        for text in self.stop_regex:
            if not 0 < len(text) <= MAX_STOP_REGEX_LEN:
                raise InvalidParam(
                    "stop_regex", f"a pattern has {len(text)} characters; 1 to {MAX_STOP_REGEX_LEN:,} are allowed"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParam(
                "stop_token_ids", f"{len(self.stop_token_ids):,} ids; at most {MAX_STOP_TOKEN_IDS:,} are allowed"
            )
        _check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParam(
                "logit_bias", f"{len(self.logit_bias):,} entries; at most {MAX_LOGIT_BIAS:,} are allowed"
            )
        _check_token_ids("logit_bias", tuple(self.logit_bias), vocab_size)
        for token, bias in self.logit_bias.items():
            _in_range(f"logit_bias[{token}]", bias, -100.0, 100.0)
        self._check_choice(vocab_size)

    def _check_choice(self, vocab_size: int) -> None:
        """What may be sampled at all, and who changes the logits."""
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
            raise InvalidParam(
                "allowed_token_ids",
                f"{len(self.allowed_token_ids):,} ids; at most {MAX_ALLOWED_TOKEN_IDS:,} are allowed",
            )
        if self.allowed_token_ids:
            ends = min(self.allowed_token_ids), max(self.allowed_token_ids)
            _check_token_ids("allowed_token_ids", ends, vocab_size)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidParam("bad_words", f"{len(self.bad_words):,} words; at most {MAX_BAD_WORDS:,} are allowed")
        for word in self.bad_words:
            if not 0 < len(word) <= MAX_STOP_LEN or not word.strip(" "):
                raise InvalidParam("bad_words", f"{word[:32]!r} is no word of 1 to {MAX_STOP_LEN:,} characters")
        for ids in self.bad_word_ids:
            if not ids:
                raise InvalidParam("bad_word_ids", "a word has no tokens")
            _check_token_ids("bad_word_ids", ids, vocab_size)
        if self.thinking_budget is not None and not 0 <= self.thinking_budget < 2**31:
            raise InvalidParam("thinking_budget", f"thinking_budget is {self.thinking_budget}; it must be at least 0")
        if (marks := self.thinking_marks) is not None:
            if not (marks.begin and marks.end):
                raise InvalidParam("thinking_marks", "a mark of the reasoning has no tokens")
            _check_token_ids("thinking_marks", marks.begin + marks.end, vocab_size)
        if len(self.processors) > MAX_PROCESSORS:
            message = f"{len(self.processors)} logit processors; at most {MAX_PROCESSORS} are allowed"
            raise InvalidParam("custom_logit_processor", message)
        for processor in self.processors:
            processor.check()

    @property
    def fresh_from(self) -> int | None:
        """From this token on the prompt has to be computed, though the cache may have it; None: from none."""
        if self.hidden_states == "all":
            return 0
        return None if self.prompt_logprobs is None else self.prompt_logprobs_start

    def _check_logprobs(self, vocab_size: int) -> None:
        for param, num in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if num is not None and not 0 <= num <= MAX_LOGPROBS:
                raise InvalidParam(param, f"{param} is {num}; 0 to {MAX_LOGPROBS} are allowed")
        if self.prompt_logprobs_start < 0:
            raise InvalidParam(
                "prompt_logprobs_start",
                f"prompt_logprobs_start is {self.prompt_logprobs_start}; it must be at least 0",
            )
        ids = self.logprob_token_ids
        if ids and self.logprobs is None and self.prompt_logprobs is None:
            raise InvalidParam("logprob_token_ids", "logprob_token_ids needs logprobs or prompt_logprobs")
        if len(ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidParam("logprob_token_ids", f"{len(ids):,} ids; at most {MAX_LOGPROB_TOKEN_IDS:,} are allowed")
        _check_token_ids("logprob_token_ids", ids, vocab_size)

    def _check_lengths(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise InvalidParam("max_tokens", f"max_tokens is {self.max_new_tokens}; it must be at least 0")
        if self.min_new_tokens < 0:
            raise InvalidParam("min_tokens", f"min_tokens is {self.min_new_tokens}; it must be at least 0")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidParam(
                "min_tokens", f"min_tokens is {self.min_new_tokens}, above max_tokens ({self.max_new_tokens})"
            )
        if not 1 <= self.n <= MAX_N:
            raise InvalidParam("n", f"n is {self.n}; 1 to {MAX_N} are allowed")

    def _check_numbers(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidParam("top_p", "top_p is 0; it must be above 0 and at most 1")
        if self.top_k < -1 or self.top_k >= 2**31:
            raise InvalidParam("top_k", f"top_k is {self.top_k}; -1 or 0 (off) or a positive number is allowed")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidParam("seed", f"seed is {self.seed}; a 64-bit integer is allowed")


def _in_range(param: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidParam(param, f"{param} is {value}; {low:g} to {high:g} are allowed")


def _check_token_ids(param: str, ids: tuple[int, ...], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidParam(param, f"{param} has token id {token}; 0 to {vocab_size - 1:,} are allowed")
