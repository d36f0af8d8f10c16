"""What ranks of one model do together, over sockets that join each to every other one.

    small rows   all send theirs to all, each adds up all              one message each way
    large ones   each adds up a part of its own, and sends the sum     two messages each way

Terms are added in the order of ranks, so all ranks have the same bits, whatever the way. Ranks meet
in a store of torch. Who connects proves that it knows the secret of the nodes and the number that
rank 0 has drawn. If there is a secret, all that is sent afterwards bears marks by keys of this
connection; it is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.ops.sharding import RankLost
from weft.parallel.peers import Peers, read_exactly
from weft.seal import Open, Seal, Sealed, Seals

FloatArray = NDArray[np.float32]

# What all may send before anybody reads: it fits into the buffers of sockets.
SMALL_BYTES = 1 << 15
NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
RANK = struct.Struct("<I")
TOKEN = "weft/token"
SALT = b"sums of weft"
GREETING_S = 5.0  # for somebody who has connected to say who it is


class SocketComm:
    """One rank's end of a group of `size` ranks."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        address: str = "127.0.0.1",
        secret: str = "",
    ) -> None:
        """Join, which waits for all others, at most `timeout_s`; so does each later call. `address`
        of this machine is where it listens. Raises RankLost."""
        self.rank = rank
        self.size = size
        store.set_timeout(timedelta(seconds=timeout_s))
        ends: dict[int, socket.socket] = {}
        seals: dict[int, Seals] = {}
        until_s = time.monotonic() + timeout_s
        try:
            with _listener(address) as listener:
                greeter = _meet(store, rank, address, listener, secret)
                _join(ends, seals, store, size, greeter, listener, until_s)
        except (OSError, RuntimeError) as exc:
            for end in ends.values():
                end.close()
            raise RankLost(
                f"rank {rank}: the {size} ranks did not come together within {timeout_s:g} s"
            ) from exc
        self._peers = Peers(rank, ends, timeout_s, called="rank", seals=seals)

    def all_reduce(self, x: Tensor) -> None:
        values: FloatArray = x.numpy().reshape(-1)
        if values.nbytes <= SMALL_BYTES:
            heard = self._peers.call(values.tobytes())
            _add_up(values, self._in_order(values, heard))
            return
        parts = np.array_split(values, self.size)
        mine = parts[self.rank]
        heard = self._peers.swap({other: parts[other].tobytes() for other in self._peers.others})
        _add_up(mine, self._in_order(mine, heard))
        total = mine.tobytes()
        sums = self._peers.swap(dict.fromkeys(self._peers.others, total))
        for other, data in sums.items():
            parts[other][:] = np.frombuffer(data, np.float32)

    def gather(self, x: Tensor) -> Tensor | None:
        content = x.reshape(-1).view(torch.uint8).numpy().tobytes()
        messages = {other: content if other == 0 else b"" for other in self._peers.others}
        heard = self._peers.swap(messages)
        if self.rank:
            return None
        received = bytearray(content)
        for other in self._peers.others:
            received += heard[other]
        return torch.frombuffer(received, dtype=x.dtype).reshape(self.size, *x.shape)

    def close(self) -> None:
        """Leave."""
        self._peers.close()

    def _in_order(self, mine: FloatArray, heard: Mapping[int, bytearray]) -> list[FloatArray]:
        """The terms of all ranks, this one's at its place."""
        found = []
        for rank in range(self.size):
            is_here = rank == self.rank
            found.append(mine if is_here else np.frombuffer(heard[rank], np.float32))
        return found


def _add_up(into: FloatArray, terms: list[FloatArray]) -> None:
    total = terms[0] + terms[1]
    for term in terms[2:]:
        total += term
    into[:] = total


class Greeted(NamedTuple):
    """Who is at the other end of a connection, and the seals of what both send."""

    rank: int
    seals: Seals


class Greeter:
    """What a rank says first in each connection: which one it is, and that it knows the key.

    The keys of a connection are derived from the numbers that both ends draw for it, so that
    nothing of another connection is taken for its own, and who relays it cannot change anything.
    """

    def __init__(self, rank: int, secret: str, token: bytes) -> None:
        """`token`: the number that rank 0 has drawn. Slow with a secret: a tenth of a second, as
        for each guess of it."""
        self.rank = rank
        self._is_sealed = bool(secret)
        self._key = hashlib.sha256(token).digest()
        if secret:
            known = secret.encode("utf-8", "surrogatepass")
            self._key = hashlib.scrypt(
                known, salt=SALT + token, n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32
            )

    def greet(self, end: socket.socket, *, calls: bool) -> Greeted:
        """`calls`: this end has connected. The other one proves nothing before it has seen that
        this one knows the key. Raises OSError."""
        mine = secrets.token_bytes(NONCE_BYTES)
        end.sendall(mine)
        theirs = bytes(read_exactly(end, NONCE_BYTES))
        nonces = mine + theirs if calls else theirs + mine
        number = RANK.pack(self.rank)
        proof = number + self._derived(b"proof", calls, nonces + number)
        if calls:
            end.sendall(proof)
        answer = bytes(read_exactly(end, RANK.size + PROOF_BYTES))
        other = answer[: RANK.size]
        expected = self._derived(b"proof", not calls, nonces + other)
        if not hmac.compare_digest(answer[RANK.size :], expected):
            raise ConnectionError("it does not know the secret")
        if not calls:
            end.sendall(proof)
        said = nonces + (number + other if calls else other + number)
        seals = Seals(sending=self._seal(calls, said), receiving=self._seal(not calls, said))
        return Greeted(int(RANK.unpack(other)[0]), seals)

    def _seal(self, calls: bool, said: bytes) -> Seal:
        return Sealed(self._derived(b"seal", calls, said)) if self._is_sealed else Open()

    def _derived(self, purpose: bytes, calls: bool, said: bytes) -> bytes:
        """Of either side: what one has said is not taken from the other."""
        return hmac.digest(self._key, purpose + bytes([calls]) + said, "sha256")


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def _meet(store: Any, rank: int, address: str, listener: socket.socket, secret: str) -> Greeter:
    """Tell all other ranks where this one listens. Raises RuntimeError."""
    if rank == 0:
        store.set(TOKEN, secrets.token_hex(NONCE_BYTES))
    store.set(f"weft/{rank}", f"{address} {listener.getsockname()[1]}")
    return Greeter(rank, secret, store.get(TOKEN))


def _join(
    ends: dict[int, socket.socket],
    seals: dict[int, Seals],
    store: Any,
    size: int,
    greeter: Greeter,
    listener: socket.socket,
    until_s: float,
) -> None:
    """Fill `ends` with a connection to each other rank, and `seals`: this one calls those before
    it, and those after it call. Raises OSError and RuntimeError."""
    for other in range(greeter.rank):
        host, port = store.get(f"weft/{other}").decode().split()
        end = socket.create_connection((host, int(port)), _left_s(until_s))
        ends[other] = end
        found, seals[other] = greeter.greet(end, calls=True)
        if found != other:
            raise ConnectionError(f"rank {other} is another one")
    while len(ends) < size - 1:
        listener.settimeout(_left_s(until_s))
        end, _ = listener.accept()
        greeted = None
        with suppress(OSError):
            end.settimeout(min(_left_s(until_s), GREETING_S))
            greeted = greeter.greet(end, calls=False)
        if greeted and greeter.rank < greeted.rank < size and greeted.rank not in ends:
            ends[greeted.rank], seals[greeted.rank] = end, greeted.seals
        else:
            end.close()  # a stranger
    for end in ends.values():
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _left_s(until_s: float) -> float:
    """Raises TimeoutError."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
