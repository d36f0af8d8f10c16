"""The decision journal: everything that enters the core, and a digest of everything that it
decides.

The scheduler is deterministic: its decisions follow from its settings, the messages, the results of
steps and the readings of the clock. `RecordedEngine` is an engine that writes these in order while
it serves; `Replay` (`replay.py`) runs the same core over them and compares. Nothing is recorded
twice, and nothing that the core computes by itself is recorded, except digests.

    Began     settings, and the state of the engine if it already has work
    Submitted a message                       ┐
    Turned    a call of Engine.step           │
    Read      the clock                       │
    Sampled   the result of a step, or        │ inputs
    Failed    its exception                   │
    Ended     work of the device, not a step  │
    Readied   a grammar is ready or refused   │
    Advanced  moves of grammars after tokens  │
    Followed  length of a draft in a grammar  │
    Checked   a logit processor of a request  │
    StoreSought, Lacked, StoreNews  the KV store   │
    HandedOver  news from another server      ┘
    Launched  digest of a batch               ┐ decisions
    Answered  digest of an output             ┘
    Broke     the exception with which the core or its invariants broke

A full file is put aside, whatever the engine is doing, and the next file begins with the state of
the engine. So each file can be replayed alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, get_args

import msgspec

from weft.arrays import IntArray
from weft.engine.engine import Engine
from weft.engine.surroundings import NoProcessors, Profiler
from weft.grammar.masks import LazyBitmaskRow, LazyBitmaskRows
from weft.grammar.protocol import Advance, CompileResult, Constraint, Grammars, Key, NoGrammars
from weft.journal.digest import answered, launched
from weft.journal.records import (
    VERSION,
    Advanced,
    Began,
    Broke,
    Checked,
    Ended,
    Failed,
    Followed,
    HandedOver,
    Lacked,
    Lost,
    Read,
    Readied,
    Record,
    Sampled,
    StoreNews,
    StoreSought,
    Submitted,
    Turned,
)
from weft.journal.snapshot import Name, SnapshotError, take
from weft.memory.events.protocol import CacheEvents
from weft.memory.handoff.protocol import (
    NOTHING_NEW,
    Handoff,
    HandoffNews,
    HandoffReport,
    NoHandoff,
    RoomAddress,
)
from weft.memory.prefix_cache import NO_PAGES, CacheKey
from weft.memory.tiers.protocol import (
    NO_NEWS,
    NoTiers,
    Present,
    Sought,
    TierNews,
    TierReport,
    Tiers,
)
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.media import MediaItem
from weft.messages.picture import GetPrefix, Watch
from weft.messages.replies import StepOutput
from weft.messages.requests import BatchGenerate, GenerateRequest
from weft.messages.weights import UpdateWeightsFromTensor
from weft.observe.log import EventLog
from weft.plan.device import DeviceReply, DeviceRequest, Pending, ReadAdapter
from weft.plan.inputs import InputVectors, MediaValues
from weft.plan.step import Plan, Result, Runner, Step
from weft.scheduler.features.processors import ProcessorChecks
from weft.scheduler.policies.protocol import Policy
from weft.scheduler.request import without_values
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings
from weft.version import __version__

log = EventLog("journal")

CONTENT = {
    UpdateWeightsFromTensor: ("content", b""),
    GenerateRequest: ("vectors", b""),
    BatchGenerate: ("vectors", {}),
}
# The messages to the core that are recorded. Observers only read, so no decision depends on them.
TO_ENGINE = frozenset(get_args(ToEngine)) - {GetPrefix, Watch}
_encode = msgspec.msgpack.Encoder().encode


class Sink(Protocol):
    """The destination of records: `journal.file.JournalWriter`."""

    num_bytes: int

    def append(self, record: bytes) -> None: ...

    def flush(self) -> None: ...

    def rotate(self) -> None: ...


class RecordedEngine:
    """An engine that keeps a journal after `start_over`. It implements the interface of Engine.

    At `max_bytes`, the sink puts its file aside and begins another. After every `state_bytes`, the
    state of the engine is recorded, so that a replay can begin there; 0: only at the beginning of a
    file.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        runner: Runner,
        *,
        clock: Callable[[], float],
        overlap: int,
        on_failure: Callable[[Exception], None],
        sink: Sink,
        max_bytes: int,
        state_bytes: int = 0,
        profiler: Profiler | None = None,
        grammars: Grammars | None = None,
        processors: ProcessorChecks | None = None,
        tiers: Tiers | None = None,
        handoff: Handoff | None = None,
        cache_events: CacheEvents | None = None,
    ) -> None:
        self._recorder = Recorder(sink, max_bytes, state_bytes)
        self._engine = Engine(
            settings,
            RecordedRunner(runner, self._recorder),
            clock=self._recorder.clock(clock),
            overlap=overlap,
            on_failure=on_failure,
            profiler=profiler,
            grammars=RecordedGrammars(
                grammars or NoGrammars("this engine compiles no grammars"), self._recorder
            ),
            processors=RecordedProcessors(processors or NoProcessors(), self._recorder),
            tiers=RecordedTiers(tiers or NoTiers(), self._recorder),
            handoff=RecordedHandoff(handoff or NoHandoff(), self._recorder),
            cache_events=cache_events,
        )

    @property
    def scheduler(self) -> Scheduler:
        return self._engine.scheduler

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def is_stopped(self) -> bool:
        return self._engine.is_stopped

    @property
    def wait_s(self) -> float:
        return self._engine.wait_s

    @property
    def min_step_s(self) -> float:
        return self._engine.min_step_s

    def warm_up(self, request: GenerateRequest) -> None:
        """Run a request, and begin to record after it."""
        self._engine.warm_up(request)
        self._recorder.begin(self._engine, b"")

    def start_over(self) -> None:
        """Begin to record. The engine must be idle; it forgets everything before."""
        self._engine.start_over()
        self._recorder.begin(self._engine, b"")

    def submit(self, message: ToEngine) -> FromEngine | None:
        # Other messages decide nothing, and readers of the journal do not know them.
        if type(message) in TO_ENGINE:
            self._recorder.write(Submitted(without_content(message)))
        try:
            return self._engine.submit(message)
        except Exception as exc:
            self.broke(exc)
            raise

    def lose(self, ids: tuple[int, ...], message: str) -> None:
        self._recorder.write(Lost(ids, message))
        try:
            self._engine.lose(ids, message)
        except Exception as exc:
            self.broke(exc)
            raise

    def step(self) -> list[FromEngine]:
        recorder = self._recorder
        recorder.write(Turned())
        try:
            replies = self._engine.step()
        except Exception as exc:
            self.broke(exc)
            raise
        for reply in replies:
            if not isinstance(reply, StepOutput):
                continue
            # An output that has only `aux` depends on the device alone: it is not in the journal.
            if reply.ids or reply.finished or not reply.aux:
                recorder.write(answered(reply))
        if not self._engine.has_work:
            recorder.flush()  # the next step may be much later
        # Another engine cannot take over work of the device; such work ends soon.
        is_due = recorder.is_full or recorder.is_state_due
        services = self._engine.services
        if is_due and not (services.device_jobs.is_busy or services.adapters.is_reading):
            self._begin_again()
        return replies

    def _begin_again(self) -> None:
        """Record the state of the engine; if the file is full, as the first record of a new
        file."""
        recorder = self._recorder
        try:
            state = take(self._engine, Outside(self._engine).name_of)
        except SnapshotError as exc:
            event = "not_put_aside" if recorder.is_full else "state_not_kept"
            log.error(event, reason=f"{exc}")
            recorder.postpone()
            return
        if recorder.is_full:
            recorder.rotate()
        recorder.begin(self._engine, state)

    def broke(self, exc: Exception) -> None:
        """Record the exception that ended the engine."""
        self._recorder.write(Broke(describe(exc)))
        self._recorder.flush()


