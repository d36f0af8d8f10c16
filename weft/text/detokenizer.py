"""Token ids into text, as they come. Shown text is never taken back; no half character is shown.

There are two ways, chosen by the decoder of the tokenizer. Where a token is a string of bytes
(byte-level BPE: most models of today), its bytes go through an incremental UTF-8 decoder: exact and
O(1). Any other decoder gives the text of a small window of ids, with the ids shown last as context,
because it may strip or join at the borders of tokens.

A completion goes on from its prompt: the first context is the end of the prompt, so that a word
that begins with a space keeps it, and a character that the prompt has begun is shown by the token
that ends it. Wherever ids are cut into prompt and completion, the prompt's complete part and the
pieces of the completion are the text of all ids. Knows nothing of stop strings or requests.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

# A character needs at most 4 byte tokens: more than this held back is no character.
MAX_HELD_TOKENS = 16
MAX_BEGUN_LEN = 3  # bytes of a character that is not complete
NUM_CONTEXT = 4  # tokens of a prompt that a window begins with
MAX_LOOK_BACK = 1_024  # tokens of a prompt that are searched for them: special ones do not count
REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Text of one completion. The concatenation of all that is returned is the text of all ids."""

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""

    def flush(self) -> str:
        """What was held back, at the end. Bytes that are no character become U+FFFD."""


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes."""

    __slots__ = ("_held", "_pieces")

    def __init__(self, pieces: Mapping[int, bytes], prompt: Sequence[int] = ()) -> None:
        """`pieces[token]`: the bytes of a token; skipped tokens have none. `prompt`: the ids that
        the completion follows."""
        self._pieces = pieces
        self._held = begun_character(pieces, prompt)  # at most 3 bytes

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        # Nearly all tokens, at a third of the time.
        if not self._held and piece.isascii():
            return piece.decode("ascii")
        # Whole characters are shown; the bytes of a begun one wait for the next token.
        data = self._held + piece
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        text, _ = utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text


class WindowDetokenizer:
    """For any tokenizer: new ids have the text that they add to the text of the ids shown last.

        ids shown before | context | held back
                         ^-------------------^  decoded together; then the context's text is cut off

    Ids without bytes in `pieces` (skipped and unknown ones) never enter the window: an empty
    context would make the decoder strip a space that belongs there. The first context is the end of
    `prompt`. The text is that of all ids decoded at once, except for byte-fallback runs of no valid
    UTF-8: what was valid stays.
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
        """`alone` keeps what `decode` makes of one token, for all that decode alike."""
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

        Ids before them that belong to the same character come along.
        """
        found: list[int] = []
        for token in islice(reversed(prompt), MAX_LOOK_BACK):
            piece = self._pieces[token]
            if piece:
                found.append(token)
                # A byte from 0x80 to 0xBF goes on with the character of the token before.
                if len(found) >= NUM_CONTEXT and not 0x80 <= piece[0] < 0xC0:
                    break
        return found[::-1]

    def push(self, token: int) -> str:
        if not self._pieces[token]:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        # A replacement at the end may be half a character; a full window never becomes one.
        is_full = len(self._ids) - self._num_context >= MAX_HELD_TOKENS
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
        # The next context is what was shown now: nearly always one token.
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
    """The bytes at the end of `ids` that are the beginning of a character, at most 3."""
    tail = b""
    for token in islice(reversed(ids), MAX_LOOK_BACK):
        tail = pieces[token] + tail
        if len(tail) >= MAX_BEGUN_LEN:
            break
        # A byte from 0x80 to 0xBF goes on with a character that an earlier token has begun.
        if tail and not 0x80 <= tail[0] < 0xC0:
            break
    tail = tail[-MAX_BEGUN_LEN:]
    _, used = utf_8_decode(tail, "replace", False)
    return tail[used:]
