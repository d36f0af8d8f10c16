"""Reasoning in the form that clients keep unread: `encrypted_content` of OpenAI's items,
`signature` of Anthropic's blocks.

    weft1.<text, compressed, base64>.<CRC-32 of the text>

Clients with `store: false` send back what they received, and some drop the reasoning's own text.
This form holds the text, so that the next prompt begins like the one before it. It is no secret,
because the answer has the same text in the open; and any weft server opens it, also after a restart
or behind a router. What another server has sealed cannot be opened.

A few bytes can become many. So all that one request opens is as long as a body may be, at most.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from weft.config.limits import Limits
from weft.server.errors import over

_BEGIN = "weft1"


def sealed(text: str) -> str:
    data = text.encode()
    packed = base64.urlsafe_b64encode(zlib.compress(data)).decode()
    return f"{_BEGIN}.{packed}.{zlib.crc32(data):08x}"


class Opener:
    """Opens what one request has sealed."""

    def __init__(self, limits: Limits) -> None:
        self._most = int(limits.max_body_mb * 1_000_000)  # bytes
        self._left = self._most

    def opened(self, sealed: str, where: str) -> str | None:
        """The text; None if another server sealed it, or if it was changed on its way.

        `where`: the part of the request. Raises `ApiError` if the request has too much text.
        """
        begin, _, rest = sealed.partition(".")
        packed, _, mark = rest.partition(".")
        if begin != _BEGIN:
            return None
        try:
            inflating = zlib.decompressobj()
            # One byte more shows that there is too much; 0 would be no limit.
            data = inflating.decompress(base64.urlsafe_b64decode(packed), self._left + 1)
        except (binascii.Error, zlib.error, ValueError):
            return None
        if len(data) > self._left:
            message = (
                f"{where}: the sealed reasoning of the request has more than {self._most:,} bytes, "
                "as many as a body may have"
            )
            raise over("max_body_mb", message, param=where)
        self._left -= len(data)  # also of a text that is not used
        if not inflating.eof or f"{zlib.crc32(data):08x}" != mark:
            return None
        try:
            return data.decode()
        except UnicodeError:
            return None