class Recorder:
    """Writes records after `begin`; before, it drops them."""

    def __init__(self, sink: Sink, max_bytes: int, state_bytes: int = 0) -> None:
        self._sink = sink
        self._max_bytes = max_bytes
        self._state_bytes = state_bytes
        self._first_bytes = 0  # size of the file up to its first state, which does not count
        self._last_end = 0  # file size after the newest state
        self._last_bytes = 0  # size of the newest state
        self._is_on = False

    @property
    def is_full(self) -> bool:
        """Whether the file should be put aside: after `max_bytes`, and after at least as many bytes
        as its first state has, so that large states are not written too often."""
        return self._sink.num_bytes - self._first_bytes >= max(self._max_bytes, self._first_bytes)

    @property
    def is_state_due(self) -> bool:
        """Whether the next state should be recorded: after `state_bytes`, and after at least as
        many bytes as the last state has."""
        if not self._state_bytes:
            return False
        num_bytes = self._sink.num_bytes - self._last_end
        return num_bytes >= max(self._state_bytes, self._last_bytes)

    def begin(self, engine: Engine, state: bytes) -> None:
        self._is_on = True
        self._sink.flush()
        began = self._sink.num_bytes
        self.write(
            Began(
                version=VERSION,
                weft=__version__,
                unix_s=time.time(),
                depth=engine.depth,
                settings=engine.scheduler.settings,
                state=state,
                step=engine.scheduler.planner.num_steps,
            )
        )
        self._sink.flush()
        self._last_end = self._sink.num_bytes
        self._last_bytes = self._last_end - began
        if not self._first_bytes:
            self._first_bytes = self._last_end

    def write(self, record: Record) -> None:
        if self._is_on:
            self._sink.append(_encode(record))

    def flush(self) -> None:
        self._sink.flush()

    def rotate(self) -> None:
        self._sink.rotate()
        self._first_bytes = 0

    def postpone(self) -> None:
        """No state could be taken: continue in this file for the same number of bytes."""
        if self.is_full:
            self._first_bytes = self._sink.num_bytes
        self._last_end = self._sink.num_bytes

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """`clock`, with every reading recorded."""

        def read() -> float:
            now = clock()
            self.write(Read(now))
            return now

        return read


