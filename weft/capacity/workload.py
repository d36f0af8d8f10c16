"""What arrives at a server, at a level: a number of users, or a multiple of recorded traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from weft.capacity.guesses import GuessModel, outcomes_for
from weft.sim.synthetic import Lengths
from weft.sim.trace import FIRST_TOKEN, Arrival

MAX_USERS = 4_096
# A few users need no more requests than this, and than this for each of them.
FEW_REQUESTS = 40
FEW_MESSAGES = 12
STEP_OF_USERS = 1.1  # above the first numbers, from one level to the next
# Token ids of prompts: every vocabulary has them, and none is a control token.
FIRST_ID = 100
LAST_ID = 1_000


class LeveledLoad(Protocol):
    """A source of requests at any of its levels."""

    @property
    def unit(self) -> str:
        """The unit of levels, for people: "users"."""
        ...

    @property
    def levels(self) -> Sequence[float]:
        """The levels that are tried, ascending."""
        ...

    def arrivals(self, level: float) -> list[Arrival]:
        """The requests at this level: always the same ones, and at a higher level more."""
        ...


def numbers_of_users() -> list[float]:
    """1, 2, 3, ... and from 10 on a tenth more each time."""
    found = [1]
    while found[-1] < MAX_USERS:
        found.append(max(found[-1] + 1, int(found[-1] * STEP_OF_USERS)))
    return [float(number) for number in found]


@dataclass(frozen=True, kw_only=True)
class ChatUsers:
    """Users who chat: each reads an answer, thinks, and sends the next message, which comes after
    all before it. The length of an output is known to the scheduler (`ignore_eos`)."""

    prompt: Lengths  # new tokens in a message
    output: Lengths
    turns: int = 1  # messages of a chat
    think_s: float = 10.0  # mean, from an answer to the next message
    shared_len: int = 0  # tokens at the beginning of each chat, the same for all
    context_length: int = 131_072  # a chat that would be longer begins anew
    vocab_size: int = 32_768
    guesses: GuessModel | None = None  # of the tokens of its outputs; None: all are wrong
    requests: int = 160  # at most, of all users together, or one of each if these are more
    seed: int = 0

    unit = "users"

    @property
    def levels(self) -> Sequence[float]:
        return numbers_of_users()

    def arrivals(self, level: float) -> list[Arrival]:
        num_users = round(level)
        enough = max(FEW_REQUESTS, FEW_MESSAGES * num_users)
        num_each = max(-(-min(self.requests, enough) // num_users), 1)
        chats = [self._user(number, num_each) for number in range(num_users)]
        chats.sort(key=lambda chat: chat[0].time_s)
        found: list[Arrival] = []
        for first, *later in chats:
            found.append(first)
            for arrival in later:
                found.append(arrival._replace(after=len(found) - 1))
        return found

    def _user(self, number: int, num_requests: int) -> list[Arrival]:
        """The requests of one user, without their predecessors."""
        rng = np.random.default_rng([self.seed, number])
        of_all = np.random.default_rng(self.seed)
        head = self._tokens(of_all, self.shared_len)
        prompt = head
        # Users are not all at the first message of a chat at once.
        num_left = int(rng.integers(1, self.turns, endpoint=True))
        found: list[Arrival] = []
        for index in range(num_requests):
            [new_len] = self.prompt.draw(rng, 1)
            [output_len] = self.output.draw(rng, 1)
            # A longer one cannot be served, however long it is.
            new_len = min(new_len, self.context_length)
            output_len = min(output_len, self.context_length)
            new = self._tokens(rng, new_len)
            total = len(prompt) // 4 + new_len + output_len
            if not num_left or total > self.context_length:
                prompt = head
                num_left = self.turns
            num_left -= 1
            prompt += new
            time_s = self.think_s * rng.random()
            if index:
                time_s = rng.exponential(self.think_s) if self.think_s else 0.0
            output = self._tokens(rng, output_len)
            arrival = Arrival(
                time_s=time_s,
                prompt=prompt,
                output_len=output_len,
                max_new_tokens=output_len,
                ignore_eos=True,
                output=output,
                guesses=self._guesses(number, index, output_len),
            )
            found.append(arrival)
            prompt += output
        return found

    def _tokens(self, rng: np.random.Generator, length: int) -> bytes:
        last = min(LAST_ID, self.vocab_size)
        highest_first = max(last - 1, FIRST_TOKEN)
        first = min(FIRST_ID, highest_first)
        ids = rng.integers(first, last, length)
        return ids.astype(np.int32).tobytes()

    def _guesses(self, number: int, index: int, length: int) -> bytes:
        """What becomes of guesses in the answer of this user's message with this index."""
        if self.guesses is None:
            return b""
        return outcomes_for(self.guesses, number, index, length)


@dataclass(frozen=True, kw_only=True)
class RecordedTraffic:
    """Requests that were recorded, at a multiple of their rate."""

    recorded: Sequence[Arrival]

    unit = "x the recorded rate"

    @property
    def levels(self) -> Sequence[float]:
        return [2 ** (step / 4) for step in range(-12, 25)]

    def arrivals(self, level: float) -> list[Arrival]:
        return [
            one._replace(time_s=one.time_s / level if one.after < 0 else one.time_s)
            for one in self.recorded
        ]
