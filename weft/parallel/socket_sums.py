"""What ranks of one model do together, over sockets that join each to every other one.

    small rows   all send theirs to all, each adds up all              one message each way
    large ones   each adds up a part of its own, and sends the sum     two messages each way

Terms are added in the order of ranks, so all ranks have the same bits, whatever the way. Ranks meet
in a store of torch. Who connects proves that it knows the secret of the nodes and the number that
rank 0 has drawn; what is sent afterwards is not encrypted.
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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.ops.sharding import RankLost
from weft.parallel.peers import Peers, read_exactly

FloatArray = NDArray[np.float32]

# What all may send before anybody reads: it fits into the buffers of sockets.
SMALL_BYTES = 1 << 15
NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
RANK = struct.Struct("<I")
TOKEN = "weft/token"
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
        try:
            _meet(ends, store, rank, size, time.monotonic() + timeout_s, address, secret)
        except (OSError, RuntimeError) as exc:
            for end in ends.values():
                end.close()
            raise RankLost(
                f"rank {rank}: the {size} ranks did not come together within {timeout_s:g} s"
            ) from exc
        self._peers = Peers(rank, ends, timeout_s, called="rank")

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
        whole = bytearray(content)
        for other in self._peers.others:
            whole += heard[other]
        return torch.frombuffer(whole, dtype=x.dtype).reshape(self.size, *x.shape)

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


def _meet(
    ends: dict[int, socket.socket],
    store: Any,
    rank: int,
    size: int,
    until_s: float,
    address: str,
    secret: str,
) -> None:
    """Fill `ends` with a connection to each other rank: this one calls those before it, and those
    behind it call. Raises OSError and RuntimeError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        if rank == 0:
            store.set(TOKEN, secrets.token_hex(NONCE_BYTES))
        store.set(f"weft/{rank}", f"{address} {listener.getsockname()[1]}")
        key = hashlib.sha256(secret.encode("utf-8", "surrogatepass") + store.get(TOKEN)).digest()
        for other in range(rank):
            host, port = store.get(f"weft/{other}").decode().split()
            end = socket.create_connection((host, int(port)), _left_s(until_s))
            ends[other] = end
            if _greet(end, key, rank, calls=True) != other:
                raise ConnectionError(f"rank {other} is another one")
        while len(ends) < size - 1:
            listener.settimeout(_left_s(until_s))
            end, _ = listener.accept()
            other = -1
            with suppress(OSError):
                end.settimeout(min(_left_s(until_s), GREETING_S))
                other = _greet(end, key, rank, calls=False)
            if rank < other < size and other not in ends:
                ends[other] = end
            else:
                end.close()  # a stranger
    for end in ends.values():
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _greet(end: socket.socket, key: bytes, rank: int, *, calls: bool) -> int:
    """Tell each other which ranks both are, and that they know the key. Raises OSError."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    end.sendall(nonce)
    theirs = bytes(read_exactly(end, NONCE_BYTES))
    number = RANK.pack(rank)
    end.sendall(number + _proof(key, theirs, number, calls=calls))
    answer = bytes(read_exactly(end, RANK.size + PROOF_BYTES))
    other = answer[: RANK.size]
    if not hmac.compare_digest(answer[RANK.size :], _proof(key, nonce, other, calls=not calls)):
        raise ConnectionError("it does not know the secret")
    return int(RANK.unpack(other)[0])


def _proof(key: bytes, nonce: bytes, number: bytes, *, calls: bool) -> bytes:
    """Of either side: what one has said is not taken from the other."""
    return hmac.digest(key, nonce + number + bytes([calls]), "sha256")


def _left_s(until_s: float) -> float:
    """Raises TimeoutError."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