class RecordedGrammars:
    """Records the answers of grammars."""

    def __init__(self, grammars: Grammars, recorder: Recorder) -> None:
        self._grammars = grammars
        self._recorder = recorder

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        self._grammars.ask(id, key, tenant)

    def cancel(self, id: int) -> None:
        self._grammars.cancel(id)

    def take(self) -> list[CompileResult]:
        results = self._grammars.take()
        for one in results:
            record = Readied(
                one.id,
                one.warnings,
                one.message,
                one.status,
                one.compile_s,
            )
            self._recorder.write(record)
        return results

    def advance(
        self, constraints: Sequence[Constraint], tokens: Sequence[int], room: Sequence[int]
    ) -> list[Advance]:
        moves = self._grammars.advance(constraints, tokens, room)
        self._recorder.write(Advanced(tuple(moves)))
        return moves

    def follow(
        self, constraint: Constraint, tokens: Sequence[int], *, jumps: bool
    ) -> list[LazyBitmaskRow]:
        masks = self._grammars.follow(constraint, tokens, jumps=jumps)
        self._recorder.write(Followed(len(masks)))
        return masks


class RecordedProcessors:
    """Records the checks of logit processors."""

    def __init__(self, processors: ProcessorChecks, recorder: Recorder) -> None:
        self._processors = processors
        self._recorder = recorder

    def wrong(self, name: str, params: Mapping[str, Any]) -> str:
        wrong = self._processors.wrong(name, params)
        self._recorder.write(Checked(wrong))
        return wrong


