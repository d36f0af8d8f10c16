"""The messages between two servers, and their encoding.

    length, 4 bytes, little endian │ message, msgpack │ mark
    and after a `PageGroup`: its bytes, raw │ mark

    prefill                                    decode
            Challenge  ──────────────────────▶
                       ◀──────────────────────  Hello
    Welcome or Decline ──────────────────────▶
                                                from here on with marks (`weft/seal.py`)
                       ◀──────────────────────  Ask
        Beat ... Ready ──────────────────────▶
                       ◀──────────────────────  Beat ... Wanted
     PageGroup, its bytes  ──────────────────────▶
                       ◀──────────────────────  (closed: nothing more is needed)

Pages are sent from and received into the memory of the pool, without another copy. Each side
computes marks in parts while the system transfers other parts.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

import msgspec

from weft.handoff.pages import PageGate
from weft.seal import Mark, Open, Seals, is_same
from weft.tiers.pages import MAX_PIECES, without_first

VERSION = 4
LENGTH = struct.Struct("<I")
MAX_SMALL_BYTES = 65_536  # limit of all messages but an `Ask`, which only a lender gets
MAX_ASK_BYTES = 64_000_000  # a prompt takes 4 bytes a token
MAX_WHY_LEN = 400  # characters of a reason that the other side gives
GROUP_BYTES = 1 << 23  # of pages that are sent together, with one mark
PART_BYTES = 1 << 20  # part of a group; its mark is computed while others are in transfer
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
    """The whole connection is about one room."""

    nonce: bytes
    proof: bytes
    facts: dict[str, str]  # facts on which K and V depend
    address: str  # of the other side, as the request of the client names it
    room: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    proof: bytes


class Decline(msgspec.Struct, frozen=True, tag="refusal"):
    message: str

    @property
    def why(self) -> str:
        """The message, fit for logs and for users, whoever has written it."""
        shown = self.message[:MAX_WHY_LEN]
        return "".join(char if char.isprintable() else "\ufffd" for char in shown)


class Ask(msgspec.Struct, frozen=True, tag="ask"):
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
    # The resume state of the lent sequence, after the pages.
    with_resume_state: bool = msgspec.field(default=False, name="with_ending")


class PageGroup(msgspec.Struct, frozen=True, tag="piece"):
    """The next wanted pages, or after them the resume state. Their bytes follow, and the mark of
    these."""

    num_pages: int  # of a resume state: its slots or pages
    num_bytes: int
    is_resume_state: bool = msgspec.field(default=False, name="is_ending")


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
        self.max_bytes = MAX_SMALL_BYTES
        self.seals = Seals(Open(), Open())

    def close(self) -> None:
        self._sock.close()

    async def send(self, message: Spoken) -> None:
        body = _encode(message)
        content = LENGTH.pack(len(body)) + body
        mark = self.seals.sending.begin()
        mark.add(content)
        await self._loop.sock_sendall(self._sock, content + mark.end())

    async def receive(self) -> Spoken:
        """The next message. Raises BadSpeech for invalid data, and DamagedPiece for data that the
        other side has not sent."""
        head = await self._exactly(LENGTH.size)
        (num_bytes,) = LENGTH.unpack(head)
        if num_bytes > self.max_bytes:
            raise BadSpeech(f"a message of {num_bytes:,} bytes")
        body = await self._exactly(num_bytes)
        mark = self.seals.receiving.begin()
        mark.add(head)
        mark.add(body)
        await self._check(mark, num_bytes)
        try:
            message: Spoken = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise BadSpeech(f"no message: {exc!s:.200}") from exc
        except RecursionError:
            raise BadSpeech("no message: it is nested too deeply") from None
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
        """Send the bytes of a group, and their mark. Raises GateShut, perhaps halfway."""
        mark = self.seals.sending.begin()
        for part in _parts(pieces):
            await self._send_pieces(part, gate)
            with gate:
                _add(mark, part)
        await self._loop.sock_sendall(self._sock, mark.end())

    async def receive_pages(self, pieces: Sequence[memoryview], gate: PageGate) -> None:
        """Receive the bytes of a group. Raises GateShut, perhaps halfway, and DamagedPiece."""
        mark = self.seals.receiving.begin()
        for part in _parts(pieces):
            await self._receive_pieces(part, gate)
            with gate:
                _add(mark, part)
        await self._check(mark, sum(map(len, pieces)))

    async def _check(self, mark: Mark, num_bytes: int) -> None:
        """Compare a mark with the received one. Raises DamagedPiece."""
        received = await self._exactly(self.seals.receiving.size)
        if not is_same(received, mark.end()):
            raise DamagedPiece(f"the mark of {num_bytes:,} bytes is wrong")

    async def _send_pieces(self, pieces: Sequence[memoryview], gate: PageGate) -> None:
        rest = list(pieces)
        while rest:
            num_bytes = 0
            with gate, suppress(BlockingIOError):
                num_bytes = self._sock.sendmsg(rest[:MAX_PIECES])
            if num_bytes:
                rest = without_first(rest, num_bytes)
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
                rest = without_first(rest, num_bytes)
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


def _add(mark: Mark, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        mark.add(piece)


def _seen(future: asyncio.Future[Spoken]) -> None:
    if not future.cancelled():
        future.exception()


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
