"""Real traffic as a trace: the requests in a journal (`weft serve --journal FILE`), when they came,
and how long their outputs became; how long its steps took; and what its requests saw.

A journal holds what entered the core; how a request ended follows from that. So the journal is
replayed, and a tap between the replay and its engine notes requests, tokens and final words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from weft.engine.engine import Engine
from weft.journal.replay import Replay
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import BatchGenerate, GenerateRequest
from weft.plan.step import Plan
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings
from weft.sim.fit import StepTime
from weft.sim.gaps import Gaps
from weft.sim.run import DONE, Record, RequestColumns
from weft.sim.trace import Arrival


class Journal(NamedTuple):
    settings: SchedulerSettings  # of the engine that wrote it
    arrivals: list[Arrival]  # with their prompts and outputs as they were
    num_left_out: int  # requests that got no token, or were open at the end
    num_aborted: int  # of `arrivals`, that end where their client left them, or they failed
    steps: list[StepTime]  # that ran
    overlaps: bool  # whether it planned a step while another ran
    record: Record  # what the requests of `arrivals` saw


def read_journal(records: Iterable[bytes]) -> Journal:
    """Raises BadJournal. From the first decision on that this version would not take,
    requests are left out.
    """
    steps: list[StepTime] = []

    def note_step(plan: Plan, seconds: float) -> None:
        load = StepLoad.of(plan)
        steps.append(StepTime(load.tokens, load.context, load.samples, seconds))

    replay = Replay(records, on_step=note_step)
    tap = _Tap(replay, replay.engine)
    # A replay uses no more of an engine than there is here.
    replay.engine = tap  # type: ignore[assignment]
    replay.run()
    settings = replay.began.settings
    arrivals: list[Arrival] = []
    seen = _Seen()
    num_aborted = 0
    for time_s, message in tap.sent:
        finish = tap.finished.get(message.id)
        if finish is None:
            continue
        if finish.reason not in ("stop", "length"):
            if not finish.completion_tokens:
                continue
            num_aborted += 1
        seen.enter(len(arrivals), time_s, message, finish, tap)
        first_s = tap.sent[0][0]
        arrival = _arrival(
            max(time_s - first_s, 0.0),
            message,
            finish.completion_tokens,
            settings.context_length,
        )
        output = tap.outputs.get(message.id, [])
        if len(output) == arrival.output_len:
            arrival = arrival._replace(output=np.array(output, dtype=np.int32).tobytes())
        arrivals.append(arrival)
    num_left_out = len(tap.sent) - len(arrivals)
    return Journal(
        settings,
        arrivals,
        num_left_out,
        num_aborted,
        steps,
        replay.began.depth > 0,
        seen.record(tap.gaps),
    )


class _Seen:
    """Puts together what requests saw when they were recorded."""

    def __init__(self) -> None:
        self._columns = RequestColumns()
        self._tenants: dict[str, int] = {}

    def enter(
        self, number: int, sent_s: float, message: GenerateRequest, finish: Finish, tap: _Tap
    ) -> None:
        tenant = self._tenants.setdefault(message.tenant, len(self._tenants))
        self._columns.enter(number, sent_s, len(message.input_ids) // 4, tenant)
        self._columns.finish(msgspec.structs.replace(finish, id=number), tap.ended_s[message.id])
        self._columns.first_s[number] = tap.first_s.get(message.id, np.nan)
        # Here a request counts by its tokens, also one that its client left.
        self._columns.state[number] = DONE

    def record(self, gaps: Gaps) -> Record:
        return self._columns.record(gaps, list(self._tenants))


class _Tap:
    """The engine of a replay, listened to."""

    def __init__(self, replay: Replay, engine: Engine) -> None:
        self.sent: list[tuple[float, GenerateRequest]] = []
        self.finished: dict[int, Finish] = {}
        self.first_s: dict[int, float] = {}  # when the first token came, by id
        self.ended_s: dict[int, float] = {}
        self.outputs: dict[int, list[int]] = {}  # tokens, by id
        self.gaps = Gaps()
        self._last_s: dict[int, float] = {}  # when the last token of an open request came
        self._replay = replay
        self._engine = engine

    @property
    def scheduler(self) -> Scheduler:
        return self._engine.scheduler

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

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
            ids = np.frombuffer(reply.ids, dtype=np.int64).tolist()
            tokens = np.frombuffer(reply.tokens, dtype=np.int32).tolist()
            for id, token in zip(ids, tokens, strict=True):
                self.outputs.setdefault(id, []).append(token)
            self._note_tokens(ids)
            for finish in reply.finished:
                self.finished[finish.id] = finish
                self.ended_s[finish.id] = self._replay.last_s
                self._last_s.pop(finish.id, None)
        return replies

    def _note_tokens(self, ids: list[int]) -> None:
        now = self._replay.last_s
        gaps = []
        # Of several tokens in a step each counts with the time since the step before, as in a run.
        for id in ids:
            before = self._last_s.get(id)
            if before is None:
                self.first_s[id] = now
            else:
                gaps.append(now - before)
        self._last_s.update(dict.fromkeys(ids, now))
        self.gaps.add(np.array(gaps))


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
