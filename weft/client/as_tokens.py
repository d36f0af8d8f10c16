"""What sampling parameters say in words, said in tokens: only these mean something to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from msgspec.structs import replace

from weft.messages.sampling import InvalidParam, SamplingParams, ThinkingMarks
from weft.text.parsers.formats import ReasoningFormat
from weft.text.tokenizer import Tokenizer

TAIL_LEN = 32  # tokens at the end of a prompt in which a template can open the reasoning


def as_tokens(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`params` with the tokens of its bad words. Raises InvalidParam for a budget of reasoning without its marks."""
    if params.thinking_budget is not None and params.thinking_marks is None:
        raise InvalidParam(
            "thinking_budget",
            "it is not known how this model marks its reasoning, so it has no budget",
        )
    if not params.bad_words:
        return params
    return replace(
        params, bad_word_ids=params.bad_word_ids + bad_word_ids(tokenizer, params.bad_words)
    )


@lru_cache(maxsize=16)
def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word at the beginning of a text and behind a space; where these are the same, once.

    A word can still be said in other tokens than those that the tokenizer makes of it.
    """
    texts = [prefix + word.lstrip(" ") for word in words for prefix in ("", " ")]
    encoded = tokenizer.encode_all(texts, add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))


def with_marks(
    params: SamplingParams,
    format: ReasoningFormat | None,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
) -> SamplingParams:
    """`params` with the marks of the model's reasoning, if they have a budget. `prompt`: token ids."""
    if params.thinking_budget is None or format is None:
        return params
    if (
        params.grammar is not None
    ):  # it knows the marks, or holds from the first token on: then there is no reasoning
        marks = params.grammar.behind
        return replace(
            params,
            thinking_budget=None if marks is None else params.thinking_budget,
            thinking_marks=marks,
        )
    prompt_end = tokenizer.decode(list(prompt[-TAIL_LEN:]), skip_special_tokens=False)
    begin, end = tokenizer.encode_all([format.begin, format.end], add_special_tokens=False)
    return replace(
        params, thinking_marks=ThinkingMarks(tuple(begin), tuple(end), format.is_open(prompt_end))
    )
