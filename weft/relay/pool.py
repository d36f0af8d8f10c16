"""The servers of one role: probes whether they are ready, and chooses one for each request.

Each server is probed at intervals, and again when a request finds no ready server. A server that
cannot be reached gets no requests until a probe succeeds. Its open answers go on; they end only if
several probes in a row get no answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b

from weft.config.relay import ServerAddress
from weft.observe.log import EventLog
from weft.relay.connection import Headers, NotReached, RelayedAnswer, ServerGone, ServerLines
from weft.relay.models import ModelNames, ask_names
from weft.route.policy import EngineRouter, RoutedRequest
from weft.server.errors import NOT_BEGUN

PROBE_TIMEOUT_S = 5.0
LOST_AFTER = 3  # probes without an answer, in a row
LOOK_AGAIN_S = 1.0  # longest wait of a request that finds no ready server
PROBE_BYTES = 65_536

log = EventLog("route")


class RelayServer:
    """One server. `why_not` is the reason why it gets no requests; "" if it gets some."""

    def __init__(self, address: ServerAddress, rank: int) -> None:
        self.address = address
        self.rank = rank
        self.lines = ServerLines(address.url)
        self.why_not = "it has not been asked yet"
        self.num_sent = 0
        self._num_silent = 0

    @property
    def is_up(self) -> bool:
        return not self.why_not

    async def probe(self, *, counts: bool = True) -> None:
        """Ask the server whether it is ready. `counts`: no answer counts towards `LOST_AFTER`."""
        why_not = ""
        is_silent = False
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                headers = [(b"host", self.address.authority.encode()), (b"connection", b"close")]
                answer = await ServerLines(self.address.url).ask("GET", b"/ready", headers, b"")
                try:
                    await answer.read_all(PROBE_BYTES)
                finally:
                    answer.close()
            if answer.status != 200:
                why_not = f"it is not ready (status {answer.status})"
        except TimeoutError:
            is_silent = True
            why_not = f"it has not answered for {PROBE_TIMEOUT_S:g} s"
        except (ServerGone, EOFError) as exc:
            is_silent = True
            why_not = f"{exc}"
        self.set_state(why_not)
        if not counts:
            return
        self._num_silent = self._num_silent + 1 if is_silent else 0
        if self._num_silent >= LOST_AFTER:
            self.lines.break_off("it does not answer probes")

    async def ask(self, method: str, target: bytes, headers: Headers, body: bytes) -> RelayedAnswer:
        """Send a request, and wait for the head of its answer. Raises `NotReached`, also if the
        server says that it has done nothing for the request, and `ServerGone`."""
        answer = await self.lines.ask(method, target, headers, body)
        if answer.status == 503 and any(name == NOT_BEGUN.encode() for name, _ in answer.headers):
            answer.close()
            raise NotReached("it takes no new requests")
        return answer

    def set_state(self, why_not: str) -> None:
        """Set why the server gets no requests; "": it gets requests. Logs changes."""
        if why_not and not self.why_not:
            log.warning("server_out", server=self.address.url, reason=why_not)
        elif self.why_not and not why_not:
            log.info("server_in", server=self.address.url)
        self.why_not = why_not


class RelayPool:
    """The servers of one role."""

    def __init__(
        self, role: str, addresses: Sequence[ServerAddress], method: str, kv_tokens: int
    ) -> None:
        self.role = role
        self.servers = [RelayServer(address, rank) for rank, address in enumerate(addresses)]
        self.router = EngineRouter(method, max(len(self.servers), 1), kv_tokens)
        self.models = ModelNames()
        self._second_look: asyncio.Task[None] | None = None

    @property
    def num_up(self) -> int:
        return sum(server.is_up for server in self.servers)

    @property
    def up(self) -> list[int]:
        """The servers that get requests."""
        return [server.rank for server in self.servers if server.is_up]

    @property
    def out(self) -> list[int]:
        """Those that get none."""
        return [server.rank for server in self.servers if not server.is_up]

    async def learn_models(self, headers: Headers, *, again: bool = False) -> None:
        """Ask the servers whose models are not known, or all `again`, as the client with these
        headers. Does nothing if there is no choice between servers."""
        asked = [self.servers[rank] for rank in self.up if again or not self.models.knows(rank)]
        if len(self.servers) > 1 and asked:
            await asyncio.gather(*(self._learn(server, headers) for server in asked))

    async def _learn(self, server: RelayServer, headers: Headers) -> None:
        names = await ask_names(server.lines, headers)
        if names is not None and server.is_up:
            self.models.learn(server.rank, names)

    def choose(
        self, id: int, request: RoutedRequest, up: Sequence[int], bound_to: str = ""
    ) -> RelayServer | None:
        """Choose one of the servers `up` for a request, and record the request in the router; the
        caller must call `router.ended`. None if there is none.

        `bound_to`: requests with the same text go to the same server, as long as it is ready.
        """
        if not up:
            return None
        if bound_to:
            up = [max(up, key=lambda rank: self._weight(rank, bound_to))]
        server = self.servers[self.router.open(id, request, up)]
        server.num_sent += 1
        return server

    def elsewhere(self, id: int) -> str:
        """The server that had more of the prompt of an open request than its own, in words; empty
        if there is none, or if the method reads no prompts."""
        found = self.router.elsewhere(id)
        if found is None:
            return ""
        url = self.servers[found.rank].address.url
        return f"{url} had about {found.num_more:,} tokens more of its prompt"

    def _weight(self, rank: int, name: str) -> bytes:
        """The weight of a server for a name (rendezvous hashing): if a server is missing, only its
        own names move to other servers."""
        url = self.servers[rank].address.url
        return blake2b(f"{url} {name}".encode(), digest_size=8).digest()

    async def look_again(self) -> None:
        """Probe all servers now, because one may be ready again. Concurrent callers share the same
        probes. Returns when all have ended, at the latest after `LOOK_AGAIN_S`."""
        look = self._second_look
        if look is None or look.done():
            look = asyncio.create_task(self._ask_all())
            self._second_look = look
        await asyncio.wait({look}, timeout=LOOK_AGAIN_S)

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._ask(server, counts=False) for server in self.servers))

    async def _ask(self, server: RelayServer, *, counts: bool) -> None:
        was_up = server.is_up
        await server.probe(counts=counts)
        if server.is_up and not was_up:  # the server may have restarted
            self.router.forget_cache(server.rank)
            self.models.forget(server.rank)

    async def watch(self, interval_s: float) -> None:
        """Probe all servers every `interval_s` seconds, for ever."""
        async with asyncio.TaskGroup() as tasks:
            for server in self.servers:
                tasks.create_task(self._watch(server, interval_s))

    async def _watch(self, server: RelayServer, interval_s: float) -> None:
        while True:
            await self._ask(server, counts=True)
            await asyncio.sleep(interval_s)
