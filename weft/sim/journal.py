"""Real traffic as a trace. It reads a journal (`weft serve --journal FILE`): the requests, their
arrival times and output lengths, the durations of steps, and the latencies of requests.

A journal holds what entered the core; the ends of requests follow from that. So the journal is
replayed, and a tap between the replay and its engine notes requests, tokens and finishes.

Requests that the core refused or ended have entered it, so they are part of the traffic: other
settings may admit them. The full length of their outputs is guessed (`lengths.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from weft.engine.engine import Engine
from weft.journal.replay import Replay
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.plan.step import Plan, Result
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import StepCost
from weft.sim.encoder import EncoderTime, EncoderTimes
from weft.sim.fit import StepTime
from weft.sim.gaps import Gaps
from weft.sim.lengths import OutputLengths
from weft.sim.outcome import ABORTED, DONE, INVALID, REFUSED, state_of, why_refused
from weft.sim.run import BackgroundTokens, Record, RequestColumns
from weft.sim.speed import MachineSpeed, Stretch
from weft.sim.trace import FILLER, Arrival


class Journal(NamedTuple):
    settings: SchedulerSettings  # of the recorded engine
    arrivals: list[Arrival]  # with their recorded prompts and outputs
    num_open: int  # requests that are left out because they had not ended
    num_invalid: int  # left out, too: no setting of the scheduler makes them valid
    num_guessed: int  # of `arrivals`, those whose output length is guessed
    steps: list[StepTime]  # that ran
    ended_s: list[float]  # end of each step, in seconds since the first arrival
    overlaps: bool  # whether the engine planned a step while another ran
    encoder: list[EncoderTime]  # the work of the encoder, with its times
    record: Record  # the recorded outcomes of `arrivals`

    def speed(self, cost: StepCost) -> MachineSpeed:
        """The speed of the machine that ran the steps, if `cost` is the usual cost of steps."""
        return MachineSpeed(self.stretches(cost))

    def stretches(self, cost: StepCost) -> list[Stretch]:
        found = []
        for step, ended_s in zip(self.steps, self.ended_s, strict=True):
            load = StepLoad(step.num_tokens, step.num_pairs, step.context, step.num_samples)
            found.append(Stretch(ended_s - step.seconds, ended_s, cost.seconds(load)))
        return found


def read_journal(records: Iterable[bytes]) -> Journal:
    """Read a journal. Raises BadJournal. Requests after the first decision that this version would
    make differently are left out."""
    steps: list[StepTime] = []
    ended_s: list[float] = []

    encoder = EncoderTimes()

    def note_step(plan: Plan, result: Result, seconds: float) -> None:
        ended_s.append(replay.last_s)
        load = StepLoad.of(plan)
        encoder.note(plan, result)
        # The encoder's work has a cost of its own.
        own_s = max(seconds - result.encoder_s, 0.0)
        steps.append(StepTime(load.tokens, load.context, load.samples, own_s, load.pairs))

    replay = Replay(records, on_step=note_step)
    tap = _Tap(replay, replay.engine)
    # A replay uses only the methods of an engine that `_Tap` has.
    replay.engine = tap  # type: ignore[assignment]
    replay.run()
    settings = replay.began.settings
    lengths = tap.lengths()
    arrivals: list[Arrival] = []
    seen = _Seen()
    num_open = 0
    num_invalid = 0
    num_guessed = 0
    begin_s = tap.sent[0][0] if tap.sent else 0.0
    for time_s, message in tap.sent:
        finish = tap.finished.get(message.id)
        if finish is None:
            num_open += 1
            continue
        state = tap.state_of(finish)
        if state == REFUSED and why_refused(finish) == INVALID:
            num_invalid += 1
            continue
        seen.enter(len(arrivals), time_s, message, finish, tap)
        is_whole = state == DONE or (state == ABORTED and finish.completion_tokens > 0)
        output_len = finish.completion_tokens
        if not is_whole:
            output_len = _guessed_len(message, output_len, lengths, settings.context_length)
            num_guessed += 1
        output = tap.outputs.get(message.id, [])
        if len(output) != finish.completion_tokens:
            output = []
        leaves_s = math.inf
        if state == ABORTED and not is_whole:
            leaves_s = tap.ended_s[message.id] - time_s
        arrival = _arrival(max(time_s - begin_s, 0.0), message, output_len, output)
        arrival = arrival._replace(is_cut=state == ABORTED and is_whole, leaves_s=leaves_s)
        arrivals.append(arrival)
    return Journal(
        settings,
        arrivals,
        num_open,
        num_invalid,
        num_guessed,
        steps,
        [time_s - begin_s for time_s in ended_s],
        replay.began.depth > 0,
        encoder.measured,
        seen.record(tap),
    )


def _guessed_len(
    message: GenerateRequest, num_tokens: int, lengths: OutputLengths, context_length: int
) -> int:
    """Guess the full length of an output that was ended after `num_tokens`."""
    sampling = message.sampling
    bound = sampling.max_new_tokens
    if bound is None:
        bound = max(context_length - message.prompt_len, 1)
    if sampling.ignore_eos:
        return bound
    return lengths.guess(message.tenant, beyond=num_tokens, bound=bound)


class _Seen:
    """Collects the recorded outcomes of requests."""

    def __init__(self) -> None:
        self._columns = RequestColumns()
        self._tenants: dict[str, int] = {}

    def enter(
        self, number: int, sent_s: float, message: GenerateRequest, finish: Finish, tap: _Tap
    ) -> None:
        tenant = self._tenants.setdefault(message.tenant, len(self._tenants))
        self._columns.enter(
            number, sent_s, message.prompt_len, tenant, background=message.background
        )
        self._columns.finish(msgspec.structs.replace(finish, id=number), tap.ended_s[message.id])
        self._columns.first_s[number] = tap.first_s.get(message.id, np.nan)
        # The front ended some of them, at a stop string.
        self._columns.state[number] = tap.state_of(finish)

    def record(self, tap: _Tap) -> Record:
        gaps = tap.gaps, tap.background_gaps
        return self._columns.record(*gaps, list(self._tenants), tap.beside)


class _Tap:
    """A wrapper of a replay's engine that observes its messages."""

    def __init__(self, replay: Replay, engine: Engine) -> None:
        self.sent: list[tuple[float, GenerateRequest]] = []
        self.finished: dict[int, Finish] = {}
        self.first_s: dict[int, float] = {}  # time of the first token, by id
        self.ended_s: dict[int, float] = {}
        self.outputs: dict[int, list[int]] = {}  # tokens, by id
        self.gaps = Gaps()
        self.background_gaps = Gaps()
        self.beside = BackgroundTokens()
        self._background: dict[int, int] = {}  # lengths of prompts of background requests, by id
        self._stopped: set[int] = set()  # requests that the front ended, at a stop string
        self._last_s: dict[int, float] = {}  # time of the last token of each open request
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
            self._take(now, message)
        elif isinstance(message, BatchGenerate):
            for member in message.members():
                self._take(now, member)
        elif isinstance(message, Abort) and message.output_lens:
            self._stopped.update(message.ids)
        return reply

    def _take(self, now: float, message: GenerateRequest) -> None:
        self.sent.append((now, message))
        if message.background:
            self._background[message.id] = message.prompt_len

    def lose(self, ids: tuple[int, ...], message: str) -> None:
        self._engine.lose(ids, message)

    def state_of(self, finish: Finish) -> int:
        """The outcome of a request: as `outcome.state_of`, but DONE if it ended at a stop
        string."""
        if finish.id in self._stopped and finish.reason == "abort":
            return DONE
        return state_of(finish)

    def lengths(self) -> OutputLengths:
        """The lengths of outputs that ended by themselves. Empty outputs do not count."""
        found = OutputLengths()
        for _, message in self.sent:
            finish = self.finished.get(message.id)
            if finish is None or not finish.completion_tokens:
                continue
            if self.state_of(finish) == DONE:
                found.note(message.tenant, finish.completion_tokens)
        return found

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
                if finish.id not in self._background:
                    self.beside.online_ended()
        return replies

    def _note_tokens(self, ids: list[int]) -> None:
        now = self._replay.last_s
        gaps: list[float] = []
        background_gaps: list[float] = []
        # Each of several tokens in a step counts with the time since the step before, as in a run.
        for id in ids:
            before = self._last_s.get(id)
            if before is None:
                self.first_s[id] = now
            elif id in self._background:
                background_gaps.append(now - before)
            else:
                gaps.append(now - before)
            if id in self._background:
                self.beside.add(1, self._background[id] if before is None else 0)
        self._last_s.update(dict.fromkeys(ids, now))
        self.gaps.add(np.array(gaps))
        self.background_gaps.add(np.array(background_gaps))


def _arrival(
    time_s: float, message: GenerateRequest, output_len: int, output: list[int]
) -> Arrival:
    """`output`: the first tokens, as far as known; fillers follow them."""
    sampling = message.sampling
    known = b""
    if output:
        more = [FILLER] * (output_len - len(output))
        known = np.array(output + more, dtype=np.int32).tobytes()
    # An output that ended early must be able to end early in the simulation, too.
    ended_early = output_len < (sampling.max_new_tokens or 0)
    return Arrival(
        time_s=time_s,
        prompt=message.input_ids,
        output_len=output_len,
        max_new_tokens=sampling.max_new_tokens,
        tenant=message.tenant,
        priority=message.priority,
        ttft_ms=message.ttft_ms,
        timeout_ms=message.timeout_ms,
        ignore_eos=sampling.ignore_eos and not ended_early,
        salt=message.cache_salt,
        adapter=message.adapter,
        output=known,
        media=message.media,
        background=message.background,
    )
