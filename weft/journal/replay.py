"""Runs the core over a journal, without a model, and compares every decision with the recorded one.

The clock and the runner return the recorded readings and results. The replay ends at the first
batch, answer or request for an input that differs from the recorded one: after it, nothing can be
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from weft.arrays import IntArray
from weft.config.numbers import counted
from weft.config.options import SettingsError
from weft.config.plugins import OutsideFault
from weft.engine.control.outside import own_control
from weft.engine.engine import Engine
from weft.grammar.masks import LazyBitmaskRow, LazyBitmasks
from weft.grammar.protocol import Advance, CompileResult, Constraint, GrammarMatcher, Key
from weft.journal import earlier
from weft.journal.digest import answered, launched
from weft.journal.file import MAGIC, Damage, JournalReader
from weft.journal.recorder import describe, surroundings
from weft.journal.records import (
    BEGINNING,
    READ_BESIDE,
    READABLE,
    VERSION,
    Advanced,
    Answered,
    Began,
    Broke,
    CacheFlushed,
    Checked,
    Ended,
    Failed,
    Followed,
    HandedOver,
    Lacked,
    Launched,
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
from weft.journal.snapshot import Name, SnapshotError, restore
from weft.memory.handoff.protocol import NOTHING_NEW, HandoffNews, NoHandoff
from weft.memory.prefix_cache import NO_PAGES, CacheKey
from weft.memory.tiers.protocol import (
    NO_NEWS,
    NOT_STORED,
    NoTiers,
    Present,
    Sought,
    TierNews,
)
from weft.messages.codec import ToEngine
from weft.messages.replies import StepOutput
from weft.messages.requests import BatchGenerate, GenerateRequest
from weft.plan.device import DeviceReply, DeviceRequest, Done, Pending, ReadAdapter
from weft.plan.step import Plan, Result, Step
from weft.scheduler.policies import UnknownPolicy
from weft.scheduler.policies.protocol import PolicyContext
from weft.scheduler.policies.user.load import NoOwnPolicy, load_own
from weft.version import __version__

R = TypeVar("R", bound=msgspec.Struct)
MAX_SHOWN = 12  # values of an array that a difference shows
_NUMBERS = ("step", "mode", "num_rows", "num_tokens", "num_finished")  # all others are digests
_ARRAYS = ("rows", "starts", "lens", "tokens", "slots", "samples")


class BadJournal(Exception):
    """The records cannot be replayed. The message gives the reason."""


@dataclass(frozen=True)
class Difference:
    """The first decision that differs from the recorded one."""

    step: int
    field: str
    recorded: str
    now: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.field}: recorded {self.recorded}; now {self.now}"


class _Halt(BaseException):
    """The replay is over.

    Not an Exception: the loop must not treat it as a failed step.
    """

    def __init__(self, difference: Difference | None) -> None:
        self.difference = difference


class RecordedFailure(Exception):
    """The recorded exception of a step of the device."""

    def __init__(self, described: str) -> None:
        super().__init__(described.partition(": ")[2])
        self.described = described


def failure(described: str) -> Exception:
    """The recorded exception of a step, for which the engine does what it did then."""
    kind, _, message = described.partition(": ")
    if kind == OutsideFault.__name__:
        return OutsideFault(message)
    return RecordedFailure(described)


class StepTimes:
    """Reports each step that has ended to `on_step`, with its plan, its result and its seconds."""

    def __init__(self, on_step: Callable[[Plan, Result, float], None]) -> None:
        self._on_step = on_step
        self._launched: dict[int, tuple[Plan, float]] = {}  # plan and its time, by step
        # The step whose result the engine has just taken.
        self._ended: tuple[int, Result] | None = None
        self._done_s: float | None = None  # end of the last step; None: the engine was idle since

    def launched(self, plan: Plan, now: float) -> None:
        self._launched[plan.step] = (plan, now)

    def ended(self, number: int, result: Result) -> None:
        """The engine takes a result, and reads the clock right after it."""
        self._ended = (number, result)

    def clock_was_read(self, now: float) -> None:
        if self._ended is None:
            return
        number, result = self._ended
        self._ended = None
        launched = self._launched.pop(number, None)
        if launched is not None:
            plan, planned_s = launched
            began_s = planned_s if self._done_s is None else self._done_s
            self._on_step(plan, result, now - began_s)
        self._done_s = now

    def is_idle(self) -> None:
        """The engine has no work."""
        self._done_s = None


class Replay:
    """One run over a journal. `engine` may be inspected whenever `run` has returned.

    With `check`, all invariants of memory are checked after every step, and `broke` names the first
    violation. `shadow` names a policy that decides beside the recorded one, without effect.
    `on_step` is called at the end of each step, with its plan, its result and its seconds: since
    the end of the previous step, or since its own planning if the engine was idle between the two.
    """

    def __init__(
        self,
        records: Iterable[bytes],
        *,
        check: bool = False,
        shadow: str = "",
        on_step: Callable[[Plan, Result, float], None] | None = None,
    ) -> None:
        self._script = _Script(records)
        self._check = check
        self.times = StepTimes(on_step or _no_report)
        self._runner = _Runner(self._script, self)
        self.began = self._script.first()
        self.engine = self._make_engine(self.began)
        if shadow:
            scheduler = self.engine.scheduler
            scheduler.apply(replace(scheduler.settings, shadow_policy=shadow))
        self.difference: Difference | None = None
        self.broke: str | None = None  # how the core or its invariants broke, as recorded
        self.first_step = self.step  # number of this journal's first step
        self.last_plan: Plan | None = None
        self.num_requests = 0
        self.last_s = 0.0  # the last reading of the clock
        self.first_s: float | None = None

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self.engine.scheduler.planner.num_steps

    @property
    def num_steps(self) -> int:
        return self.step - self.first_step

    def run(self, until: int | None = None) -> bool:
        """Replay up to the launch of step `until`, or to the end.

        Returns whether everything equals the record.
        """
        try:
            while self._script.peek() is not None and (until is None or self.step <= until):
                self._next()
                if self.broke is not None:
                    break
        except _Halt as halt:
            self.difference = halt.difference
        return self.difference is None

    def _next(self) -> None:
        record = self._script.take()
        match record:
            case Submitted(message):
                self.num_requests += num_requests(message)
                self._guard(lambda: self.engine.submit(message))
            case CacheFlushed():
                self._guard(self.engine.scheduler.flush_cache)
            case Lost(ids, words):
                self._guard(lambda: self.engine.lose(ids, words))
            case Turned():
                self._guard(self._turn)
            case Broke(exception):
                # A check of invariants after the step raised it, outside of the core.
                if self._check:
                    raise _Halt(Difference(self.step - 1, "invariants", exception, "they hold"))
                self.broke = exception
            case _:
                raise _Halt(self._unlike(record, "waits for a message or a step"))

    def _turn(self) -> None:
        for reply in self.engine.step():
            if isinstance(reply, StepOutput):
                self._compare(self._script.expect(Answered, self, "answers"), answered(reply), None)
        if not self.engine.has_work:
            self.times.is_idle()
        if self._check:
            scheduler = self.engine.scheduler
            scheduler.kv.accounts.audit(scheduler.with_row())

    def _guard(self, call: Callable[[], object]) -> None:
        """Make a call into the core. It may raise only what the journal recorded."""
        try:
            call()
        except Exception as exc:
            now = exc.described if isinstance(exc, RecordedFailure) else describe(exc)
            record = self._script.peek()
            if isinstance(record, Broke) and record.exception == now:
                self.broke = now
            elif self._check and isinstance(exc, AssertionError):
                self.broke = now
                self.difference = Difference(self.step - 1, "invariants", "not checked", now)
            else:
                raise _Halt(self._unlike(record, f"raises {now}")) from exc

    def _compare(self, recorded: msgspec.Struct, now: msgspec.Struct, plan: Plan | None) -> None:
        for field in recorded.__struct_fields__:
            was = getattr(recorded, field)
            value = getattr(now, field)
            if was == value:
                continue
            shown = _shown(field, value)
            if plan is not None and field in _ARRAYS:
                shown += f" {_first_values(getattr(plan, field))}"
            # A plan is compared before its step is counted, an answer after.
            step = self.step - 1
            if plan is not None:
                step = self.step
            raise _Halt(Difference(step, field, _shown(field, was), shown))

    def _unlike(self, record: Record | None, now: str) -> Difference | None:
        """The difference between the next record of the journal and what happens now; None at the
        end of the journal."""
        return (
            None if record is None else Difference(self.step, "next event", _in_words(record), now)
        )

    def _make_engine(self, began: Began) -> Engine:
        if began.version not in READABLE:
            versions = ", ".join(map(str, READABLE))
            raise BadJournal(
                f"its format is {began.version} (weft {began.weft} wrote it); "
                f"this weft reads {versions}"
            )
        if began.state and began.version != VERSION:
            raise BadJournal(
                f"it begins in the middle of work, with a state of weft {began.weft} (format "
                f"{began.version}); only that version can continue it"
            )
        try:
            engine = Engine(
                began.settings,
                self._runner,
                clock=self._clock,
                overlap=began.depth,
                on_failure=self._failed,
                grammars=_Grammars(self._script, self),
                processors=_Processors(self._script, self),
                tiers=_Tiers(self._script, self),
                handoff=_Handoff(self._script, self),
            )
        except UnknownPolicy as exc:
            raise BadJournal(f"its policy is not here: {exc}") from exc
        for name in began.settings.outside_control:
            try:
                own_control(name)
            except SettingsError as exc:
                raise BadJournal(f"its control request is not here: {exc}") from exc
        if began.state:
            context = engine.scheduler.waiting_queue.online.policy.context
            find = partial(self._outside, surroundings(engine), context)
            try:
                restore(engine, began.state, find)
            except SnapshotError as exc:
                raise BadJournal(
                    f"the state it begins with (of weft {began.weft}) cannot be restored: {exc}"
                ) from exc
            except NoOwnPolicy as exc:
                raise BadJournal(f"its policy is not here: {exc}") from exc
        return engine

    def _outside(self, around: Mapping[str, object], context: PolicyContext, name: Name) -> object:
        """The substitute for an object that was around the engine when its state was taken
        (`recorder.Outside`)."""
        match name:
            case ["step", int(number)]:
                return _Step(self._script, self, number)
            case ["constraint"]:
                return _constraint()
            case ["nothing"]:
                return None
            case ["policy", str(module), str(kind)]:
                # The policy starts without its earlier memory.
                return load_own(f"{module}:{kind}")(context)
        return around[name[0]]

    def _failed(self, exc: Exception) -> None:
        """Let the engine recover from an exception of a step or of the scheduler, unless this
        exception ended the recorded run."""
        record = self._script.peek()
        if isinstance(record, Broke) and record.exception == describe(exc):
            raise exc

    def _clock(self) -> float:
        self.last_s = self._script.expect(Read, self, "reads the clock").now
        if self.first_s is None:
            self.first_s = self.last_s
        self.times.clock_was_read(self.last_s)
        return self.last_s


def _no_report(plan: Plan, result: Result, seconds: float) -> None:
    """Nobody wants to know."""


class _NoMatcher:
    """A matcher that is never asked, because the moves of grammars are recorded."""

    error = ""
    is_complete = False

    def fork(self) -> GrammarMatcher:
        return self

    def consume(self, token: int) -> bool:
        return True

    def forced(self) -> list[int]:
        return []


def _constraint() -> Constraint:
    return Constraint(_NoMatcher(), LazyBitmaskRow(LazyBitmasks(np.zeros((1, 1), dtype=np.int32))))


class _Grammars:
    """Answers as recorded. Its masks are empty: no decision depends on them."""

    def __init__(self, script: _Script, replay: Replay) -> None:
        self._script = script
        self._replay = replay

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        pass

    def cancel(self, id: int) -> None:
        pass

    def take(self) -> list[CompileResult]:
        results = []
        while isinstance(record := self._script.peek(), Readied):
            self._script.take()
            # A message means that the grammar was refused.
            constraint = None
            if not record.message:
                constraint = _constraint()
            result = CompileResult(
                record.id,
                constraint,
                record.warnings,
                record.message,
                record.status,
                record.compile_s,
            )
            results.append(result)
        return results

    def advance(
        self, constraints: Sequence[Constraint], tokens: Sequence[int], room: Sequence[int]
    ) -> list[Advance]:
        return list(self._script.expect(Advanced, self._replay, "follows grammars").moves)

    def follow(
        self, constraint: Constraint, tokens: Sequence[int], *, jumps: bool
    ) -> list[LazyBitmaskRow]:
        record = self._script.expect(Followed, self._replay, "cuts a draft by its grammar")
        return [constraint.mask] * record.num_tokens


class _Processors:
    """Answers as recorded."""

    def __init__(self, script: _Script, replay: Replay) -> None:
        self._script = script
        self._replay = replay

    def wrong(self, name: str, params: Mapping[str, Any]) -> str:
        return self._script.expect(Checked, self._replay, "asks for a logit processor").wrong


class _Tiers(NoTiers):
    """Answers as recorded, and stores nothing."""

    def __init__(self, script: _Script, replay: Replay) -> None:
        self._script = script
        self._replay = replay

    def seek(self, id: int, key: CacheKey, have: int, since: int) -> Sought:
        record = self._script.peek()
        if not isinstance(record, StoreSought) or record.id != id:
            return NOT_STORED
        self._script.take()
        return Sought(record.num_tokens, record.read_s)

    def lacks(self, key: CacheKey) -> Present:
        record = self._script.expect(Lacked, self._replay, "asks what is stored")
        return Present(record.num_tokens, record.can_resume)

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        pass

    def keep(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        pass

    def cancel(self, ticket: int) -> None:
        pass

    def take(self) -> TierNews:
        if not isinstance(self._script.peek(), StoreNews):
            return NO_NEWS
        return self._script.expect(StoreNews, self._replay, "").news


class _Handoff(NoHandoff):
    """Answers as recorded, and connects to no other server."""

    def __init__(self, script: _Script, replay: Replay) -> None:
        self._script = script
        self._replay = replay

    def take(self) -> HandoffNews:
        if not isinstance(self._script.peek(), HandedOver):
            return NOTHING_NEW
        return self._script.expect(HandedOver, self._replay, "").news


class _Runner:
    """Returns the recorded results."""

    def __init__(self, script: _Script, replay: Replay) -> None:
        self._script = script
        self._replay = replay

    def launch(self, plan: Plan) -> Step:
        replay = self._replay
        recorded = self._script.expect(
            Launched, replay, f"launches a batch of {counted(len(plan.rows), 'row')}"
        )
        replay.last_plan = plan
        replay._compare(recorded, launched(plan, replay.began.version), plan)
        failed = self._script.peek()
        if isinstance(failed, Failed) and failed.at_launch:
            raise failure(self._script.expect(Failed, self._replay, "").message)
        replay.times.launched(plan, replay.last_s)
        return _Step(self._script, self._replay, plan.step)

    def control(self, request: DeviceRequest) -> Pending:
        is_beside = isinstance(request, ReadAdapter)
        if is_beside and self._replay.began.version < READ_BESIDE:
            return Done(DeviceReply(ok=True))  # before version 6, `LoadAdapter` read it
        return _Work(self._script, self._replay, is_beside=is_beside)


class _Work:
    """Work of the device that is done where the journal recorded its end."""

    def __init__(self, script: _Script, replay: Replay, *, is_beside: bool) -> None:
        self._script = script
        self._replay = replay
        self._is_beside = is_beside

    def done(self) -> bool:
        record = self._script.peek()
        return isinstance(record, Ended) and record.is_beside == self._is_beside

    def result(self) -> DeviceReply:
        return self._script.expect(Ended, self._replay, "waits for work of the device").reply()


class _Step:
    def __init__(self, script: _Script, replay: Replay, number: int) -> None:
        self._script = script
        self._replay = replay
        self._number = number

    def result(self) -> Result:
        if isinstance(self._script.peek(), Failed):
            raise failure(self._script.expect(Failed, self._replay, "").message)
        sampled = self._script.expect(
            Sampled, self._replay, f"waits for the result of step {self._number}"
        )
        result = sampled.result()
        self._replay.times.ended(self._number, result)
        return result

    def done(self) -> bool:
        return True


class _Script:
    """The records of a journal, in order."""

    def __init__(self, records: Iterable[bytes]) -> None:
        self._records = iter(records)
        self._has_begun = False
        self._decode = msgspec.msgpack.Decoder[Record](Record).decode
        self._peeked: Record | None = None

    def first(self) -> Began:
        record = self.peek()
        if not isinstance(record, Began):
            raise BadJournal(
                "it is empty"
                if record is None
                else "it does not begin with the settings of an engine"
            )
        self._peeked = None
        self._has_begun = True
        return record

    def peek(self) -> Record | None:
        while self._peeked is None:
            data = next(self._records, None)
            if data is None:
                return None
            # A state between other records: the replay has its own.
            if self._has_begun and data.startswith(BEGINNING):
                continue
            try:
                self._peeked = self._read(data)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as exc:
                raise BadJournal(f"it has a record that cannot be read: {exc}") from exc
        return self._peeked

    def _read(self, data: bytes) -> Record | None:
        """A record; None for a record of an earlier weft that has no meaning now."""
        try:
            record: Record = self._decode(data)
        except msgspec.ValidationError as exc:
            try:
                return earlier.record_of(data)
            except ValueError:
                raise exc from None
        return record

    def take(self) -> Record:
        record = self.peek()
        assert record is not None
        self._peeked = None
        return record

    def expect(self, kind: type[R], replay: Replay, now: str) -> R:
        """The next record, which must be a `kind`. `now` says in words what the core asks for."""
        record = self.peek()
        if not isinstance(record, kind):
            raise _Halt(replay._unlike(record, now))
        self._peeked = None
        return record


def last_beginning(reader: JournalReader, until: int) -> tuple[int, list[Damage]]:
    """The offset of the last `Began` from which this weft can replay to step `until` (the first of
    the file, or a later one), and the damage before it.

    Reads the file up to the first `Began` after that step.
    """
    found = reader.offset
    damage: list[Damage] = []
    decode = msgspec.msgpack.Decoder(Began).decode
    while True:
        at = reader.offset
        for record in reader:
            if record.startswith(BEGINNING) and at > len(MAGIC):
                began = decode(record)
                if began.step > until:
                    return found, damage
                if began.weft == __version__ and began.version == VERSION:
                    found = at
            at = reader.offset
        if reader.damage is None:
            return found, damage
        damage.append(reader.damage)
        if not reader.resume(BEGINNING):
            return found, damage


def num_requests(message: ToEngine) -> int:
    """The number of generate requests in a message."""
    match message:
        case GenerateRequest():
            return 1
        case BatchGenerate():
            return len(message.requests)
    return 0


def _shown(field: str, value: int) -> str:
    """A field of a record: a plain number, or a digest."""
    if field in _NUMBERS:
        return f"{value}"
    return f"CRC {value:08x}"


def _first_values(array: Any) -> str:
    values = array.tolist()
    text = ", ".join(map(str, values[:MAX_SHOWN]))
    if len(values) > MAX_SHOWN:
        text += ", ..."
    return f"[{text}]"


def _in_words(record: Record) -> str:
    """A record in words."""
    match record:
        case Submitted(message):
            return f"takes in a message ({type(message).__name__})"
        case Lost(ids):
            return f"ends {counted(len(ids), 'request')} whose answer could not be sent"
        case Turned():
            return "begins another step"
        case Read():
            return "reads the clock"
        case CacheFlushed():
            return "empties the prefix cache"
        case Launched():
            return f"launches a batch of {counted(record.num_rows, 'row')}"
        case Sampled() | Failed():
            return f"waits for the result of step {record.step}"
        case Readied():
            return "learns what became of a grammar"
        case Advanced():
            return "follows grammars"
        case Followed():
            return "cuts a draft by its grammar"
        case Checked():
            return "asks for a logit processor"
        case StoreSought() | Lacked():
            return "asks what is stored"
        case StoreNews():
            return "learns what has become of KV in the store"
        case HandedOver():
            return "learns what another server has said"
        case Ended():
            return "sees the end of work of the device"
        case Answered():
            tokens = counted(record.num_tokens, "token")
            return f"answers with {tokens} and {counted(record.num_finished, 'end')}"
        case Broke():
            return f"raises {record.exception}"
    return type(record).__name__
