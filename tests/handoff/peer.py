"""One side of a conversation that says what a test wants, and a way between two servers that
changes what they say."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from tests.handoff.pair import FACTS
from tests.tiers.pool import HANG_S
from weft.handoff.greeting import NONCE_BYTES, GreetingKeys
from weft.handoff.wire import LENGTH, VERSION, Challenge, Decline, Hello, Spoken, Welcome
from weft.seal import Open, Seal, Seals

_decode = msgspec.msgpack.Decoder[Spoken](Spoken).decode


class Peer:
    """A side without a pool. Its calls wait."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(HANG_S)
        self.sock = sock
        self.seals = Seals(Open(), Open())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    @classmethod
    def asking(cls, port: int) -> Peer:
        return cls(socket.create_connection(("127.0.0.1", port)))

    def say(self, message: Spoken | bytes) -> None:
        body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        self.send(LENGTH.pack(len(body)) + body)

    def send(self, content: bytes) -> None:
        """Bytes, and the mark behind them."""
        mark = self.seals.sending.begin()
        mark.add(content)
        self.sock.sendall(content + mark.end())

    def hear(self) -> Any:
        head = self.read(LENGTH.size)
        body = self.read(LENGTH.unpack(head)[0])
        self._check(head + body)
        return _decode(body)

    def hear_pages(self, num_bytes: int) -> bytes:
        content = self.read(num_bytes)
        self._check(content)
        return content

    def read(self, num_bytes: int) -> bytes:
        """Raises EOFError."""
        content = b""
        while len(content) < num_bytes:
            got = self.sock.recv(num_bytes - len(content))
            if not got:
                raise EOFError
            content += got
        return content

    def is_over(self) -> bool:
        """Wait until the other side ends the connection."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True

    def greet(
        self, secret: str = "", room: str = "r", facts: Mapping[str, str] = FACTS
    ) -> Welcome | Decline:
        """As a decode server."""
        challenge = self.hear()
        assert isinstance(challenge, Challenge)
        hello = Hello(os.urandom(NONCE_BYTES), b"", dict(facts), "127.0.0.1:1", room)
        keys = GreetingKeys(secret, challenge.nonce, hello)
        self.say(msgspec.structs.replace(hello, proof=keys.proof_of_decode))
        answer = self.hear()
        if isinstance(answer, Welcome):
            assert answer.proof == keys.proof_of_prefill
            self.seals = Seals(keys.from_decode, keys.from_prefill)
        return answer  # type: ignore[no-any-return]

    def welcome(self, secret: str = "") -> Hello:
        """As a prefill server."""
        nonce = os.urandom(NONCE_BYTES)
        self.say(Challenge(VERSION, nonce))
        hello = self.hear()
        assert isinstance(hello, Hello)
        keys = GreetingKeys(secret, nonce, hello)
        self.say(Welcome(keys.proof_of_prefill))
        self.seals = Seals(keys.from_prefill, keys.from_decode)
        return hello

    def _check(self, content: bytes) -> None:
        seal: Seal = self.seals.receiving
        mark = seal.begin()
        mark.add(content)
        assert self.read(seal.size) == mark.end()


class RogueLender:
    """Listens as a prefill server, and does with each connection what `acts` says."""

    def __init__(self, acts: Callable[[Peer], None]) -> None:
        self._acts = acts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> RogueLender:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(HANG_S)
        assert not self.errors

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with Peer(sock) as peer:
                try:
                    self._acts(peer)
                except (OSError, EOFError):
                    pass  # the other side has left
                except BaseException as exc:
                    self.errors.append(exc)


def frames(content: bytes, mark_size: int) -> Iterator[bytes]:
    """What was sent in one direction before any page, in messages with their marks."""
    while content:
        end = LENGTH.size + LENGTH.unpack_from(content)[0] + mark_size
        yield content[:end]
        content = content[end:]
