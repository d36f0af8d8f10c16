"""The greeting of two servers: each proves that it knows the secret, and they compare all facts on
which their K and V depend.

The secret is never sent. The proof of a side is an HMAC over both nonces, so it is valid for this
connection only. The connection itself is not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import os

from weft.handoff.facts import Facts
from weft.handoff.wire import (
    MAX_MESSAGE_BYTES,
    VERSION,
    BadSpeech,
    Challenge,
    Connection,
    Decline,
    Hello,
    Welcome,
)
from weft.observe.log import EventLog

GREETING_S = 5.0
NONCE_BYTES = 32
MAX_TOLD = 64  # refusals that are logged separately

log = EventLog("handoff")


class SentAway(Exception):
    """The other side refuses. The message says why."""


class Refusals:
    """Logs each new refusal, and repeated ones only rarely."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def tell(self, peer: str, why: str) -> None:
        if (peer, why) in self._told or len(self._told) >= MAX_TOLD:
            log.seldom("refused_again", peer=peer, why=why)
            return
        self._told.add((peer, why))
        log.warning("refused", peer=peer, why=why)

    def forget(self) -> None:
        """Log refusals again, because they may have other reasons with new weights."""
        self._told.clear()


async def welcome(connection: Connection, secret: str, facts: Facts | str, lease_s: float) -> None:
    """The greeting by the server that lends. `facts`: its own facts, or why it lends nothing.
    Raises SentAway for a client that is refused."""
    nonce = os.urandom(NONCE_BYTES)
    await connection.send(Challenge(VERSION, nonce))
    hello = await asyncio.wait_for(connection.receive(), GREETING_S)
    if isinstance(hello, Decline):
        raise SentAway(hello.message)
    if not isinstance(hello, Hello):
        raise BadSpeech("no greeting")
    why = ""
    why_here = ""
    if not hmac.compare_digest(hello.proof, _proof(secret, b"decode", nonce, hello.nonce)):
        why = "it has another secret (--handoff-secret)"
    elif isinstance(facts, str):
        why = f"{facts} there"
        why_here = f"{facts} here"
    else:
        why = difference(facts, hello.facts)
        why_here = difference(hello.facts, facts)
    if why:
        await connection.send(Decline(why))
        raise SentAway(why_here or why)
    connection.max_bytes = MAX_MESSAGE_BYTES
    proof = _proof(secret, b"prefill", nonce, hello.nonce)
    await connection.send(Welcome(proof, lease_s))


async def greet(
    connection: Connection, secret: str, facts: Facts, timeout_s: float = GREETING_S
) -> Welcome:
    """The greeting by the server that takes. Raises SentAway if either side refuses, BadSpeech, and
    TimeoutError."""
    challenge = await connection.expect(Challenge, timeout_s)
    if challenge.version != VERSION:
        why = f"the protocol has version {challenge.version} there, and version {VERSION} here"
        await connection.send(Decline(why))
        raise SentAway(why)
    nonce = os.urandom(NONCE_BYTES)
    proof = _proof(secret, b"decode", challenge.nonce, nonce)
    await connection.send(Hello(nonce, proof, dict(facts)))
    answer = await asyncio.wait_for(connection.receive(), timeout_s)
    if isinstance(answer, Decline):
        raise SentAway(answer.message)
    if not isinstance(answer, Welcome):
        raise BadSpeech("no answer to a greeting")
    if not hmac.compare_digest(answer.proof, _proof(secret, b"prefill", challenge.nonce, nonce)):
        why = "it has another secret (--handoff-secret)"
        await connection.send(Decline(why))
        raise SentAway(why)
    connection.max_bytes = MAX_MESSAGE_BYTES
    return answer


def difference(there: Facts, here: Facts) -> str:
    """The first fact that differs, in words for the side `here`; empty if all facts are equal."""
    for name in [*there, *here]:
        theirs = there.get(name, "not known")
        own = here.get(name, "not known")
        if theirs != own:
            return f"the {name} is {theirs:.120} there, and {own:.120} here"
    return ""


def _proof(secret: str, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"weft handoff " + side + first + second, "sha256")
