"""Reasoning in the form that clients keep unread: `encrypted_content` of OpenAI's items,
`signature` of Anthropic's blocks.

    weft1.<text, compressed, base64>.<CRC-32 of the text>

Clients with `store: false` send back what they received, and some drop the reasoning's own text.
This form holds the text, so that the next prompt begins like the one before it. It is no secret,
because the answer has the same text in the open; and any weft server opens it, also after a restart
or behind a router. What another server has sealed cannot be opened.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_BEGIN = "weft1"
MAX_LEN = 1 << 22  # characters of a text: a few bytes may not become a large one


def sealed(text: str) -> str:
    data = text.encode()
    packed = base64.urlsafe_b64encode(zlib.compress(data)).decode()
    return f"{_BEGIN}.{packed}.{zlib.crc32(data):08x}"


def opened(sealed: str) -> str | None:
    """The text; None if another server sealed it, or if it was changed on its way."""
    begin, _, rest = sealed.partition(".")
    packed, _, mark = rest.partition(".")
    if begin != _BEGIN:
        return None
    try:
        inflating = zlib.decompressobj()
        data = inflating.decompress(base64.urlsafe_b64decode(packed), MAX_LEN)
        is_complete = inflating.eof and f"{zlib.crc32(data):08x}" == mark
        return data.decode() if is_complete else None
    except (binascii.Error, zlib.error, ValueError):
        return None
