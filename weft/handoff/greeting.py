"""How two servers get to know each other: both show that they know the secret, and compare all that
the bits of their K and V depend on.

Neither says the secret. The proof of a side is an HMAC over both nonces, so that it can be used for
this connection alone. The link itself is not encrypted.
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
MAX_TOLD = 64  # refusals with a line of their own

log = EventLog("handoff")


class SentAway(Exception):
    """The other side gives nothing. The message says why."""


class Refusals:
    """Writes a line to the log for each one that is new, and seldom one for all that come again."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def tell(self, peer: str, why: str) -> None:
        if (peer, why) in self._told or len(self._told) >= MAX_TOLD:
            log.seldom("refused_again", peer=peer, why=why)
            return
        self._told.add((peer, why))
        log.warning("refused", peer=peer, why=why)

    def forget(self) -> None:
        """They may come again for other reasons: the weights are others."""
        self._told.clear()


async def welcome(connection: Connection, secret: str, facts: Facts | str, lease_s: float) -> None:
    """The part of the server that lends. `facts`: its own, or why it lends nothing. Raises SentAway
    for a client that is sent away."""
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
    """The part of the server that takes. Raises SentAway, also where it refuses itself, BadSpeech,
    and TimeoutError."""
    challenge = await connection.expect(Challenge, timeout_s)
    if challenge.version != VERSION:
        why = f"version {challenge.version} of the protocol is spoken there, and {VERSION} here"
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
    """The first fact that is not the same on both sides, in a line for whoever is `here`; nothing
    if all are."""
    for name in [*there, *here]:
        theirs = there.get(name, "not known")
        own = here.get(name, "not known")
        if theirs != own:
            return f"the {name} is {theirs:.120} there, and {own:.120} here"
    return ""


def _proof(secret: str, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"weft handoff " + side + first + second, "sha256")
