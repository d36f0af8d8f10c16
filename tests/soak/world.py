"""What the behaviours share: the server, the ledger, and what must be told apart while they disturb
each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tests.soak.answers import Answers
from tests.soak.ledger import Ledger


@dataclass
class World:
    port: int
    model: str  # the folder of the model, for updates of its weights
    golden: dict[str, str]  # prompt -> its greedy continuation
    answers: Answers  # that are asked again when the server is idle
    engine_pid: int
    may: frozenset[str] = (
        frozenset()
    )  # what may happen to any request now: "abort", or a status such as "503"
    ledger: Ledger = field(default_factory=Ledger)
    exclusive: asyncio.Lock = field(
        default_factory=asyncio.Lock
    )  # for what must not be undone by another
    scale: float = 1.0  # of the lengths of outputs: how much a run wants of each request
    names: int = 0

    def name(self) -> str:
        """A name that no other request has."""
        self.names += 1
        return f"soak-{self.names}"

    def tokens(self, most: int) -> int:
        """How many tokens a request asks for at most that would ask for `most`."""
        return max(1, round(most * self.scale))
