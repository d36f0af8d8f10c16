"""The messages between two servers, and their encoding.

    length, 4 bytes, little endian │ message, msgpack
    and after a `PageGroup`: its bytes, raw │ their CRC-32, 4 bytes

    prefill                                    decode
            Challenge  ──────────────────────▶
                       ◀──────────────────────  Hello
    Welcome or Decline ──────────────────────▶
                       ◀──────────────────────  Ask
        Beat ... Ready ──────────────────────▶
                       ◀──────────────────────  Beat ... Wanted
     PageGroup, its bytes  ──────────────────────▶
                       ◀──────────────────────  (closed: nothing more is needed)

Pages are sent from and received into the memory of the pool, without another copy. Each side
computes checksums in parts while the system transfers other parts.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

import msgspec

from weft.handoff.gate import PageGate
from weft.tiers.files import MAX_PIECES, behind

VERSION = 3
LENGTH = struct.Struct("<I")
CHECKSUM = struct.Struct("<I")
MAX_GREETING_BYTES = 65_536  # limit before both sides have greeted
MAX_MESSAGE_BYTES = 64_000_000  # a prompt takes 4 bytes a token
GROUP_BYTES = 1 << 23  # of pages that are sent together, with one checksum
PART_BYTES = 1 << 20  # part of a group; its checksum is computed while others are in transfer
BUFFER_BYTES = 1 << 22  # size of the socket buffers that is requested
# A reader of a group is woken when this many bytes are there, not for every packet.
WAKE_BYTES = 1 << 18


class BadSpeech(Exception):
    """The other side violates the protocol."""


class DamagedPiece(Exception):
    """The received bytes differ from the sent ones."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    nonce: bytes
    proof: bytes
    facts: dict[str, str]  # facts on which K and V depend


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    proof: bytes
    lease_s: float


class Decline(msgspec.Struct, frozen=True, tag="refusal"):
    message: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    room: str
    namespace: str
    tokens: bytes  # int32, packed: the key of the wanted part of the prompt
    have: int  # tokens that the client has already
    is_needless: bool = False  # the client only says that it needs nothing


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """No news: the sender is alive and waits."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    num_tokens: int  # available tokens of the key, from the first one on


class Wanted(msgspec.Struct, frozen=True, tag="wanted"):
    start: int  # tokens, whole pages
    end: int
    with_ending: bool = False  # the ending of the lent sequence, after the pages


class PageGroup(msgspec.Struct, frozen=True, tag="piece"):
    """The next wanted pages, or after them the ending. Their bytes follow, and the checksum of
    these."""

    num_pages: int  # of an ending: its places
    num_bytes: int
    is_ending: bool = False


Spoken: TypeAlias = (
    Challenge | Hello | Welcome | Decline | (Ask | Beat | Ready | Wanted | PageGroup)
)
M = TypeVar("M", bound=msgspec.Struct)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder[Spoken](Spoken).decode


class Connection:
    """One end of a connection. Its methods raise OSError and EOFError if it breaks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for which in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, which, BUFFER_BYTES)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.max_bytes = MAX_GREETING_BYTES

    def close(self) -> None:
        self._sock.close()

    async def send(self, message: Spoken) -> None:
        body = _encode(message)
        await self._loop.sock_sendall(self._sock, LENGTH.pack(len(body)) + body)

    async def receive(self) -> Spoken:
        """The next message. Raises BadSpeech for invalid data."""
        (num_bytes,) = LENGTH.unpack(await self._exactly(LENGTH.size))
        if num_bytes > self.max_bytes:
            raise BadSpeech(f"a message of {num_bytes:,} bytes")
        try:
            message: Spoken = _decode(await self._exactly(num_bytes))
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise BadSpeech(f"no message: {exc}") from exc
        return message

    def next_message(self) -> asyncio.Future[Spoken]:
        """A future of the next message. It need not be awaited: it may be an error after the
        end."""
        coming = asyncio.ensure_future(self.receive())
        coming.add_done_callback(_seen)
        return coming

    async def expect(self, kind: type[M], timeout_s: float) -> M:
        """The next message, which must be of this kind. Raises BadSpeech, and TimeoutError."""
        message = await asyncio.wait_for(self.receive(), timeout_s)
        if not isinstance(message, kind):
            raise BadSpeech(f"{type(message).__name__} instead of {kind.__name__}")
        return message

    async def send_pages(self, pieces: Sequence[memoryview], gate: PageGate) -> None:
        """Send the bytes of a group, and their checksum. Raises GateShut, perhaps halfway."""
        checksum = 0
        for part in _parts(pieces):
            await self._send_pieces(part, gate)
            with gate:
                checksum = _checksum(part, checksum)
        await self._loop.sock_sendall(self._sock, CHECKSUM.pack(checksum))

    async def receive_pages(self, pieces: Sequence[memoryview], gate: PageGate) -> None:
        """Receive the bytes of a group. Raises GateShut, perhaps halfway, and DamagedPiece."""
        checksum = 0
        for part in _parts(pieces):
            await self._receive_pieces(part, gate)
            with gate:
                checksum = _checksum(part, checksum)
        (expected,) = CHECKSUM.unpack(await self._exactly(CHECKSUM.size))
        if checksum != expected:
            num_bytes = sum(map(len, pieces))
            raise DamagedPiece(f"the checksum of {num_bytes:,} bytes is wrong")

    async def _send_pieces(self, pieces: Sequence[memoryview], gate: PageGate) -> None:
        rest = list(pieces)
        while rest:
            num_bytes = 0
            with gate, suppress(BlockingIOError):
                num_bytes = self._sock.sendmsg(rest[:MAX_PIECES])
            if num_bytes:
                rest = behind(rest, num_bytes)
            else:
                await self._until_writable()

    async def _receive_pieces(self, pieces: Sequence[memoryview], gate: PageGate) -> None:
        rest = list(pieces)
        while rest:
            num_bytes = -1
            with gate, suppress(BlockingIOError):
                num_bytes = self._sock.recvmsg_into(rest[:MAX_PIECES])[0]
            if not num_bytes:
                raise EOFError("the connection was closed")
            if num_bytes > 0:
                rest = behind(rest, num_bytes)
            else:
                await self._until_there(min(sum(map(len, rest)), WAKE_BYTES))

    async def _exactly(self, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        rest = memoryview(content)
        while rest:
            got = await self._loop.sock_recv_into(self._sock, rest)
            if not got:
                raise EOFError("the connection was closed")
            rest = rest[got:]
        return bytes(content)

    async def _until_writable(self) -> None:
        ready = self._loop.create_future()
        self._loop.add_writer(self._sock, _done, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self._sock)

    async def _until_there(self, num_bytes: int) -> None:
        """Wait until `num_bytes` can be read, or the connection has ended."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
        try:
            await self._until_readable()
        finally:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    async def _until_readable(self) -> None:
        ready = self._loop.create_future()
        self._loop.add_reader(self._sock, _done, ready)
        try:
            await ready
        finally:
            self._loop.remove_reader(self._sock)


def _parts(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The pieces, in parts of about PART_BYTES."""
    part: list[memoryview] = []
    num_bytes = 0
    for piece in pieces:
        part.append(piece)
        num_bytes += len(piece)
        if num_bytes < PART_BYTES:
            continue
        yield part
        part = []
        num_bytes = 0
    if part:
        yield part


def _checksum(pieces: Sequence[memoryview], before: int) -> int:
    for piece in pieces:
        before = zlib.crc32(piece, before)
    return before


def _seen(future: asyncio.Future[Spoken]) -> None:
    if not future.cancelled():
        future.exception()


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
