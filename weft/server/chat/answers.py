"""The parts of answers that several APIs share: names, usage, log probabilities, `meta_info`.

Log probabilities have OpenAI's form; those of a prompt have the form of `echo` with `logprobs`, or
of vLLM's `prompt_logprobs`. `meta_info` is SGLang's. This module does not know when an answer is
sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec

from weft.client.aux_outputs import PromptToken, cache_use
from weft.client.generation import Completion, Delta
from weft.json_types import JsonObject
from weft.messages.media import MediaItem
from weft.messages.pins import PinMark
from weft.messages.replies import CacheUsePiece, Finish, TokenLogprobs
from weft.server.body import json_bytes
from weft.server.causes import cause_of_prompts
from weft.server.chat.models import (
    CachedTokensDetails,
    ChatLogprobs,
    CompletionLogprobs,
    CompletionTokensDetails,
    PromptLogprob,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from weft.server.context import ServerContext
from weft.server.model_names import answering_name
from weft.text.detokenizer import Detokenizer
from weft.text.parsers.output import ParsedOutput
from weft.text.tokenizer import Tokenizer

TokenName: TypeAlias = Callable[[int], str]

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


# ---- names and usage


class AnswerHeader(NamedTuple):
    """The fields that every chunk of an answer repeats."""

    id: str
    created: int
    model: str


# What stands before the name of a request in the id of its answer: OpenAI's and Anthropic's.
ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_")


def names_meant(name: str) -> list[str]:
    """The names of requests that a user may mean by `name`: itself, and what the id of an answer
    was made of."""
    rests = [name.removeprefix(prefix) for prefix in ID_PREFIXES if name.startswith(prefix)]
    return [name, *rests]


def answer_header(
    context: ServerContext,
    prefix: str,
    rid: str,
    model: str | None = None,
    lora_path: str | None = None,
) -> AnswerHeader:
    """`prefix`: the beginning of the answer's id, before the name of the request. `model` and
    `lora_path`: from the request; an answer names the adapter that generated it."""
    name = context.info.model_name
    if context.adapters.by_name:
        name = answering_name(context, model, lora_path)
    return AnswerHeader(f"{prefix}{rid}", int(time.time()), name)


def event(chunk: Any) -> bytes:
    """A chunk as a server-sent event."""
    return b"data: " + json_bytes(chunk) + b"\n\n"


class UsageCount:
    """Counts the tokens of one answer from its deltas.

    A prompt counts once, whatever the number of its completions. With the history of a session, a
    prompt is longer than the one sent; its length is known when its completion has ended.
    """

    def __init__(
        self,
        prompt_lens: list[int],
        n: int,
        media: Sequence[MediaItem] = (),
        detailed: Sequence[Completion] = (),
    ) -> None:
        """`media`: media of all prompts. `detailed`: all completions, if the usage reports their
        cache use; else empty."""
        self._n = n
        self._detailed = detailed
        self._media = media
        self._prompt_lens = prompt_lens
        self._cached_tokens = 0  # known when a completion has ended
        self.accepted_prediction_tokens = 0
        self.rejected_prediction_tokens = 0
        self._num_tokens = [0] * (len(prompt_lens) * n)

    def add(self, delta: Delta) -> None:
        self._num_tokens[delta.choice] = delta.num_tokens
        if delta.end is not None:
            self.accepted_prediction_tokens += delta.end.accepted_prediction_tokens
            self.rejected_prediction_tokens += delta.end.rejected_prediction_tokens
        if delta.end is not None and delta.choice % self._n == 0:
            self._cached_tokens += delta.end.cached_tokens
            self._prompt_lens[delta.choice // self._n] = delta.end.prompt_tokens

    def usage(self) -> Usage:
        prompt_tokens = sum(self._prompt_lens)
        completion_tokens = sum(self._num_tokens)
        details = PromptTokensDetails(self._cached_tokens)
        if self._media:
            add_media(details, self._media)
        if self._detailed:
            add_cache_use(details, self._detailed[:: self._n])
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            details,
        )


def add_media(details: PromptTokensDetails, media: Sequence[MediaItem]) -> None:
    """Add the numbers of prompt tokens that are placeholders of images, videos and sounds."""
    for item in media:
        name = f"{item.kind}_tokens"
        before = getattr(details, name) or 0
        setattr(details, name, before + item.length)


def add_cache_use(details: PromptTokensDetails, completions: Sequence[Completion]) -> None:
    """Add the locations of the cached tokens of prompts, the number of their pinned tokens, and why
    not more of them were cached, as far as requests ask for it.

    `completions`: one per prompt; completions that have not ended do not count.
    """
    if completions and completions[0].spec.request.tells_cause_to is not None:
        details.cache_cause = cause_of_prompts(completions)
    for completion in completions:
        if completion.end is None:
            continue
        spec = completion.spec
        use = cache_use(completion.aux_outputs)
        cached = completion.end.cached_tokens
        if spec.request.pins:
            created = sum(pinned_by_ttl(spec.request.pins, use, cached).values())
            details.cache_write_tokens = (details.cache_write_tokens or 0) + created
        if spec.request.tells_cache:
            more = cached_details(use, cached)
            before = details.cached_tokens_details or CachedTokensDetails(0, 0, 0)
            details.cached_tokens_details = CachedTokensDetails(
                before.device + more.device,
                before.host + more.host,
                before.disk + more.disk,
            )


def cached_details(use: CacheUsePiece, cached_tokens: int) -> CachedTokensDetails:
    """The locations of the cached tokens of one prompt."""
    on_device = cached_tokens - use.host_tokens - use.disk_tokens
    return CachedTokensDetails(on_device, use.host_tokens, use.disk_tokens)


def pinned_by_ttl(
    pins: Sequence[PinMark], use: CacheUsePiece, cached_tokens: int
) -> dict[float, int]:
    """The numbers of a prompt's computed and pinned tokens, by time to live in seconds.

    0 ...... cached ...... first mark ...... second mark ...... pinned
                | TTL of first  |  TTL of second  |
    """
    found: dict[float, int] = {}
    begin = cached_tokens
    for mark in pins:
        end = min(mark.length, use.pinned_tokens)
        found[mark.ttl_s] = found.get(mark.ttl_s, 0) + max(end - begin, 0)
        begin = max(begin, end)
    return found


def reasoning_details(
    tokenizer: Tokenizer, outputs: Sequence[ParsedOutput]
) -> CompletionTokensDetails:
    """The number of reasoning tokens. The marks of the reasoning do not count."""
    texts = ["".join(output.reasoning_text) for output in outputs]
    encoded = tokenizer.encode_all(texts, add_special_tokens=False)
    return CompletionTokensDetails(sum(map(len, encoded)))


def meta_info(
    completion: Completion,
    delta: Delta,
    weight_version: str,
) -> JsonObject:
    """`meta_info` of SGLang's answers: the numbers of one completion up to `delta`.

    `weight_version` is the current version. Fields that are known only at the end come with the
    last delta.
    """
    end = delta.end
    if end is None:
        return {
            "id": completion.spec.request.rid,
            "finish_reason": None,
            "prompt_tokens": completion.spec.prompt_len,
            "completion_tokens": delta.num_tokens,
            "cached_tokens": 0,
            "weight_version": weight_version,
        }
    return {
        "id": completion.spec.request.rid,
        "finish_reason": _meta_finish_reason(end),
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": delta.num_tokens,
        "cached_tokens": end.cached_tokens,
        "weight_version": end.weight_version,
        "e2e_latency": end.e2e_s,
    }


def meta_cached_details(completion: Completion) -> JsonObject:
    """The entry of `meta_info` about the caches, for a completion that has ended."""
    assert completion.end is not None
    use = cache_use(completion.aux_outputs)
    details = cached_details(use, completion.end.cached_tokens)
    return {"cached_tokens_details": msgspec.to_builtins(details)}


def _meta_finish_reason(end: Finish) -> JsonObject:
    match end.reason:
        case "stop":
            return {"type": "stop", "matched": end.matched}
        case "length":
            return {"type": "length", "length": end.completion_tokens}
        case reason:
            return {
                "type": reason,
                "message": end.message,
                "status_code": end.status,
            }


# ---- names of tokens


def token_names(tokenizer: Tokenizer, *, as_ids: bool) -> TokenName:
    """The function that names tokens: by their text or, as in vLLM, by "token_id:17"."""
    return _id_name if as_ids else partial(token_name, tokenizer)


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; if its bytes are not valid text, in OpenAI's form ("bytes:\\xe4").

    So different tokens have different names.
    """
    piece = tokenizer.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


