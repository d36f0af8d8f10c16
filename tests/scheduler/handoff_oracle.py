"""Another server of what `OracleRunner` has for K and V: it asks for what is lent, and gives what
is asked for, late, in part, or never.

It looks that nobody touches what is lent until it is withdrawn, and that pages on their way hold
rubbish until they have landed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from tests.scheduler.cache_check import resume_state_memory, states_of
from tests.scheduler.oracle_runner import OracleRunner
from weft.arrays import IntArray
from weft.config.handoff import REASONS
from weft.memory.allocator import slots_of
from weft.memory.handoff.protocol import (
    NOTHING_NEW,
    FoundKv,
    HandoffNews,
    Missed,
    NoHandoff,
    RoomAddress,
)
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey
from weft.memory.tiers.protocol import Landed

RUBBISH = -77
NEVER = float("inf")


@dataclass
class Coming:
    """Pages on their way."""

    ticket: int
    pull: int
    key: CacheKey
    start: int
    pages: IntArray
    resume_state: IntArray
    turns: float
    is_cancelled: bool = False


class OracleHandoff(NoHandoff):
    """Both sides. `mood`: quick, slow, moody or silent."""

    def __init__(self, page_size: int, mood: str, seed: str) -> None:
        self.page_size = page_size
        self.mood = mood
        self.rng = random.Random(seed)
        self.runner: OracleRunner | None = None
        self.expected: set[str] = set()
        self.lent: dict[str, tuple[CacheKey, IntArray, IntArray]] = {}
        self.states: dict[str, list[int]] = {}  # of what is lent, whatever the weights are by now
        self.asked: dict[int, tuple[CacheKey, int, float]] = {}  # key, have, turns
        self.open: set[int] = set()
        self.coming: dict[int, Coming] = {}
        self.pull_of: dict[int, int] = {}
        self.landed: list[Landed] = []
        self.missed: list[Missed] = []
        self.num_lent = 0
        self.num_read = 0
        self.num_resume_states = 0  # places that were lent, and resume states that have come
        self.num_silent = 0
        self.num_dismissed = 0
        self.num_withdrawn = 0
        self.num_renewed = 0

    # Lending

    def expect(self, room: str) -> None:
        self.expected.add(room)

    def lend(
        self, room: str, key: CacheKey, pages: IntArray, resume_state: IntArray = NO_PAGES
    ) -> None:
        assert len(pages) * self.page_size == len(key.tokens) // TOKEN_BYTES
        assert self._has_resume_states == bool(len(resume_state))
        self.num_resume_states += len(resume_state)
        self.lent[room] = (key, pages.copy(), resume_state.copy())
        self.states[room] = states_of(self.runner, key)
        self.num_lent += len(pages)
        self.look_at_all()

    def refuse(self, room: str, why: str) -> None:
        assert why
        self.expected.discard(room)

    def withdraw(self, room: str, why: str) -> None:
        assert why
        self.look_at_all()
        self.lent.pop(room, None)  # it may not have come so far
        self.num_withdrawn += 1

    def look_at_all(self) -> None:
        """Another server may read what is lent at any time."""
        assert self.runner is not None
        for room, (_, pages, resume_state) in self.lent.items():
            found = self.runner.state[slots_of(pages, self.page_size)].tolist()
            assert found == self.states[room], "pages changed while they were lent"
            if len(resume_state):
                memory, places = resume_state_memory(self.runner, resume_state, self.page_size)
                last = self.states[room][-len(places) :]
                assert memory[places].tolist() == last, "a resume state changed while it was lent"

    # Taking

    def ask(self, pull: int, address: RoomAddress, key: CacheKey, have: int) -> None:
        assert have * TOKEN_BYTES < len(key.tokens)
        self.open.add(pull)
        self.asked[pull] = (key, have, self._turns())

    def bind(self, ticket: int, pull: int) -> None:
        self.pull_of[ticket] = pull

    @property
    def _has_resume_states(self) -> bool:
        assert self.runner is not None
        return self.runner.windows is not None or self.runner.states is not None

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        assert len(pages) * self.page_size == len(key.tokens) // TOKEN_BYTES - start
        assert self._has_resume_states or not len(resume_state)
        pull = self.pull_of.pop(ticket)
        if pull not in self.open:
            self.landed.append(Landed(ticket, 0, 0.0))
            return
        self.coming[ticket] = Coming(
            ticket, pull, key, start, pages.copy(), resume_state.copy(), self._turns()
        )
        self._spoil(self.coming[ticket])

    def cancel(self, ticket: int) -> None:
        coming = self.coming.pop(ticket, None)
        if coming is None:
            return
        read = self._read(coming)
        self.landed.append(self.rng.choice([Landed(ticket, 0, 0.0), read]))
        self._miss(coming.pull, "lost")

    def leave(self, pull: int) -> None:
        self.asked.pop(pull, None)
        if not any(coming.pull == pull for coming in self.coming.values()):
            self.open.discard(pull)

    def dismiss(self, address: RoomAddress) -> None:
        self.num_dismissed += 1

    def renew(self, why: str) -> None:
        assert why
        self.num_renewed += 1
        for pull in self.asked:
            self._miss(pull, "refused")
        self.asked.clear()
        for ticket in list(self.coming):
            self.cancel(ticket)

    def take(self) -> HandoffNews:
        self.look_at_all()
        found: list[FoundKv] = []
        for pull, (key, have, turns) in list(self.asked.items()):
            self.asked[pull] = (key, have, turns - 1)
            if turns > 0:
                continue
            del self.asked[pull]
            if self._fails():
                self._miss(pull, self.rng.choice(REASONS[:4]))
                continue
            most = len(key.tokens) // TOKEN_BYTES
            if self._fails():
                most = self.rng.randrange(have + 1, most + 1)
            most = most // self.page_size * self.page_size
            if most <= have:
                self._miss(pull, "refused")
            else:
                found.append(FoundKv(pull, most))
        for coming in list(self.coming.values()):
            self._spoil(coming)
            coming.turns -= 1
            if coming.turns >= 0:
                continue
            del self.coming[coming.ticket]
            read = self._read(coming)
            self.landed.append(read)
            is_whole = read.num_tokens == len(coming.pages) * self.page_size
            if not is_whole or (len(coming.resume_state) and not read.has_resume_state):
                self._miss(coming.pull, self.rng.choice(["lost", "damaged"]))
        renewed: list[str] = []
        returned: list[str] = []
        for room in [*self.lent, *self.expected]:
            if self.mood != "silent" and self.rng.random() < 0.1:
                self.rng.choice([renewed, returned]).append(room)
        news = HandoffNews(
            tuple(renewed), tuple(returned), tuple(found), tuple(self.landed), tuple(self.missed)
        )
        self.landed = []
        self.missed = []
        return NOTHING_NEW if news == NOTHING_NEW else news

    def let_all_end(self) -> None:
        self.mood = "quick"
        for coming in self.coming.values():
            coming.turns = 0
        for pull, (key, have, _) in list(self.asked.items()):
            self.asked[pull] = (key, have, 0)

    # Inside

    def _miss(self, pull: int, reason: str) -> None:
        self.open.discard(pull)
        self.missed.append(Missed(pull, reason, "it was to be"))

    def _fails(self) -> bool:
        return self.mood in ("slow", "moody") and self.rng.random() < 0.15

    def _turns(self) -> float:
        match self.mood:
            case "quick":
                return self.rng.choice([0, 1])
            case "slow":
                return self.rng.choice([1, 5, 20])
            case "silent":
                return NEVER
        turns = self.rng.choice([0, 3, 20, 100, NEVER])
        self.num_silent += turns == NEVER
        return turns

    def _spoil(self, coming: Coming) -> None:
        assert self.runner is not None
        slots = slots_of(coming.pages, self.page_size)
        assert not any(np.isin(step.plan.slots, slots).any() for step in self.runner.pending)
        self.runner.state[slots] = RUBBISH
        if len(coming.resume_state):
            memory, places = resume_state_memory(self.runner, coming.resume_state, self.page_size)
            memory[places] = RUBBISH

    def _read(self, coming: Coming) -> Landed:
        """What has come, from the first token on."""
        assert self.runner is not None
        num_pages = len(coming.pages)
        if num_pages and self._fails():
            num_pages = self.rng.randrange(num_pages)
        num_tokens = num_pages * self.page_size
        slots = slots_of(coming.pages, self.page_size)[:num_tokens]
        states = states_of(self.runner, coming.key)
        self.runner.state[slots] = states[coming.start :][:num_tokens]
        self.num_read += num_tokens
        has_resume_state = bool(len(coming.resume_state)) and num_pages == len(coming.pages)
        if has_resume_state and self._fails():
            has_resume_state = False
        if has_resume_state:
            memory, places = resume_state_memory(self.runner, coming.resume_state, self.page_size)
            memory[places] = states[-len(places) :]
            self.num_resume_states += 1
        return Landed(coming.ticket, num_tokens, 0.0, has_resume_state)
