"""Log probabilities of a prompt in the shapes of OpenAI (`echo` with `logprobs`) and of vLLM (`prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Sequence

from weft.client.aux_outputs import PromptToken
from weft.server.openai.models import CompletionLogprobs, PromptLogprob
from weft.server.openai.translate import TokenName, finite
from weft.text.tokenizer import Tokenizer


def vllm_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[PromptToken], num_top: int
) -> list[dict[str, PromptLogprob] | None]:
    """For each token itself, and then the `num_top` likeliest in its place, by their ids as digits; null where there is
    none."""

    def entry(token: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(finite(logprob), rank, tokenizer.token_text(token))

    found: list[dict[str, PromptLogprob] | None] = []
    for own in tokens:
        if own.logprob is None:
            found.append(None)
            continue
        entries = {str(own.token): entry(own.token, own.logprob, own.rank)}
        for rank, (token, logprob) in enumerate(own.top[:num_top], start=1):
            entries.setdefault(str(token), entry(token, logprob, rank))
        found.append(entries)
    return found


def echoed_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[PromptToken], num_top: int, name_of: TokenName
) -> CompletionLogprobs:
    """As of a completion; offsets count in the text of the prompt, where half a character stands where it begins."""
    found = CompletionLogprobs([], [], [], [])
    pieces, offset = tokenizer.detokenizer(), 0
    for own in tokens:
        name = name_of(own.token)
        found.tokens.append(name)
        found.token_logprobs.append(None if own.logprob is None else finite(own.logprob))
        found.top_logprobs.append(_top(name_of, own, name, num_top))
        found.text_offset.append(offset)
        offset += len(pieces.push(own.token))
    return found


def joined(prompt: CompletionLogprobs, completion: CompletionLogprobs) -> CompletionLogprobs:
    """One behind the other."""
    return CompletionLogprobs(
        text_offset=prompt.text_offset + completion.text_offset,
        token_logprobs=prompt.token_logprobs + completion.token_logprobs,
        tokens=prompt.tokens + completion.tokens,
        top_logprobs=prompt.top_logprobs + completion.top_logprobs,
    )


def _top(name_of: TokenName, own: PromptToken, name: str, num_top: int) -> dict[str, float] | None:
    """The likeliest tokens and the one that stands there."""
    if own.logprob is None:
        return None
    top = {name_of(token): finite(logprob) for token, logprob in own.top[:num_top]}
    top.setdefault(name, finite(own.logprob))
    return top