# ---- log probabilities of completions


def chat_logprobs(
    tokenizer: Tokenizer, delta: Delta, *, as_ids: bool = False, wanted: Sequence[int] = ()
) -> ChatLogprobs:
    """OpenAI's log probabilities of a delta, with the bytes of each token, which may be a part of a
    character.

    `wanted`: token ids to add after the likeliest.
    """

    def entry(token: int, logprob: float) -> TopLogprob:
        text = _id_name(token) if as_ids else tokenizer.token_text(token)
        return TopLogprob(text, finite(logprob), list(tokenizer.token_bytes(token)))

    content = []
    for token, found in zip(delta.token_ids, delta.logprobs, strict=False):
        own = entry(token, found.logprob)
        top = [entry(*pair) for pair in _likeliest_and_wanted(found, wanted)]
        content.append(TokenLogprob(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content)


class TextOffsets:
    """The offset of each token in the text of one answer.

    A token that is part of a character has the offset of the character.
    """

    def __init__(self, detokenizer: Detokenizer, offset: int) -> None:
        """`offset`: characters before the first token."""
        self._detokenizer = detokenizer
        self._offset = offset

    def next(self, token: int) -> int:
        """The offset of the next token."""
        offset = self._offset
        self._offset += len(self._detokenizer.push(token))
        return offset


def completion_logprobs(
    delta: Delta, offsets: TextOffsets, name_of: TokenName, wanted: Sequence[int] = ()
) -> CompletionLogprobs:
    """The log probabilities of a delta. `offsets`: those of its completion. `wanted`: token ids to
    add to the likeliest."""
    result = CompletionLogprobs([], [], [], [])
    for token, found in zip(delta.token_ids, delta.logprobs, strict=False):
        name = name_of(token)
        top: dict[str, float] = {}
        for other, logprob in _likeliest_and_wanted(found, wanted):
            top[name_of(other)] = finite(logprob)
        top.setdefault(name, finite(found.logprob))
        result.tokens.append(name)
        result.token_logprobs.append(finite(found.logprob))
        result.top_logprobs.append(top)
        result.text_offset.append(offsets.next(token))
    return result


def _likeliest_and_wanted(found: TokenLogprobs, wanted: Sequence[int]) -> list[tuple[int, float]]:
    """The likeliest tokens, then those of `wanted` that are not among them."""
    top = dict(zip(found.top_ids, found.top_logprobs, strict=True))
    top.update(zip(wanted, found.id_logprobs, strict=True))
    return list(top.items())


# ---- log probabilities of prompts


def vllm_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[PromptToken], num_top: int
) -> list[dict[str, PromptLogprob] | None]:
    """One entry per token of the prompt: the token itself, then the `num_top` likeliest tokens at
    its position; the keys are ids as digits.

    None for a token without a log probability.
    """

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
    """The log probabilities of an echoed prompt, in the form of a completion. Offsets count in the
    prompt's text."""
    found = CompletionLogprobs([], [], [], [])
    offsets = TextOffsets(tokenizer.detokenizer(), 0)
    for own in tokens:
        name = name_of(own.token)
        found.tokens.append(name)
        found.text_offset.append(offsets.next(own.token))
        if own.logprob is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for token, logprob in own.top[:num_top]:
            top[name_of(token)] = finite(logprob)
        top.setdefault(name, finite(own.logprob))
        found.token_logprobs.append(finite(own.logprob))
        found.top_logprobs.append(top)
    return found


def joined_logprobs(
    prompt: CompletionLogprobs, completion: CompletionLogprobs
) -> CompletionLogprobs:
    """The log probabilities of a prompt, followed by those of its completion."""
    return CompletionLogprobs(
        text_offset=prompt.text_offset + completion.text_offset,
        token_logprobs=prompt.token_logprobs + completion.token_logprobs,
        tokens=prompt.tokens + completion.tokens,
        top_logprobs=prompt.top_logprobs + completion.top_logprobs,
    )
