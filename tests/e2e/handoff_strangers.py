"""Strangers at the handoff port of a prefill server, who do not know its secret, and a false lender that a decode server
is told of by a client."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable

import msgspec

from tests.handoff.pair import FACTS
from tests.handoff.peer import Peer
from tests.tiers.pool import HANG_S
from weft.handoff.greeting import NONCE_BYTES
from weft.handoff.wire import LENGTH, VERSION, Challenge, Hello, Welcome

LARGEST = 2**32 - 1  # that the length of a message may claim
DRIP_S = 0.05


def come(port: int, rng: random.Random) -> str:
    """One of the strangers talks to the lender at this port. Returns which."""
    act = rng.choice(STRANGERS)
    with contextlib.suppress(OSError, EOFError, AssertionError), Peer.asking(port) as peer:
        act(peer, rng)
    return act.__name__


def rubbish(peer: Peer, rng: random.Random) -> None:
    """Random bytes as the first message."""
    peer.hear()
    peer.say(rng.randbytes(rng.choice([1, 200, 60_000])))
    peer.is_over()


def endless(peer: Peer, rng: random.Random) -> None:
    """A message that claims to be longer than any may be."""
    peer.sock.sendall(LENGTH.pack(LARGEST) + rng.randbytes(1_000))
    peer.is_over()


def dripping(peer: Peer, rng: random.Random) -> None:
    """A greeting in single bytes, which the client does not finish."""
    for byte in LENGTH.pack(300) + rng.randbytes(20):
        peer.sock.sendall(bytes([byte]))
        time.sleep(DRIP_S)


def silent(peer: Peer, rng: random.Random) -> None:
    """A connection on which nothing is said for a moment."""
    time.sleep(rng.uniform(0.0, 2.0))


def without_secret(peer: Peer, rng: random.Random) -> None:
    """A right greeting with the keys of no secret, and a room that may be another client's."""
    peer.greet("", room=str(rng.randrange(2**63)))


def with_a_false_proof(peer: Peer, rng: random.Random) -> None:
    """A greeting whose proof is random, followed by a message as if it had been accepted."""
    peer.hear()
    peer.say(Hello(os.urandom(NONCE_BYTES), rng.randbytes(32), FACTS, "127.0.0.1:1", "r"))
    peer.say(rng.randbytes(64))
    peer.is_over()


STRANGERS: tuple[Callable[[Peer, random.Random], None], ...] = (
    rubbish,
    endless,
    dripping,
    silent,
    without_secret,
    with_a_false_proof,
)


def lend_falsely(peer: Peer) -> None:
    """What a false lender does with a decode server that asks it: it accepts, and sends pages of zeros."""
    peer.say(Challenge(VERSION, os.urandom(NONCE_BYTES)))
    hello = peer.hear()
    assert isinstance(hello, Hello)
    peer.say(Welcome(os.urandom(len(hello.proof))))
    with contextlib.suppress(OSError):
        peer.say(msgspec.msgpack.encode({"type": "ready", "have": 0, "num_tokens": 1 << 20}))
        peer.sock.sendall(bytes(1 << 16))
        peer.sock.shutdown(socket.SHUT_WR)
        peer.sock.settimeout(HANG_S)
        peer.is_over()
