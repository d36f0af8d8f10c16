"""Token ids into text, as they come: what is shown is never taken back, and no half character is shown.

Two ways, chosen by the decoder of the tokenizer. Where a token is a string of bytes (byte-level BPE: most models of
today), its bytes go through an incremental UTF-8 decoder: exact and O(1). Any other decoder is asked for the text of a
small window of ids, with the ids shown last as context, because it may strip or join at the borders of tokens.
Knows nothing of stop strings or requests.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

MAX_HELD_TOKENS = 16  # a character needs at most 4 byte tokens: more than this held back is no character
REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Text of one completion. The concatenation of all that is returned is the text of all ids."""

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""

    def flush(self) -> str:
        """What was held back, at the end. Bytes that are no character become U+FFFD."""


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes. `pieces[token]` are the bytes of a token; skipped tokens have none."""

    __slots__ = ("_held", "_pieces")

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._held = b""  # the beginning of a character, at most 3 bytes

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if not self._held and piece.isascii():
            return piece.decode("ascii")  # nearly all tokens, at a third of the time
        data = self._held + piece
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return utf_8_decode(held, "replace", True)[0]


class WindowDetokenizer:
    """For any tokenizer: the text of new ids is what decoding them adds to the text of the ids shown last.

        ids shown before | context | held back
                         ^-------------------^  decoded together; the context's own text is cut off again

    `skipped` ids never enter the window: an empty context would make the decoder strip a space that belongs there.
    Equal to decoding all ids at once, but for byte-fallback runs that are no valid UTF-8: what was valid stays.
    """

    __slots__ = ("_context_text", "_decode", "_ids", "_num_context", "_skipped")

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped: Set[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._ids: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        full = len(self._ids) - self._num_context >= MAX_HELD_TOKENS
        if (text.endswith(REPLACEMENT) or len(text) <= len(self._context_text)) and not full:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._ids))

    def _show(self, text: str) -> str:
        shown = text[len(self._context_text) :]
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._context_text = self._decode(self._ids)
        return shown
