"""Marks behind what goes from one machine to another, by which the receiver sees whether it is what
was sent.

    `Open`         no mark: until both sides have greeted, and within one machine
    `Checksummed`  a CRC-32: finds damage. For servers without a secret
    `Sealed`       an HMAC with a key of this connection and this direction, over the number of the
                   mark: a message that was changed, left out, repeated, moved, or sent back to its
                   sender has a wrong mark

Only a side's own settings choose among them, so that nobody can talk a server out of `Sealed`.
"""

from __future__ import annotations

import hmac
import zlib
from typing import NamedTuple, Protocol

NUMBER_BYTES = 8


class Mark(Protocol):
    """The mark of one message or group of pages, while it is computed."""

    def add(self, content: bytes | memoryview) -> None: ...

    def end(self) -> bytes:
        """The mark, of the size of its seal."""
        ...


class Seal(Protocol):
    """Makes the marks of one direction of a connection, in the order of what is sent."""

    size: int  # bytes of a mark

    def begin(self) -> Mark: ...


class Seals(NamedTuple):
    """The two directions of a connection, as one side uses them."""

    sending: Seal
    receiving: Seal


class Open:
    size = 0

    def begin(self) -> Mark:
        return _NoMark()


class Checksummed:
    size = 4

    def begin(self) -> Mark:
        return _Checksum()


class Sealed:
    """`key` belongs to one direction of one connection."""

    size = 32

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._number = 0

    def begin(self) -> Mark:
        digest = self._keyed.copy()
        digest.update(self._number.to_bytes(NUMBER_BYTES, "little"))
        self._number += 1
        return _Code(digest)


class _NoMark:
    def add(self, content: bytes | memoryview) -> None:
        pass

    def end(self) -> bytes:
        return b""


class _Checksum:
    def __init__(self) -> None:
        self._checksum = 0

    def add(self, content: bytes | memoryview) -> None:
        self._checksum = zlib.crc32(content, self._checksum)

    def end(self) -> bytes:
        return self._checksum.to_bytes(Checksummed.size, "little")


class _Code:
    def __init__(self, digest: hmac.HMAC) -> None:
        self._digest = digest

    def add(self, content: bytes | memoryview) -> None:
        # `hmac` lets other threads run during a long content.
        self._digest.update(content)

    def end(self) -> bytes:
        return self._digest.digest()


def is_same(mark: bytes, expected: bytes) -> bool:
    """Compare marks in a time that does not tell how many bytes are equal."""
    return hmac.compare_digest(mark, expected)
