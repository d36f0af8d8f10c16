"""One of several strings, in plain Python, byte by byte: the small counterpart of a grammar
library.

It is short enough to serve as the specification; tests compare the scheduler and the libraries with
it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from weft.grammar.masks import Words
from weft.grammar.protocol import Compiled, GrammarMatcher, InvalidGrammar, Key


class ChoiceMatcher:
    """`left`: the remaining text of each choice that is still possible."""

    def __init__(
        self,
        vocabulary: Sequence[bytes],
        eos: frozenset[int],
        left: frozenset[bytes],
    ) -> None:
        self.vocabulary = vocabulary
        self.eos = eos
        self.left = left
        self.error = ""

    @property
    def is_complete(self) -> bool:
        return self.left <= {b""}

    def fork(self) -> ChoiceMatcher:
        return ChoiceMatcher(self.vocabulary, self.eos, self.left)

    def allows(self, token: int) -> bool:
        if token in self.eos:
            return b"" in self.left
        piece = self.vocabulary[token]
        return bool(piece) and any(rest.startswith(piece) for rest in self.left)

    def consume(self, token: int) -> bool:
        if self.error:
            return False
        if not self.allows(token):
            self.error = f"token {token} is not allowed here"
            return False
        if token in self.eos:
            self.left = frozenset()
        else:
            piece = self.vocabulary[token]
            fitting = [rest for rest in self.left if rest.startswith(piece)]
            self.left = frozenset(rest.removeprefix(piece) for rest in fitting)
        return not self.is_complete

    def forced(self) -> list[int]:
        """The text is written in the longest tokens; an end that might become part of a longer
        token is left out."""
        text = _common_prefix(self.left)
        tokens: list[int] = []
        while text:
            longest = 0
            found = -1
            for token, piece in enumerate(self.vocabulary):
                # The text might continue as this longer token, so its tokens are not certain.
                if len(piece) > len(text) and piece.startswith(text):
                    return tokens
                if text.startswith(piece) and len(piece) > longest:
                    longest = len(piece)
                    found = token
            if found < 0:
                return tokens
            tokens.append(found)
            text = text[longest:]
        return tokens


def _common_prefix(texts: frozenset[bytes]) -> bytes:
    if not texts:
        return b""
    # All texts in between share the common prefix of the smallest and the largest.
    low = min(texts)
    high = max(texts)
    size = 0
    while size < len(low) and low[size] == high[size]:
        size += 1
    return low[:size]


class ChoiceCompiler:
    """Compiles grammars of kind "choice": a JSON list of strings. `vocabulary`: the bytes of each
    token."""

    def __init__(self, vocabulary: Sequence[bytes], eos: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._eos = eos

    def compile(self, key: Key) -> Compiled:
        if key.kind != "choice":
            raise InvalidGrammar(f"only choices are compiled here, not {key.kind}")
        left = frozenset(text.encode() for text in json.loads(key.text))
        matcher = ChoiceMatcher(self._vocabulary, self._eos, left)
        mask = np.zeros((1, -(-len(self._vocabulary) // 32)), dtype=np.int32)
        self.fill([matcher], mask)
        if not mask.any():
            raise InvalidGrammar("no token begins any of the choices")
        return Compiled(matcher, mask[0], num_bytes=len(key.text))

    def fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
        num_tokens = len(self._vocabulary)
        for row, matcher in enumerate(matchers):
            assert isinstance(matcher, ChoiceMatcher)
            allowed = np.zeros(32 * masks.shape[1], dtype=np.bool_)
            allowed[:num_tokens] = [matcher.allows(token) for token in range(num_tokens)]
            masks[row] = np.packbits(allowed, bitorder="little").view(np.int32)
