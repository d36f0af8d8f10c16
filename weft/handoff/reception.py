"""The connections of a server that lends KV: it accepts and greets clients, and shows each to its
room. Used by one thread only."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress

from weft.handoff.facts import KvFacts
from weft.handoff.greeting import Refusals, SentAway, welcome
from weft.handoff.news import News
from weft.handoff.pages import GateShut
from weft.handoff.rooms import Rooms
from weft.handoff.visit import LendTerms, Visit
from weft.handoff.wire import Ask, BadSpeech, Connection, DamagedPiece, Decline
from weft.observe.log import EventLog

MAX_STRANGERS = 256  # connections that have not greeted, each for a few seconds at most

log = EventLog("handoff")


class Reception:
    """Serves the connections of `listener`."""

    def __init__(
        self,
        listener: socket.socket,
        terms: LendTerms,
        rooms: Rooms,
        news: News,
        *,
        secret: str,
        facts: KvFacts,
    ) -> None:
        self._listener = listener
        self._terms = terms
        self._rooms = rooms
        self._news = news
        self._secret = secret
        self._facts = facts
        self._refusals = Refusals()
        self._num_renewed = 0
        self.num_strangers = 0  # connections that have not greeted
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        self._spawn(self._accept_all())

    def send_away(self, why: str) -> None:
        """End all conversations: clients must greet again."""
        self._num_renewed += 1
        self._refusals.forget()
        self._rooms.end_visited(why)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError as exc:  # too many open files: open connections continue
                log.seldom("not_accepted", error=f"{exc}")
                await asyncio.sleep(self._terms.beat_s)
                continue
            if self.num_strangers >= MAX_STRANGERS:
                log.seldom("too_many", peer=address[0], connections=self.num_strangers)
                sock.close()
                continue
            self._spawn(self._serve(sock, f"{address[0]}"))

    async def _welcomed(self, connection: Connection) -> str:
        """The room that the other side asks for, after both sides have greeted."""
        self.num_strangers += 1
        try:
            return await welcome(connection, self._secret, self._facts.known)
        finally:
            self.num_strangers -= 1

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        connection = Connection(sock)
        try:
            num_renewed = self._num_renewed
            room = await self._welcomed(connection)
            ask = await connection.expect(Ask, self._terms.lease_s)
            if num_renewed != self._num_renewed:
                await connection.send(Decline("the weights were changed there"))
                return
            await self._answer(connection, room, ask)
        except SentAway as exc:
            self._news.num_faults += 1
            self._refusals.tell(peer, f"{exc}")
        except (OSError, EOFError, TimeoutError, BadSpeech, DamagedPiece) as exc:
            self._news.num_faults += 1
            log.seldom("broken_off", peer=peer, error=f"{exc or type(exc).__name__}")
        except GateShut:
            pass  # the lease has ended; the other side sees the connection close
        except Exception as exc:  # ours; other connections continue
            self._news.num_faults += 1
            log.exception("visit_failed", exc, peer=peer)
        finally:
            connection.close()

    async def _answer(self, connection: Connection, name: str, ask: Ask) -> None:
        room = self._rooms.join(name)
        visit = Visit(self._terms, self._news, connection, ask, name, room)
        try:
            with suppress(EOFError):  # nothing more is needed
                await visit.run()
        finally:
            visit.end()
            self._rooms.leave(name, room)
