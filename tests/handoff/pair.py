"""Two servers in one process, as their sockets see them: pools of bytes, and news that tests wait
for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.tiers.pool import HANG_S, PAGE_SIZE, BytesPool, key_of, pages
from weft.handoff.decode import DecodeSide
from weft.handoff.facts import Facts, KvFacts
from weft.handoff.prefill import PrefillSide
from weft.memory.handoff.protocol import RoomAddress
from weft.memory.prefix_cache import TOKEN_BYTES, CacheKey

FACTS = {"page size": "4", "digest of the weights": "abc"}
QUICK_S = 0.05  # between two signs of life, where a test does not wait for silence


def key_part(key: CacheKey, num_tokens: int) -> CacheKey:
    return CacheKey(key.namespace, key.tokens[: num_tokens * TOKEN_BYTES])


class Pair:
    """`place` may be moved, so that whoever asks meets something else on the way."""

    def __init__(
        self,
        *,
        facts: Mapping[str, str] = FACTS,
        secrets: tuple[str, str] = ("", ""),
        silence_s: float = HANG_S,
        room_s: float = HANG_S,
        beat_s: float = QUICK_S,
    ) -> None:
        self._rung = threading.Condition()
        self.facts: list[Facts] = [FACTS, facts]  # of both sides; `renew` may follow a change
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.pools = BytesPool(), BytesPool()
        self.resume_states = BytesPool(), BytesPool()
        common: dict[str, Any] = {"page_size": PAGE_SIZE, "notify": self._ring, "beat_s": beat_s}
        self.prefill = PrefillSide(
            listener,
            self.pools[0],
            secret=secrets[0],
            lease_s=HANG_S,
            facts=KvFacts(self._finder(0)),
            room_s=room_s,
            resume_states=self.resume_states[0],
            **common,
        )
        self.decode = DecodeSide(
            self.pools[1],
            secret=secrets[1],
            facts=KvFacts(self._finder(1)),
            silence_s=silence_s,
            resume_states=self.resume_states[1],
            **common,
        )
        self.news: dict[str, list[Any]] = {
            name: [] for name in ("renewed", "returned", "found", "landed", "missed")
        }
        self.prefill.start()
        self.decode.start()
        self.wait_until(self.knows_its_facts)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _finder(self, side: int) -> Callable[[], Callable[[], Facts]]:
        def weights() -> Callable[[], Facts]:
            facts = self.facts[side]
            return lambda: facts

        return weights

    def knows_its_facts(self) -> bool:
        """Whether both sides know their facts."""
        return all(side._facts.is_known for side in (self.prefill, self.decode))

    def place(self, room: str = "r", port: int = 0) -> RoomAddress:
        return RoomAddress("127.0.0.1", port or self.port, room)

    def wait_until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + HANG_S
        with self._rung:
            while not condition():
                assert time.monotonic() < deadline, self.news
                self._rung.wait(0.01)

    def wait_for(self, name: str) -> Any:
        """The next news of this kind, on either side."""
        self.wait_until(lambda: self._take() or self.news[name])
        return self.news[name].pop(0)

    def lend(self, num_tokens: int = 24, room: str = "r", seed: int = 1) -> bytes:
        """Lend the first `num_tokens` of `key_of(24)` from pages 5 and on. Returns their
        content."""
        held = pages(5, num_tokens // PAGE_SIZE)
        content = self.pools[0].fill(held, seed)
        self.prefill.lend(room, key_part(key_of(24), num_tokens), held)
        return content

    def lend_with_resume_state(self, num_tokens: int = 24, seed: int = 1) -> tuple[bytes, bytes]:
        """The same, with a resume state in the places 3 and 9. Returns the content of both."""
        held = pages(5, num_tokens // PAGE_SIZE)
        resume_state = np.array([9, 3], dtype=np.int32)
        content = self.pools[0].fill(held, seed)
        last = self.resume_states[0].fill(resume_state, seed + 1)
        self.prefill.lend("r", key_part(key_of(24), num_tokens), held, resume_state)
        return content, last

    def ask(self, pull: int = 0, have: int = 0, room: str = "r", port: int = 0) -> None:
        self.decode.ask(pull, self.place(room, port), key_of(24), have)

    def fetch(self, ticket: int, start: int, end: int, *, pull: int = 0, page: int = 40) -> None:
        self.decode.bind(ticket, pull)
        num_pages = (end - start) // PAGE_SIZE
        self.decode.fetch(ticket, key_part(key_of(24), end), start, pages(page, num_pages))

    def content(self, num_pages: int, page: int = 40) -> bytes:
        return self.pools[1].content(pages(page, num_pages))

    def _take(self) -> None:
        for side in (self.prefill, self.decode):
            news = side.take()
            for name, found in self.news.items():
                found += getattr(news, name)

    def _ring(self) -> None:
        with self._rung:
            self._rung.notify_all()


class Proxy:
    """Stands between two servers, and hands what the first one says to `spoil` before it passes it
    on. None: it says nothing any more, and keeps the connection."""

    def __init__(self, port: int, spoil: Callable[[bytes], bytes | None]) -> None:
        self._to = port
        self._spoil = spoil
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for sock in self._sockets:
            sock.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:  # the server has ended before the other one has
                near.close()
                continue
            self._sockets += [near, far]
            threading.Thread(
                target=self._pass, args=(near, far, lambda it: it), daemon=True
            ).start()
            threading.Thread(target=self._pass, args=(far, near, self._spoil), daemon=True).start()

    @staticmethod
    def _pass(
        source: socket.socket, sink: socket.socket, spoil: Callable[[bytes], bytes | None]
    ) -> None:
        try:
            while content := source.recv(1 << 16):
                spoilt = spoil(content)
                if spoilt is None:
                    return
                sink.sendall(spoilt)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def array_of(content: bytes) -> np.ndarray:  # type: ignore[type-arg]
    return np.frombuffer(content, dtype=np.uint8)
