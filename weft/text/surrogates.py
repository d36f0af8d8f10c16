"""Half surrogate pairs, which no UTF-8 text can contain: they become U+FFFD.

JSON writes a character beyond U+FFFF as two escapes. A model, or a client that cuts texts by UTF-16
units, may write only one of them: valid by the grammar of JSON, and unreadable for most decoders.
Both halves stay what they are if they stand side by side.
"""

from __future__ import annotations

import re

_HEX = "[0-9a-fA-F]"
_HIGH = rf"\\u[dD][89aAbB]{_HEX}{{2}}"
_LOW = rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_PIECE = re.compile(
    rf"(?P<plain>[^\\]+)|(?P<pair>{_HIGH}{_LOW})|(?P<high>{_HIGH})|(?P<low>{_LOW})"
    rf"|(?P<other>\\u{_HEX}{{4}}|\\[^u])",
    re.DOTALL,
)
_BEGIN_OF_LOW = re.compile(rf"(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?\Z")
REPLACED = r"\ufffd"  # as an escape in JSON


def well_formed(text: str) -> str:
    """The text with each half of a pair replaced; two halves side by side become one character."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def readable_json(text: str) -> str:
    """A JSON text with the escape of each half of a pair replaced."""
    mender = EscapeMender()
    return mender.push(text) + mender.flush()


class EscapeMender:
    r"""Replaces the escapes of half pairs in a JSON text that arrives in pieces.

    A piece may end within an escape, or between the two of a pair: `push` holds this end back.
    """

    def __init__(self) -> None:
        self._pending = ""

    def push(self, text: str) -> str:
        """The text that is final."""
        if not self._pending and "\\" not in text:
            return text
        text = self._pending + text
        pieces: list[str] = []
        position = 0
        while (match := _PIECE.match(text, position)) is not None:
            if match.lastgroup == "high" and _BEGIN_OF_LOW.match(text, match.end()):
                break
            is_half = match.lastgroup in ("high", "low")
            pieces.append(REPLACED if is_half else match[0])
            position = match.end()
        self._pending = text[position:]
        return "".join(pieces)

    def flush(self) -> str:
        """The text has ended: the rest of it."""
        rest = self._pending
        self._pending = ""
        if _PIECE.match(rest):  # the first half of a pair, perhaps with a beginning of the second
            return REPLACED + rest[len(REPLACED) :]
        return rest
