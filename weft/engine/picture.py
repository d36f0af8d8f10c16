"""The engine's picture for the live page: made while somebody looks, and costing nothing otherwise.

    Watch ─▶ ask ─▶ (the step that runs ends) ─▶ after_step ─▶ Picture

The first question attaches the service. From then on it notes each step, which takes a microsecond,
and answers every question behind a step; when none has come for `WATCH_S`, it goes. No decision
depends on it, and it reads no clock of its own: journals leave its questions out, and a replay
makes the same pictures from a journal.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from weft.engine import explain
from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.engine.input_gate import InputGate
from weft.engine.load_report import LoadReporter
from weft.engine.pause import Pause
from weft.memory.index.survey import Survey, TreeSurvey
from weft.messages.control import RequestRow
from weft.messages.picture import Picture, RowColumns, StepColumns, TreeColumns, Watch
from weft.scheduler.batch import Batch
from weft.scheduler.features.registry import Features
from weft.scheduler.request import NO_ROW, Request, RequestState

WATCH_S = 10.0  # without a question, after which nobody looks any more
MAX_STEPS = 2_048  # that are remembered
MAX_QUEUED = 50  # waiting requests in a picture
NODES_PER_PICTURE = 128  # that a picture walks on in the prefix tree
ROUND_S = 1.0  # from one walk over the tree to the next, at least


class StepMark(NamedTuple):
    """A step: planned, and then done."""

    number: int
    mode: int
    num_rows: int
    num_prompts: int
    num_tokens: int
    num_waiting: int
    seconds: float  # while it runs: when it was planned


class Pictures(Service):
    """Attached while somebody looks."""

    name = "the pictures"

    def __init__(
        self,
        core: EngineCore,
        features: Features,
        load: LoadReporter,
        pause: Pause,
        input_gate: InputGate,
    ) -> None:
        self._core = core
        self._features = features
        self._load = load
        self._pause = pause
        self._input_gate = input_gate
        self._asked: list[Watch] = []  # that wait for the end of a step
        self._watch = StepWatch(core)
        self._tree = TreeWatch(core)
        self._stays = False  # whoever asks
        self._asked_s = 0.0  # when the last question was answered

    def ask(self, question: Watch) -> None:
        """Answer behind the next step; without work there is one at once."""
        if self not in self._core.hooks.attached:
            self._watch = StepWatch(self._core)
            self._tree = TreeWatch(self._core)
        self._asked.append(question)
        self._core.hooks.begin_work(self)

    def stay(self) -> None:
        """Note every step from now on, though nobody asks: whoever runs the engine takes the
        pictures (`take`)."""
        self._stays = True
        self._core.hooks.attach(self)

    def take(self, question: Watch, now: float) -> Picture:
        """A picture between two steps."""
        self._tree.go_on(now)
        return self._picture(question, now)

    def after_step(self, now: float) -> None:
        self._watch.look(now)
        if self._asked:
            self._answer(now)
        elif not self._stays and now - self._asked_s > WATCH_S:
            self._core.hooks.detach(self)

    def _answer(self, now: float) -> None:
        questions = self._asked
        self._asked = []
        self._asked_s = now
        self._core.hooks.end_work(self)
        self._tree.go_on(now)
        for question in questions:
            self._core.send(self._picture(question, now))

    def _picture(
        self,
        question: Watch,
        now: float,
    ) -> Picture:
        tree = None
        if self._tree.columns.round > question.since_round:
            tree = self._tree.columns
        return Picture(
            call=question.call,
            at_s=now,
            stats=self._load.stats(),
            steps=self._watch.columns(question.since_step),
            rows=self._rows(now),
            queue=self._queue(now),
            tree=tree,
            input_state=self._input_gate.state,
            paused=self._pause.mode or "",
        )

    def _rows(self, now: float) -> RowColumns:
        requests = [one for one in self._core.scheduler.requests.values() if one.row != NO_ROW]
        requests.sort(key=_arrival_order)
        rows = np.array(
            [one.row for one in requests],
            dtype=np.int64,
        )
        columns = self._core.scheduler.kv.columns
        prompt_len = columns.prompt_len[rows]
        decoding = RequestState.DECODING
        # A list in one go takes half the time of one that grows: this is most of a picture.
        rids = [one.message.rid for one in requests]
        tenants = [one.message.tenant for one in requests]
        is_decoding = [one.state is decoding for one in requests]
        cached_len = [one.cached_tokens for one in requests]
        kv_len = [one.kv_len for one in requests]
        fill_len = [one.fill_len for one in requests]
        age_s = [now - one.spec.arrival_s for one in requests]
        num_output = columns.known_len[rows] - prompt_len
        max_len = columns.max_len[rows]
        return RowColumns(
            rids=rids,
            tenants=tenants,
            is_decoding=_ints(is_decoding),
            prompt_len=prompt_len.tobytes(),
            cached_len=_ints(cached_len),
            kv_len=_ints(kv_len),
            fill_len=_ints(fill_len),
            num_output=num_output.tobytes(),
            max_len=max_len.tobytes(),
            age_s=_floats(age_s),
        )

    def _queue(self, now: float) -> list[RequestRow]:
        """The first that wait, as they came. The policy is not asked for its order: some keep
        accounts of what they were asked."""
        scheduler = self._core.scheduler
        compiling = self._features.grammar.queue
        first = scheduler.waiting_queue.first_come(MAX_QUEUED)
        return [
            explain.row_of(
                scheduler,
                one,
                None,
                now,
                compiling,
            )
            for one in first
        ]


class StepWatch:
    """Notes the steps, from the first that is planned while it looks."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._planned: deque[StepMark] = deque()  # that run
        self._done: deque[StepMark] = deque(maxlen=MAX_STEPS)
        self._last: Batch | None = core.scheduler.last_batch
        self._done_s = 0.0  # when the last step was done

    def look(self, now: float) -> None:
        """A turn of the engine is over: note the step that it planned, and those that are done."""
        core = self._core
        batch = core.scheduler.last_batch
        if batch is not None and batch is not self._last:
            self._planned.append(self._mark(batch))
        self._last = batch
        in_flight = core.loop.first_in_flight
        while self._planned:
            mark = self._planned[0]
            if in_flight is not None and mark.number >= in_flight:
                return
            self._planned.popleft()
            # The device computes one step after the other.
            began_s = max(mark.seconds, self._done_s)
            self._done_s = now
            self._done.append(mark._replace(seconds=now - began_s))

    def _mark(self, batch: Batch) -> StepMark:
        plan = batch.plan
        return StepMark(
            number=plan.step,
            mode=int(plan.mode),
            num_rows=len(plan.rows),
            num_prompts=len(batch.prefills),
            num_tokens=plan.num_tokens,
            num_waiting=len(self._core.scheduler.waiting_queue),
            seconds=self._core.began_s,
        )

    def columns(self, since: int) -> StepColumns:
        """The steps behind number `since`, as far as they are remembered."""
        marks = []
        for mark in reversed(self._done):
            if mark.number <= since:
                break
            marks.append(mark)
        if not marks:
            return StepColumns()
        marks.reverse()
        columns = dict(
            zip(
                StepMark._fields,
                zip(*marks, strict=True),
                strict=True,
            )
        )
        return StepColumns(
            numbers=_longs(columns["number"]),
            modes=_ints(columns["mode"]),
            num_rows=_ints(columns["num_rows"]),
            num_prompts=_ints(columns["num_prompts"]),
            num_tokens=_ints(columns["num_tokens"]),
            num_waiting=_ints(columns["num_waiting"]),
            seconds=_floats(columns["seconds"]),
        )


