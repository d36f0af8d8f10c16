"""The engine's picture for the live page: made only while a client watches, and free of cost
otherwise.

    Watch ─▶ ask ─▶ (the running step ends) ─▶ after_step ─▶ Picture

The first question attaches the service. From then on it notes each step, which takes a microsecond,
and answers every question after a step; when no question has come for `WATCH_S`, it detaches
itself. No decision depends on it, and it reads no clock of its own: journals do not record its
questions, and a replay can make the same pictures from a journal.
"""

from __future__ import annotations

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.engine.input_gate import InputGate
from weft.engine.load_report import LoadReporter
from weft.engine.pause import Pause
from weft.engine.picture.queue import QueueWatch
from weft.engine.picture.rows import RowWatch
from weft.engine.picture.steps import StepWatch
from weft.engine.picture.tree import TreeWatch
from weft.engine.pin_service import PinService
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.memory.radix.tree import key_of, path_up
from weft.messages.picture import GetPrefixReply, Picture, Watch
from weft.scheduler.features.registry import Features
from weft.scheduler.request import adapter_and_salt

WATCH_S = 10.0  # after this time without a question, nobody watches
MAX_PINS = 50  # in a picture: the most recently used pins


class Pictures(Service):
    """Attached while a client watches."""

    name = "the pictures"

    def __init__(
        self,
        core: EngineCore,
        features: Features,
        load: LoadReporter,
        pins: PinService,
        pause: Pause,
        input_gate: InputGate,
    ) -> None:
        self._core = core
        self._load = load
        self._pins = pins
        self._pause = pause
        self._input_gate = input_gate
        self._asked: list[Watch] = []  # questions that wait for the end of a step
        self._steps = StepWatch(core)
        self._rows = RowWatch(core.scheduler)
        self._queue = QueueWatch(core.scheduler, features)
        self._tree = TreeWatch(core)
        self._stays = False  # keep attached without questions
        self._asked_s = 0.0  # when the last question was answered

    def ask(self, question: Watch) -> None:
        """Answer after the next step; without work there is a step at once."""
        if self not in self._core.hooks.attached:
            self._steps = StepWatch(self._core)
            self._tree = TreeWatch(self._core)
        self._asked.append(question)
        self._core.hooks.begin_work(self)

    def stay(self) -> None:
        """Note every step from now on, even without questions, for a caller that runs the engine
        and takes pictures (`take`)."""
        self._stays = True
        self._core.hooks.attach(self)

    def take(self, question: Watch, now: float) -> Picture:
        """A picture between two steps."""
        return self._picture(question, now)

    def prefix(self, number: int) -> GetPrefixReply:
        """A node of the last tree, and the requests and pins that use it."""
        node = self._tree.node(number)
        if node is None:
            return GetPrefixReply()
        scheduler = self._core.scheduler
        key = key_of(node)
        requests = [
            request.message.rid
            for request in scheduler.requests.values()
            if request.prefix.is_locked and node in path_up(request.prefix.handle)
        ]
        adapter, cache_salt = adapter_and_salt(key.namespace)
        pins = scheduler.kv.pins
        names = [pin.name for pin in (*pins.firm, *pins) if node in path_up(pin.handle)]
        return GetPrefixReply(
            cache_salt=cache_salt,
            adapter=adapter,
            tokens=key.tokens,
            start=(len(key.tokens) - len(node.key)) // TOKEN_BYTES,
            hits=node.hits,
            requests=requests,
            pins=names,
        )

    def after_step(self, now: float) -> None:
        self._steps.look(now)
        self._tree.go_on(now)
        if self._asked:
            self._answer(now)
        elif not self._stays and now - self._asked_s > WATCH_S:
            self._core.hooks.detach(self)

    def _answer(self, now: float) -> None:
        questions = self._asked
        self._asked = []
        self._asked_s = now
        self._core.hooks.end_work(self)
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
            rank=question.rank,
            at_s=now,
            stats=self._load.stats(),
            steps=self._steps.columns(question.since_step),
            rows=self._rows.columns(now),
            queue=self._queue.columns(now),
            pins=self._pins.statuses(now, MAX_PINS),
            tree=tree,
            input_state=self._input_gate.state,
            paused=self._pause.mode or "",
        )
