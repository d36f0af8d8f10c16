"""One of several strings, in plain Python: the small twin of a grammar library, byte by byte.

Its specification can be read in a minute; tests hold the scheduler and the large twin against it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from weft.grammar.masks import Words
from weft.grammar.protocol import Compiled, GrammarMatcher, InvalidGrammar, Key


class ChoiceMatcher:
    """`left`: what of each choice that is still possible has not been said."""

    def __init__(
        self, vocabulary: Sequence[bytes], eos: frozenset[int], left: frozenset[bytes]
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
        if self.error or not self.allows(token):
            self.error = self.error or f"token {token} is not allowed here"
        elif token in self.eos:
            self.left = frozenset()
        else:
            piece = self.vocabulary[token]
            self.left = frozenset(
                rest[len(piece) :] for rest in self.left if rest.startswith(piece)
            )
        return not self.error and not self.is_complete

    def forced(self) -> list[int]:
        """Written in the longest tokens; what is left at the end might become part of a longer one."""
        text, found = _common(self.left), []
        while text:
            longer = any(
                len(piece) > len(text) and piece.startswith(text) for piece in self.vocabulary
            )
            token = max(
                range(len(self.vocabulary)), key=lambda one: _fits(self.vocabulary[one], text)
            )
            if longer or not _fits(self.vocabulary[token], text):
                break
            found.append(token)
            text = text[len(self.vocabulary[token]) :]
        return found


def _common(texts: frozenset[bytes]) -> bytes:
    """What they all begin with."""
    if not texts:
        return b""
    low, high = min(texts), max(texts)
    size = next(
        (i for i, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), len(low)
    )
    return low[:size]


def _fits(piece: bytes, text: bytes) -> int:
    """How much of the text a token begins with; 0 if it does not."""
    return len(piece) if text.startswith(piece) else 0


class ChoiceCompiler:
    """Compiles grammars of kind "choice": a JSON list of strings. `vocabulary` has each token's bytes."""

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
        size = 32 * masks.shape[1]
        for row, matcher in enumerate(matchers):
            assert isinstance(matcher, ChoiceMatcher)
            allowed = [t < len(self._vocabulary) and matcher.allows(t) for t in range(size)]
            masks[row] = np.packbits(allowed, bitorder="little").view(np.int32)