class TreeWatch:
    """Walks over the prefix tree, some nodes with each picture."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._walk: TreeSurvey | None = None
        self._begun_s = -ROUND_S
        self.columns = TreeColumns()  # of the last walk that is over

    def go_on(self, now: float) -> None:
        if self._walk is None:
            if now - self._begun_s < ROUND_S:
                return
            self._begun_s = now
            self._walk = TreeSurvey(self._core.scheduler.kv.cache.tops())
        survey = self._walk.look(NODES_PER_PICTURE)
        if survey is not None:
            self._walk = None
            self.columns = _tree_columns(
                survey,
                self.columns.round + 1,
            )


def _tree_columns(survey: Survey, round: int) -> TreeColumns:
    found = survey.found
    last_use = max((one.used for one in found), default=0)
    parents: list[int] = []
    num_tokens: list[int] = []
    num_below: list[int] = []
    ages: list[int] = []
    locks: list[int] = []
    pins: list[int] = []
    heads: list[bytes] = []
    for one in found:
        parents.append(one.parent)
        num_tokens.append(one.num_tokens)
        num_below.append(one.num_below)
        ages.append(last_use - one.used)
        locks.append(one.locks)
        pins.append(one.pins)
        heads.append(one.head)
    return TreeColumns(
        round=round,
        num_nodes=survey.num_nodes,
        is_whole=survey.is_whole,
        parents=_ints(parents),
        num_tokens=_ints(num_tokens),
        num_below=_longs(num_below),
        ages=_longs(ages),
        locks=_ints(locks),
        pins=_ints(pins),
        heads=heads,
    )


def _arrival_order(request: Request) -> int:
    return request.spec.arrival_order


def _ints(values: object) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def _longs(values: object) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()


def _floats(values: object) -> bytes:
    return np.array(values, dtype=np.float32).tobytes()
