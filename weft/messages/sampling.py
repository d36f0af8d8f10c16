"""How the next token of one request is chosen, and when the request is finished.

A value that users build (`weft.SamplingParams`), that HTTP requests are translated to, and that travels to the
engine unchanged. It checks its own ranges and knows nothing of models beyond the vocabulary size it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

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
)


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
    behind: ThinkingMarks | None = (
        None  # it holds from the end of the reasoning on; None: from the first token on
    )

    def __str__(self) -> str:
        return f"{self.kind} of {len(self.text):,} characters"

    def check(self) -> None:
        """Raise `InvalidParam` for what needs no compiler to see."""
        if not 0 < len(self.text) <= MAX_GRAMMAR_LEN:
            raise InvalidParam(
                self.kind,
                f"the grammar has {len(self.text):,} characters; 1 to {MAX_GRAMMAR_LEN:,} are allowed",
            )
        if self.behind is not None and not self.behind.end:
            raise InvalidParam(
                "thinking_marks", "reasoning before a grammar must have an end; no token is given"
            )
        if self.kind != "choice":
            return
        try:
            choices = msgspec.json.decode(self.text, type=list[str])
        except msgspec.DecodeError as exc:
            raise InvalidParam("choice", f"the choices are no list of strings: {exc}") from exc
        if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
            raise InvalidParam(
                "choice",
                f"{len(choices):,} choices; 1 to {MAX_CHOICES:,} are allowed, and none may be empty",
            )
        longest, total = max(map(len, choices)), sum(map(len, choices))
        if longest > MAX_CHOICE_LEN:
            raise InvalidParam(
                "choice", f"a choice has {longest:,} characters; {MAX_CHOICE_LEN:,} are allowed"
            )
        if total > MAX_CHOICES_LEN:
            raise InvalidParam(
                "choice", f"the choices have {total:,} characters; {MAX_CHOICES_LEN:,} are allowed"
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
            raise InvalidParam(
                "custom_params", f"the parameters of {self.name!r} are no plain values: {exc}"
            ) from exc
        if size > MAX_PROCESSOR_PARAMS:
            message = f"the parameters of {self.name!r} have {size:,} bytes; {MAX_PROCESSOR_PARAMS:,} are allowed"
            raise InvalidParam("custom_params", message)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request. The defaults are those of the OpenAI API, except `max_new_tokens`."""

    max_new_tokens: int | None = (
        None  # None: as many as the context allows; 0: the prompt is computed, and that is all
    )
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
    bad_word_ids: tuple[
        tuple[int, ...], ...
    ] = ()  # the same as tokens: the client adds those of `bad_words`
    seed: int | None = None  # the same seed gives the same tokens, whatever the batch
    n: int = 1  # completions of the same prompt
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()  # what they match ends the completion, too
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the matched stop string or stop token in the text
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = (
        None  # None: none; k: log probability of the sampled token and of the k likeliest
    )
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt,
    prompt_logprobs_start: int = (
        0  # from this one on; the first has none, for nothing asked for comes before it
    )
    logprob_token_ids: tuple[
        int, ...
    ] = ()  # log probabilities of these tokens, too, in every place of both
    grammar: Grammar | None = None  # what the output must be
    hidden_states: HiddenStatesOf | None = (
        None  # of every token that is computed, or of the last one
    )
    thinking_budget: int | None = None  # tokens of reasoning after which its end is put in; 0: none
    thinking_marks: ThinkingMarks | None = (
        None  # which tokens that are; told by whoever knows the model's format
    )
    processors: tuple[Processor, ...] = ()  # change the logits, one after the other

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidParam` for the first value out of range, naming the value and what is allowed."""
        self._check_numbers()
        self._check_logprobs(vocab_size)
        if self.grammar is not None:
            self.grammar.check()
            if (marks := self.grammar.behind) is not None:
                check_token_ids("thinking_marks", marks.begin + marks.end, vocab_size)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParam(
                "stop", f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS} are allowed"
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_LEN:
                raise InvalidParam(
                    "stop",
                    f"a stop string has {len(text)} characters; 1 to {MAX_STOP_LEN:,} are allowed",
                )
        if len(self.stop_regex) > MAX_STOP_REGEX:
            raise InvalidParam(
                "stop_regex",
                f"{len(self.stop_regex)} patterns; at most {MAX_STOP_REGEX} are allowed",
            )
        for text in self.stop_regex:
            if not 0 < len(text) <= MAX_STOP_REGEX_LEN:
                raise InvalidParam(
                    "stop_regex",
                    f"a pattern has {len(text)} characters; 1 to {MAX_STOP_REGEX_LEN:,} are allowed",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParam(
                "stop_token_ids",
                f"{len(self.stop_token_ids):,} ids; at most {MAX_STOP_TOKEN_IDS:,} are allowed",
            )
        for token in self.stop_token_ids:
            check_number("stop_token_ids", "stop_token_ids", token)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParam(
                "logit_bias",
                f"{len(self.logit_bias):,} entries; at most {MAX_LOGIT_BIAS:,} are allowed",
            )
        check_token_ids("logit_bias", tuple(self.logit_bias), vocab_size)
        for token, bias in self.logit_bias.items():
            check_number("logit_bias", f"logit_bias[{token}]", bias)
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
            check_token_ids("allowed_token_ids", ends, vocab_size)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidParam(
                "bad_words", f"{len(self.bad_words):,} words; at most {MAX_BAD_WORDS:,} are allowed"
            )
        for word in self.bad_words:
            if not 0 < len(word) <= MAX_STOP_LEN or not word.strip(" "):
                raise InvalidParam(
                    "bad_words", f"{word[:32]!r} is no word of 1 to {MAX_STOP_LEN:,} characters"
                )
        for ids in self.bad_word_ids:
            if not ids:
                raise InvalidParam("bad_word_ids", "a word has no tokens")
            check_token_ids("bad_word_ids", ids, vocab_size)
        if (marks := self.thinking_marks) is not None:
            if not (marks.begin and marks.end):
                raise InvalidParam("thinking_marks", "a mark of the reasoning has no tokens")
            check_token_ids("thinking_marks", marks.begin + marks.end, vocab_size)
        if len(self.processors) > MAX_PROCESSORS:
            message = (
                f"{len(self.processors)} logit processors; at most {MAX_PROCESSORS} are allowed"
            )
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
        ids = self.logprob_token_ids
        if ids and self.logprobs is None and self.prompt_logprobs is None:
            raise InvalidParam(
                "logprob_token_ids", "logprob_token_ids needs logprobs or prompt_logprobs"
            )
        if len(ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidParam(
                "logprob_token_ids",
                f"{len(ids):,} ids; at most {MAX_LOGPROB_TOKEN_IDS:,} are allowed",
            )
        check_token_ids("logprob_token_ids", ids, vocab_size)

    def _check_numbers(self) -> None:
        for name, told in NUMERIC.items():
            value = getattr(self, name)
            if value is not None:
                check_number(name, told, value)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidParam(
                "min_tokens",
                f"min_tokens is {self.min_new_tokens}, above max_tokens ({self.max_new_tokens})",
            )


# Fields of `SamplingParams` that are one number each, and the names under which users know them.
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


def check_number(name: str, told: str, value: Any) -> None:
    """Raise `InvalidParam` if the number of the field `name` is out of its range; users know the field as `told`."""
    if wrong := NUMBERS[name].wrong(told, value):
        raise InvalidParam(told, wrong)


def check_token_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise `InvalidParam` for the first of the ids of a field that is no token of the vocabulary."""
    number = TOKEN.within(vocab_size)
    for token in ids:
        if wrong := number.wrong(param, token):
            raise InvalidParam(param, wrong)
