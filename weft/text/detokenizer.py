"""Incremental decoding of token ids to text. Returned text is final, and has no partial characters.

The decoder of the tokenizer decides between two methods. If each token is a string of bytes
(byte-level BPE: most current models), an incremental UTF-8 decoder reads the bytes: exact and O(1).
Any other decoder may strip or join text at token borders, so it decodes a small window of ids, with
the ids of the last returned text as context.

A completion continues its prompt: the first context is the end of the prompt. So a word that begins
with a space keeps it, and the token that completes a character of the prompt returns that
character. Wherever ids are divided into prompt and completion, the complete characters of the
prompt and the pieces of the completion make up the text of all ids. Knows no stop strings and no
requests.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

# A character needs at most 4 byte tokens: this many held-back tokens are not one character.
MAX_PENDING_TOKENS = 16
MAX_BEGUN_LEN = 3  # bytes of an incomplete character
NUM_CONTEXT = 4  # last prompt tokens with text, the first context of a window
MAX_LOOK_BACK = 1_024  # last prompt tokens to search for them: special tokens have no text
REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one completion: the returned pieces, concatenated, are the text of all ids."""

    def push(self, token: int) -> str:
        """Add `token`. Returns the text that is complete now, which may be empty."""

    def flush(self) -> str:
        """The held-back text, at the end. Bytes that are not a character become U+FFFD."""


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes."""

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: Mapping[int, bytes], prompt: Sequence[int] = ()) -> None:
        """`pieces[token]`: the bytes of a token, empty for skipped tokens. `prompt`: the ids before
        the completion."""
        self._pieces = pieces
        self._pending = begun_character(pieces, prompt)  # at most 3 bytes

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        # A fast path for nearly all tokens: it takes a third of the time.
        if not self._pending and piece.isascii():
            return piece.decode("ascii")
        # Complete characters are returned; the bytes of a partial one wait for the next token.
        data = self._pending + piece
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class WindowDetokenizer:
    """For any tokenizer: the text of new ids is what they add to the text of the context.

        returned ids | context | held-back ids
                     ^-----------------------^  decoded together; then the context's text is removed

    Ids without bytes in `pieces` (skipped and unknown ids) never enter the window: after an empty
    context the decoder would strip a space that belongs to the text. The first context is the end
    of `prompt`. The text equals that of all ids decoded at once, except for byte-fallback runs that
    are not valid UTF-8: their valid characters stay.
    """

    __slots__ = ("_alone", "_context_text", "_decode", "_ids", "_num_context", "_pieces")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        pieces: Mapping[int, bytes],
        prompt: Sequence[int] = (),
        *,
        alone: dict[int, str] | None = None,
    ) -> None:
        """`alone`: a cache of the texts of single tokens, for all detokenizers with this
        `decode`."""
        self._decode = decode
        self._alone = {} if alone is None else alone
        self._pieces = pieces
        self._ids = self._end_of(prompt)
        num_begun = len(begun_character(pieces, self._ids))  # each byte of it is a token
        self._num_context = len(self._ids) - num_begun
        self._context_text = ""
        if self._num_context:
            self._context_text = decode(self._ids[: self._num_context])

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last `NUM_CONTEXT` ids of the prompt that have a text.

        If the first of them continues a character, the other ids of the character are included.
        """
        found: list[int] = []
        for token in islice(reversed(prompt), MAX_LOOK_BACK):
            piece = self._pieces[token]
            if piece:
                found.append(token)
                # A byte from 0x80 to 0xBF continues the character of the previous token.
                if len(found) >= NUM_CONTEXT and not 0x80 <= piece[0] < 0xC0:
                    break
        return found[::-1]

    def push(self, token: int) -> str:
        if not self._pieces[token]:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        # A replacement at the end may be a partial character, unless the window is full.
        is_full = len(self._ids) - self._num_context >= MAX_PENDING_TOKENS
        is_complete = len(text) > len(self._context_text) and not text.endswith(REPLACEMENT)
        if is_complete or is_full:
            return self._show(text)
        return ""

    def flush(self) -> str:
        return self._show(self._decode(self._ids))

    def _show(self, text: str) -> str:
        shown = text[len(self._context_text) :]
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        # The next context are the ids of the text returned now: nearly always one token.
        if self._num_context == 1:
            self._context_text = self._text_alone(self._ids[0])
        else:
            self._context_text = self._decode(self._ids)
        return shown

    def _text_alone(self, token: int) -> str:
        text = self._alone.get(token)
        if text is None:
            text = self._decode([token])
            self._alone[token] = text
        return text


def begun_character(pieces: Mapping[int, bytes], ids: Sequence[int]) -> bytes:
    """The bytes of an incomplete character at the end of `ids`, at most 3."""
    tail = b""
    for token in islice(reversed(ids), MAX_LOOK_BACK):
        tail = pieces[token] + tail
        if len(tail) >= MAX_BEGUN_LEN:
            break
        # A byte from 0x80 to 0xBF continues a character that began in an earlier token.
        if tail and not 0x80 <= tail[0] < 0xC0:
            break
    tail = tail[-MAX_BEGUN_LEN:]
    _, used = utf_8_decode(tail, "replace", False)
    return tail[used:]
