"""Real traffic as a trace: the requests in a journal (`weft serve --journal FILE`), when they came,
and how long their outputs became.

A journal holds what entered the core; how a request ended follows from that. So the journal is
replayed, and a tap between the replay and its engine notes requests and final words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weft.engine.engine import Engine
from weft.journal.replay import Replay
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import BatchGenerate, GenerateRequest
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings
from weft.sim.trace import Arrival


class Journal(NamedTuple):
    settings: SchedulerSettings  # of the engine that wrote it
    arrivals: list[Arrival]  # with their prompts as they were; outputs will be fillers
    num_left_out: int  # requests that were refused or aborted, or open at the end


def read_journal(records: Iterable[bytes]) -> Journal:
    """Raises BadJournal. From the first decision on that this version would not take,
    requests are left out.
    """
    replay = Replay(records)
    tap = _Tap(replay, replay.engine)
    # A replay uses no more of an engine than there is here.
    replay.engine = tap  # type: ignore[assignment]
    replay.run()
    settings = replay.began.settings
    arrivals = []
    for time_s, message in tap.sent:
        finish = tap.finished.get(message.id)
        if finish is None or finish.reason not in ("stop", "length"):
            continue
        first_s = tap.sent[0][0]
        arrival = _arrival(
            max(time_s - first_s, 0.0),
            message,
            finish.completion_tokens,
            settings.context_length,
        )
        arrivals.append(arrival)
    num_left_out = len(tap.sent) - len(arrivals)
    return Journal(settings, arrivals, num_left_out)


class _Tap:
    """The engine of a replay, listened to."""

    def __init__(self, replay: Replay, engine: Engine) -> None:
        self.sent: list[tuple[float, GenerateRequest]] = []
        self.finished: dict[int, Finish] = {}
        self._replay = replay
        self._engine = engine

    @property
    def scheduler(self) -> Scheduler:
        return self._engine.scheduler

    def submit(self, message: ToEngine) -> FromEngine | None:
        reply = self._engine.submit(message)
        # The last reading of the clock was the message's arrival.
        now = self._replay.last_s
        if isinstance(message, GenerateRequest):
            self.sent.append((now, message))
        elif isinstance(message, BatchGenerate):
            for member in message.members():
                self.sent.append((now, member))
        return reply

    def step(self) -> list[FromEngine]:
        replies = self._engine.step()
        for reply in replies:
            if not isinstance(reply, StepOutput):
                continue
            for finish in reply.finished:
                self.finished[finish.id] = finish
        return replies


def _arrival(
    time_s: float, message: GenerateRequest, output_len: int, context_length: int
) -> Arrival:
    sampling = message.sampling
    max_new_tokens = sampling.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = context_length - len(message.input_ids) // 4
    # An output that ended early must be able to end in the simulation, too.
    ended_early = output_len < (sampling.max_new_tokens or 0)
    return Arrival(
        time_s=time_s,
        prompt=message.input_ids,
        output_len=output_len,
        max_new_tokens=max_new_tokens,
        tenant=message.tenant,
        priority=message.priority,
        ttft_ms=message.ttft_ms,
        ignore_eos=sampling.ignore_eos and not ended_early,
        salt=message.cache_salt,
        adapter=message.adapter,
    )
