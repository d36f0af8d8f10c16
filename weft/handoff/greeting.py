"""How two servers get to know each other: both show that they know the secret, and compare all that
the bits of their K and V depend on.

Neither says the secret. The proof of a side is an HMAC over both nonces, so that it can be used for
this connection alone. The link itself is not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Mapping

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

GREETING_S = 5.0
NONCE_BYTES = 32


class SentAway(Exception):
    """The other side gives nothing. The message says why."""


async def welcome(
    connection: Connection, secret: str, facts: Mapping[str, str] | str, lease_s: float
) -> None:
    """The part of the server that lends. `facts`: its own, or why it lends nothing. Raises SentAway
    for a client that is sent away."""
    nonce = os.urandom(NONCE_BYTES)
    await connection.send(Challenge(VERSION, nonce))
    hello = await connection.expect(Hello, GREETING_S)
    why = ""
    if not hmac.compare_digest(hello.proof, _proof(secret, b"decode", nonce, hello.nonce)):
        why = "it has another secret (--handoff-secret)"
    elif isinstance(facts, str):
        why = facts
    else:
        why = difference(facts, hello.facts)
    if why:
        await connection.send(Decline(why))
        raise SentAway(why)
    connection.max_bytes = MAX_MESSAGE_BYTES
    proof = _proof(secret, b"prefill", nonce, hello.nonce)
    await connection.send(Welcome(proof, lease_s))


async def greet(
    connection: Connection, secret: str, facts: Mapping[str, str], timeout_s: float = GREETING_S
) -> Welcome:
    """The part of the server that takes. Raises SentAway, also where it refuses itself, BadSpeech,
    and TimeoutError."""
    challenge = await connection.expect(Challenge, timeout_s)
    if challenge.version != VERSION:
        raise SentAway(f"it speaks version {challenge.version} of the protocol, not {VERSION}")
    nonce = os.urandom(NONCE_BYTES)
    proof = _proof(secret, b"decode", challenge.nonce, nonce)
    await connection.send(Hello(nonce, proof, dict(facts)))
    answer = await asyncio.wait_for(connection.receive(), timeout_s)
    if isinstance(answer, Decline):
        raise SentAway(answer.message)
    if not isinstance(answer, Welcome):
        raise BadSpeech("no answer to a greeting")
    if not hmac.compare_digest(answer.proof, _proof(secret, b"prefill", challenge.nonce, nonce)):
        raise SentAway("it has another secret (--handoff-secret)")
    connection.max_bytes = MAX_MESSAGE_BYTES
    return answer


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """The first fact that is not the same on both sides, in a line; nothing if all are. `here` are
    those of the server that lends."""
    for name in [*here, *there]:
        own = here.get(name, "not known")
        other = there.get(name, "not known")
        if own != other:
            return f"the {name} is {own:.120} there, and {other:.120} here"
    return ""


def _proof(secret: str, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"weft handoff " + side + first + second, "sha256")
