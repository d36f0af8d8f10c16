"""Sources of drafts: a text that the client expects, the prefix cache, the request's own tokens,
a second model, and a head that reads the model's hidden states.

A source reads the tokens of one request and returns tokens that may follow. It decides nothing:
`trust.py` decides whether drafts are worth their cost, and a wrong draft changes no answer.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from weft.config.drafts import OWN_STEPS
from weft.memory.prefix_cache import TOKEN_BYTES, find_tokens
from weft.memory.radix.cache import RadixCache
from weft.scheduler.request import Request

LONGEST_MATCH = 4  # tokens at the end of a sequence that are searched for elsewhere
SHORTEST_MATCH = 2
# A request without a continuation in the cache searches again after this many tokens, because
# another request may have computed the same text in the meantime.
RETRY_TOKENS = 32
# Highest value of the last byte of a token id; keys of the prefix cache may have higher ones
# (`cache_key`).
MOST_OF_IDS = 127


class Known(NamedTuple):
    """The known tokens of a request that decodes."""

    request: Request
    tokens: bytes  # int32, packed: prompt and output

    @property
    def output(self) -> bytes:
        return self.tokens[self.request.spec.prompt_len * TOKEN_BYTES :]


class DraftSource(Protocol):
    """`option`: its name in options and metrics. `prior`: the fraction of its drafts that is
    expected to be right until it is known."""

    option: str
    prior: float
    is_decided: bool  # whether its drafts were found worth their cost when they were made

    def drafts(self, known: Known, num_tokens: int) -> bytes:
        """Tokens that may follow, packed, at most `num_tokens`; empty if the source has none."""
        ...

    def forget(self, request: Request) -> None:
        """The request has released its row."""
        ...


class ExpectedText:
    """The text that the client expects the answer to resemble."""

    option = "prediction"
    is_decided = False
    prior = 0.8

    def drafts(self, known: Known, num_tokens: int) -> bytes:
        expected = known.request.message.prediction
        if not expected:
            return b""
        output = known.output
        longest = min(len(output) // TOKEN_BYTES, LONGEST_MATCH)
        if longest < LONGEST_MATCH and expected.startswith(output):
            return _following(expected, len(output), num_tokens)
        # If the answer differs from the text for a while, both usually stay about as long.
        near = max(len(output) - 64 * TOKEN_BYTES, 0)
        for size in range(longest, SHORTEST_MATCH - 1, -1):
            pattern = output[-size * TOKEN_BYTES :]
            at = find_tokens(expected, pattern, near)
            if at < 0:
                at = find_tokens(expected, pattern)
            if at >= 0:
                return _following(expected, at + len(pattern), num_tokens)
        return b""

    def forget(self, request: Request) -> None:
        pass


class PrefixTree:
    """The tokens that followed the same tokens in the prefix cache: of another sample of the
    prompt, or of a request that is sent again."""

    option = "tree"
    is_decided = False
    prior = 0.7

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._not_before: dict[int, int] = {}  # by request: bytes of its tokens at the next look

    def drafts(self, known: Known, num_tokens: int) -> bytes:
        request = known.request
        if not request.message.shares_kv:
            return b""
        if len(known.tokens) < self._not_before.get(request.id, 0):
            return b""
        found = self._cache.tree.following(request.cache_key(known.tokens), num_tokens)
        if max(found[TOKEN_BYTES - 1 :: TOKEN_BYTES], default=0) > MOST_OF_IDS:
            found = _up_to_media(found)
        if not found:
            self._not_before[request.id] = len(known.tokens) + RETRY_TOKENS * TOKEN_BYTES
        return found

    def forget(self, request: Request) -> None:
        self._not_before.pop(request.id, None)


class Repetition:
    """The tokens that followed the last tokens where they occurred in the request's own text
    before.

    The longer the repeated piece, the better the draft. Pieces of other lengths are other sources.
    """

    option = "ngram"
    is_decided = False

    def __init__(self, prior: float, longest: int, shortest: int) -> None:
        self.prior = prior
        self.is_long = shortest > SHORTEST_MATCH
        self._longest = longest
        self._shortest = shortest

    def drafts(self, known: Known, num_tokens: int) -> bytes:
        tokens = known.tokens
        if not known.request.message.shares_kv:
            tokens = known.output  # the ids of its prompt mean nothing
        for size in range(self._longest, self._shortest - 1, -1):
            pattern = tokens[-size * TOKEN_BYTES :]
            at = _find_last(tokens, pattern)
            if at >= 0:
                found = _following(tokens, at + len(pattern), num_tokens)
                return _again_and_again(found, num_tokens)
        return b""

    def forget(self, request: Request) -> None:
        pass


class Kept(NamedTuple):
    """Drafts that wait for the next step."""

    num_known: int  # number of tokens before them
    tokens: bytes


class ModelDrafts:
    """Guesses of a second model or of a head, made in a step of its own, where it is better than
    the other sources (`guessing.py`)."""

    is_decided = True
    prior = 0.6

    def __init__(self, option: str) -> None:
        self.option = option
        self._kept: dict[int, Kept] = {}  # by request

    def keep(self, request: Request, num_known: int, tokens: bytes) -> None:
        """Keep tokens that may follow the first `num_known` tokens of a request."""
        self._kept[request.id] = Kept(num_known, tokens)

    def drafts(self, known: Known, num_tokens: int) -> bytes:
        kept = self._kept.pop(known.request.id, None)
        if kept is None or kept.num_known * TOKEN_BYTES != len(known.tokens):
            return b""
        return _following(kept.tokens, 0, num_tokens)

    def forget(self, request: Request) -> None:
        self._kept.pop(request.id, None)


def make_sources(
    names: tuple[str, ...],
    cache: RadixCache,
    longest: int = LONGEST_MATCH,
    shortest: int = SHORTEST_MATCH,
) -> list[DraftSource]:
    """The sources of these names, in the order in which they are used: the guesses of a model are
    there already, then the cheapest source first. `longest` and `shortest`: lengths of the pieces
    of a text that are searched for in it."""
    sources: list[DraftSource] = []
    sources += [ModelDrafts(name) for name in OWN_STEPS if name in names]
    if "prediction" in names:
        sources.append(ExpectedText())
    if "tree" in names and cache.shares:
        sources.append(PrefixTree(cache))
    if "ngram" in names:
        sources += _repetitions(longest, shortest)
    return sources


def _repetitions(longest: int, shortest: int) -> list[DraftSource]:
    """Sources for long pieces and for short ones, as far as the lengths allow."""
    found: list[DraftSource] = []
    if longest > SHORTEST_MATCH:
        found.append(Repetition(0.6, longest, max(shortest, SHORTEST_MATCH + 1)))
    if shortest <= SHORTEST_MATCH:
        found.append(Repetition(0.3, min(longest, SHORTEST_MATCH), shortest))
    return found


def _up_to_media(tokens: bytes) -> bytes:
    """The ids before the first placeholder of a picture, a video or a sound."""
    ids = np.frombuffer(tokens, dtype=np.int32)
    first = int(np.argmax(ids < 0))
    return tokens[: first * TOKEN_BYTES]


def _following(tokens: bytes, at: int, num_tokens: int) -> bytes:
    return tokens[at : at + num_tokens * TOKEN_BYTES]


def _again_and_again(found: bytes, num_tokens: int) -> bytes:
    """Repeat the found tokens up to `num_tokens`: a text that repeats itself will go on so.

    known   a b c x y x y       found after the x y before: x y, and then the same again
    """
    num_bytes = num_tokens * TOKEN_BYTES
    while len(found) < num_bytes:
        found += found
    return found[:num_bytes]


def _find_last(tokens: bytes, pattern: bytes) -> int:
    """The last position of a pattern before the one at the end; -1 if there is none."""
    end = len(tokens) - 1
    at = tokens.rfind(pattern, 0, end)
    while at % TOKEN_BYTES and at >= 0:
        at = tokens.rfind(pattern, 0, at + len(pattern) - 1)
    return at