class RecordedTiers:
    """Records the answers of a KV store. A replay needs no store."""

    def __init__(self, tiers: Tiers, recorder: Recorder) -> None:
        self._tiers = tiers
        self._recorder = recorder

    def seek(self, id: int, key: CacheKey, have: int, since: int) -> Sought:
        found = self._tiers.seek(id, key, have, since)
        if found.num_tokens:
            self._recorder.write(StoreSought(id, found.num_tokens, found.read_s))
        return found

    def lacks(self, key: CacheKey) -> Present:
        present = self._tiers.lacks(key)
        self._recorder.write(Lacked(present.num_tokens, present.can_resume))
        return present

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        self._tiers.fetch(ticket, key, start, pages, resume_state)

    def keep(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        self._tiers.keep(ticket, key, start, pages, resume_state)

    def cancel(self, ticket: int) -> None:
        self._tiers.cancel(ticket)

    def take(self) -> TierNews:
        news = self._tiers.take()
        if news != NO_NEWS:
            self._recorder.write(StoreNews(news))
        return news

    def clear(self) -> None:
        self._tiers.clear()

    def flush(self) -> None:
        self._tiers.flush()

    def renew(self, why: str) -> None:
        self._tiers.renew(why)

    def stop(self, why: str) -> None:
        self._tiers.stop(why)

    def close(self) -> None:
        self._tiers.close()

    def settle(self) -> None:
        self._tiers.settle()

    def report(self) -> TierReport:
        return self._tiers.report()


class RecordedHandoff:
    """Records the news from another server. A replay needs no other server."""

    def __init__(self, handoff: Handoff, recorder: Recorder) -> None:
        self._handoff = handoff
        self._recorder = recorder

    def close(self) -> None:
        self._handoff.close()

    def expect(self, room: str) -> None:
        self._handoff.expect(room)

    def lend(
        self, room: str, key: CacheKey, pages: IntArray, resume_state: IntArray = NO_PAGES
    ) -> None:
        self._handoff.lend(room, key, pages, resume_state)

    def refuse(self, room: str, why: str) -> None:
        self._handoff.refuse(room, why)

    def withdraw(self, room: str, why: str) -> None:
        self._handoff.withdraw(room, why)

    def ask(self, pull: int, address: RoomAddress, key: CacheKey, have: int) -> None:
        self._handoff.ask(pull, address, key, have)

    def bind(self, ticket: int, pull: int) -> None:
        self._handoff.bind(ticket, pull)

    def leave(self, pull: int) -> None:
        self._handoff.leave(pull)

    def dismiss(self, address: RoomAddress) -> None:
        self._handoff.dismiss(address)

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        self._handoff.fetch(ticket, key, start, pages, resume_state)

    def keep(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None:
        self._handoff.keep(ticket, key, start, pages)

    def cancel(self, ticket: int) -> None:
        self._handoff.cancel(ticket)

    def flush(self) -> None:
        self._handoff.flush()

    def renew(self, why: str) -> None:
        self._handoff.renew(why)

    def take(self) -> HandoffNews:
        news = self._handoff.take()
        if news != NOTHING_NEW:
            self._recorder.write(HandedOver(news))
        return news

    def report(self) -> HandoffReport:
        return self._handoff.report()


class RecordedRunner:
    """Records plans and results of a runner.

    The kernel has the record of a plan before the device gets the plan.
    """

    def __init__(self, runner: Runner, recorder: Recorder) -> None:
        self._runner = runner
        self._recorder = recorder

    def launch(self, plan: Plan) -> Step:
        self._recorder.write(launched(plan, VERSION))
        self._recorder.flush()
        try:
            step = self._runner.launch(plan)
        except Exception as exc:
            self._recorder.write(Failed(plan.step, describe(exc), at_launch=True))
            raise
        return _RecordedStep(step, plan.step, self._recorder)

    def control(self, request: DeviceRequest) -> Pending:
        is_beside = isinstance(request, ReadAdapter)
        return _RecordedWork(self._runner.control(request), self._recorder, is_beside=is_beside)


class _RecordedWork:
    """`done` is not recorded: in a replay it is True at the record of the end."""

    def __init__(self, pending: Pending, recorder: Recorder, *, is_beside: bool) -> None:
        self._pending = pending
        self._recorder = recorder
        self._is_beside = is_beside

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> DeviceReply:
        reply = self._pending.result()
        ended = Ended(
            reply.ok,
            reply.kv_is_stale,
            reply.is_reloaded,
            reply.released,
            self._is_beside,
        )
        self._recorder.write(ended)
        return reply


class _RecordedStep:
    def __init__(self, step: Step, number: int, recorder: Recorder) -> None:
        self._step = step
        self.number = number
        self._recorder = recorder

    def result(self) -> Result:
        try:
            result = self._step.result()
        except Exception as exc:
            self._recorder.write(Failed(self.number, describe(exc)))
            raise
        self._recorder.write(Sampled.of(self.number, result))
        return result

    def done(self) -> bool:
        return self._step.done()


class Outside:
    """Names the objects around an engine with a journal that are not part of its state.

    `replay.py` has a substitute for each of these names.
    """

    def __init__(self, engine: Engine) -> None:
        self._names = {id(part): [name] for name, part in surroundings(engine).items()}

    def name_of(self, thing: Any) -> Name | None:
        if isinstance(thing, _RecordedStep):
            return ["step", thing.number]
        if isinstance(thing, Constraint):
            return ["constraint"]
        # Masks and vectors of a launched step: nothing reads them any more.
        if isinstance(thing, LazyBitmaskRows | InputVectors):
            return ["nothing"]
        # Values of a prompt's media: not recorded, as in messages.
        if isinstance(thing, MediaValues):
            return ["nothing"]
        # A custom policy: this code does not know the policy's own state.
        if isinstance(thing, Policy) and not type(thing).__module__.startswith("weft."):
            return ["policy", type(thing).__module__, type(thing).__qualname__]
        return self._names.get(id(thing))


def surroundings(engine: Engine) -> dict[str, object]:
    """The objects around an engine that are not part of its state, by name."""
    return {
        **engine.surroundings._asdict(),
        # Vectors of prompts: not recorded, as in messages.
        "vectors": engine.services.features.vectors.by_id,
    }


def without_content(message: ToEngine) -> ToEngine:
    """The message without large content that decides nothing."""
    if type(message) not in CONTENT:
        return message
    field, empty = CONTENT[type(message)]
    # The digests of pictures, videos and sounds stay.
    if isinstance(message, GenerateRequest) and message.media:
        message = msgspec.structs.replace(message, media=without_values(message.media))
    if isinstance(message, BatchGenerate) and message.media:
        media: dict[int, tuple[MediaItem, ...]] = {}
        for index, items in message.media.items():
            media[index] = without_values(items)
        message = msgspec.structs.replace(message, media=media)
    return msgspec.structs.replace(message, **{field: empty})


def describe(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
