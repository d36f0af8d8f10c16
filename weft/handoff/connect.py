"""Connections to servers that lend KV, on which both sides have greeted."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from weft.config.handoff import is_loopback
from weft.handoff.facts import Facts, KvFacts
from weft.handoff.greeting import Meeting, SentAway, greet
from weft.handoff.wire import Ask, BadSpeech, Beat, Connection, DamagedPiece
from weft.memory.handoff.protocol import RoomAddress

CONNECT_S = 3.0


class Unreachable(Exception):
    """No connection can be opened. The message says why."""


# What may become of a conversation that nobody waits for.
NO_ANSWER = (OSError, EOFError, TimeoutError, BadSpeech, DamagedPiece, SentAway, Unreachable)


class Connector:
    """`silence_s`: after this time, a silent server counts as dead."""

    def __init__(self, secret: str, facts: KvFacts, silence_s: float) -> None:
        self._secret = secret
        self._facts = facts
        self._silence_s = silence_s

    async def _known_facts(self) -> Facts:
        """Raises SentAway if the facts are not known."""
        facts = await self._facts.known()
        if isinstance(facts, str):
            raise SentAway(f"{facts} here")
        return facts

    async def greeted(self, address: RoomAddress) -> Connection:
        """A connection on which both sides have greeted. Raises SentAway if either side refuses,
        and Unreachable."""
        facts = await self._known_facts()
        try:
            async with asyncio.timeout(CONNECT_S):
                sock = await self._connected(address)
        except TimeoutError as exc:
            raise Unreachable(f"no connection in {CONNECT_S:g} s") from exc
        except OSError as exc:
            raise Unreachable(exc.strerror or f"{exc}") from exc
        except UnicodeError as exc:  # of a look-up
            raise Unreachable("the host is no name of a machine") from exc
        connection = Connection(sock)
        try:
            meeting = Meeting(f"{address}", address.room)
            await greet(connection, self._secret, facts, meeting, self._silence_s)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _connected(self, address: RoomAddress) -> socket.socket:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, resolved = found[0]
        if not self._secret and not is_loopback(str(resolved[0])):
            raise SentAway("it is another machine, and there is no --handoff-secret")
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, resolved)
        except BaseException:
            sock.close()
            raise
        return sock

    async def dismiss(self, address: RoomAddress) -> None:
        """Tell the other server that a room is not needed. If that fails, its lease expires."""
        with suppress(*NO_ANSWER):
            connection = await self.greeted(address)
            try:
                await connection.send(Ask("", b"", 0, is_needless=True))
                async with asyncio.timeout(2 * self._silence_s):
                    while isinstance(await connection.receive(), Beat):
                        pass
            finally:
                connection.close()
