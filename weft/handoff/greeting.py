"""The greeting of two servers: each proves that it knows the secret, and they compare all facts on
which their K and V depend.

The secret is never sent. Proofs and keys are HMACs of a key that the secret gives together with all
that both have said: version, fresh nonces of both sides, address, room, facts. So they are valid
for this connection only, and whoever only passes the greeting on can neither read a key nor
write a message afterwards. The connection itself is not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from weft.handoff.facts import Facts
from weft.handoff.wire import (
    MAX_ASK_BYTES,
    VERSION,
    BadSpeech,
    Challenge,
    Connection,
    Decline,
    Hello,
    Welcome,
)
from weft.observe.log import EventLog
from weft.seal import Checksummed, Seal, Sealed, Seals, is_same

GREETING_S = 5.0
NONCE_BYTES = 32
MAX_LOGGED = 64  # refusals that are logged separately
OTHER_SECRET = "it has another secret (--handoff-secret)"

log = EventLog("handoff")


class SentAway(Exception):
    """The other side refuses. The message says why."""


class Refusals:
    """Logs each new refusal, and repeated ones only rarely."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def tell(self, peer: str, why: str) -> None:
        if (peer, why) in self._logged or len(self._logged) >= MAX_LOGGED:
            log.seldom("refused_again", peer=peer, why=why)
            return
        self._logged.add((peer, why))
        log.warning("refused", peer=peer, why=why)

    def forget(self) -> None:
        """Log refusals again, because they may have other reasons with new weights."""
        self._logged.clear()


class Meeting(NamedTuple):
    """What the side that takes wants to talk about."""

    address: str  # of the side that lends, as a client has named it
    room: str


async def welcome(
    connection: Connection, secret: str, known: Callable[[], Awaitable[Facts | str]]
) -> str:
    """The greeting by the server that lends. `known`: its own facts, or why it lends nothing.
    Returns the room that the client asks for. Raises SentAway for a client that is refused."""
    nonce = os.urandom(NONCE_BYTES)
    await connection.send(Challenge(VERSION, nonce))
    hello = await asyncio.wait_for(connection.receive(), GREETING_S)
    if isinstance(hello, Decline):
        raise SentAway(hello.why)
    if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES:
        raise BadSpeech("no greeting")
    keys = GreetingKeys(secret, nonce, hello)
    why = ""
    why_here = ""
    if is_same(hello.proof, keys.proof_of_decode):
        facts = await known()  # which is waited for, so only for those that know the secret
        if isinstance(facts, str):
            why = f"{facts} there"
            why_here = f"{facts} here"
        else:
            why = difference(facts, hello.facts)
            why_here = difference(hello.facts, facts)
    else:
        why = OTHER_SECRET
    if why:
        await connection.send(Decline(why))
        raise SentAway(why_here or why)
    await connection.send(Welcome(keys.proof_of_prefill))
    connection.seals = Seals(sending=keys.from_prefill, receiving=keys.from_decode)
    connection.max_bytes = MAX_ASK_BYTES
    return hello.room


async def greet(
    connection: Connection,
    secret: str,
    facts: Facts,
    meeting: Meeting,
    timeout_s: float = GREETING_S,
) -> None:
    """The greeting by the server that takes. Raises SentAway if either side refuses, BadSpeech, and
    TimeoutError."""
    challenge = await connection.expect(Challenge, timeout_s)
    if challenge.version != VERSION:
        why = f"the protocol has version {challenge.version} there, and version {VERSION} here"
        await connection.send(Decline(why))
        raise SentAway(why)
    if len(challenge.nonce) != NONCE_BYTES:
        raise BadSpeech("no challenge")
    hello = Hello(os.urandom(NONCE_BYTES), b"", dict(facts), meeting.address, meeting.room)
    keys = GreetingKeys(secret, challenge.nonce, hello)
    await connection.send(msgspec.structs.replace(hello, proof=keys.proof_of_decode))
    answer = await asyncio.wait_for(connection.receive(), timeout_s)
    if isinstance(answer, Decline):
        raise SentAway(answer.why)
    if not isinstance(answer, Welcome):
        raise BadSpeech("no answer to a greeting")
    if not is_same(answer.proof, keys.proof_of_prefill):
        raise SentAway(OTHER_SECRET)
    connection.seals = Seals(sending=keys.from_decode, receiving=keys.from_prefill)


class GreetingKeys:
    """The proofs and the seals of one connection. Without a secret anybody can make the proofs, and
    the seals find damage only."""

    def __init__(self, secret: str, nonce: bytes, hello: Hello) -> None:
        """`nonce`: of the side that lends."""
        said = (
            "weft handoff",
            VERSION,
            nonce,
            hello.nonce,
            hello.address,
            hello.room,
            sorted(hello.facts.items()),
        )
        self._key = hmac.digest(secret.encode(), msgspec.msgpack.encode(said), "sha256")
        self._is_secret = bool(secret)
        self.proof_of_decode = self._derived(b"proof of decode")
        self.proof_of_prefill = self._derived(b"proof of prefill")
        self.from_decode = self._seal(b"from decode")
        self.from_prefill = self._seal(b"from prefill")

    def _seal(self, purpose: bytes) -> Seal:
        return Sealed(self._derived(purpose)) if self._is_secret else Checksummed()

    def _derived(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, purpose, "sha256")


def difference(there: Facts, here: Facts) -> str:
    """The first fact that differs, in words for the side `here`; empty if all facts are equal."""
    for name in [*there, *here]:
        theirs = there.get(name, "not known")
        own = here.get(name, "not known")
        if theirs != own:
            return f"the {name:.120} is {theirs:.120} there, and {own:.120} here"
    return ""
