"""A coding agent's session of 16 turns with pauses, beside a flood of background requests.

In virtual time, each turn has its first token nearly as soon as without the flood.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.engine.engine import Engine
from weft.messages.pins import ToolPause
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import PRESETS, CostRunner, TrueLengths, VirtualClock
from weft.sim.run import fail
from weft.sim.trace import EOS, FILLER

NUM_TURNS = 16
PAUSE_S = 10.0  # of a tool
MOST = 1.2  # times the time to the first token alone
VOCAB = 32_000
SETTINGS = SchedulerSettings(
    num_pages=1_200,
    page_size=16,
    max_running_requests=16,
    context_length=16_384,
    vocab_size=VOCAB,
    eos_token_ids=(EOS,),
    chunked_prefill_size=512,
    max_pinned=0.75,
    tool_pause_s=120.0,
    max_slowdown=2.5,
    background_slowdown=1.1,
    background_step_ms=50.0,
)


class Session(NamedTuple):
    first_s: list[float]  # by turn, from its arrival to its first token
    evicted: int  # tokens


class SessionRun:
    """An engine in virtual time, one chat, and requests that come at random."""

    def __init__(self) -> None:
        self._clock = VirtualClock()
        self._lengths = TrueLengths()
        runner = CostRunner(PRESETS["cpu"], self._clock, self._lengths)
        self._engine = Engine(SETTINGS, runner, clock=self._clock, overlap=True, on_failure=fail)
        self._rng = np.random.default_rng(5)
        self._sent_s: list[float] = []
        self._first_s: dict[int, float] = {}

    def play(self, flood_s: float) -> Session:
        """`flood_s`: mean time between two requests of the flood; 0: there is none."""
        chat = self._text(4_000)
        turns: list[int] = []
        open_turn = -1
        turn_s, next_s = 20.0, 0.0 if flood_s else np.inf
        while len(turns) < NUM_TURNS or open_turn >= 0:
            while next_s <= self._clock.now:
                self._send(self._text(600), 60, is_flood=True)
                next_s += self._rng.exponential(flood_s)
            if open_turn < 0 and turn_s <= self._clock.now:
                open_turn = self._send(chat, 40)
                turns.append(open_turn)
            if not self._engine.has_work:
                self._clock.wait_until(min(turn_s, next_s))
            elif self._has_ended(open_turn):
                chat = [*chat, *[FILLER] * 40, *self._text(200)]
                open_turn = -1
                turn_s = self._clock.now + PAUSE_S
        first_s = [self._first_s[id] - self._sent_s[id] for id in turns]
        return Session(first_s, self._engine.scheduler.stats().total_evicted_tokens)

    def _text(self, length: int) -> list[int]:
        return self._rng.integers(10, VOCAB, length).tolist()

    def _send(self, prompt: list[int], output_len: int, *, is_flood: bool = False) -> int:
        id = len(self._sent_s)
        self._sent_s.append(self._clock.now)
        self._lengths.add(id, len(prompt) + output_len - 1)
        message = GenerateRequest(
            id=id,
            rid=f"#{id}",
            input_ids=np.array(prompt, dtype=np.int32).tobytes(),
            sampling=SamplingParams(max_new_tokens=output_len + 1, temperature=0.0, seed=id),
            tenant="flood" if is_flood else "agent",
            background=is_flood,
            may_pause=not is_flood,
        )
        self._engine.submit(message)
        return id

    def _has_ended(self, turn: int) -> bool:
        """Run a step. Whether the turn has ended in it, with a call of a tool."""
        has_ended = False
        for message in self._engine.step():
            if isinstance(message, StepOutput):
                for id in np.frombuffer(message.ids, dtype=np.int64).tolist():
                    self._first_s.setdefault(id, self._clock.now)
                has_ended = has_ended or any(end.id == turn for end in message.finished)
        if has_ended:
            self._engine.submit(ToolPause(id=turn, tools=("bash",)))
        return has_ended


def test_turns_of_an_agent_are_as_soon_beside_a_flood_in_the_background() -> None:
    alone = SessionRun().play(0.0)
    beside = SessionRun().play(2.0)
    assert beside.evicted > 10_000, "the flood has not needed the memory of the session"
    later = zip(beside.first_s[1:], alone.first_s[1:], strict=True)
    assert all(with_flood <= MOST * by_itself for with_flood, by_itself in later)
