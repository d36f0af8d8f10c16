"""Connects the engine's messages with `scheduler/features/grammar.py`: requests that wait for their
grammar, that continue, and whose grammar is refused."""

from __future__ import annotations

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.grammar.protocol import CompileResult
from weft.messages.replies import RequestWarning, StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.observe.log import EventLog
from weft.scheduler.estimate.seen import CompilesSeen
from weft.scheduler.features.grammar import GrammarFeature
from weft.scheduler.history import EventKind
from weft.scheduler.request import Request

log = EventLog("grammar")


class GrammarService(Service):
    """Attached while a request waits for its grammar."""

    name = "grammars"

    def __init__(self, core: EngineCore, feature: GrammarFeature) -> None:
        self._core = core
        self.feature = feature
        self._seen = CompilesSeen()

    def left_s(self, request: Request, now: float) -> float | None:
        """The expected time until the grammar of a request is compiled: 0 if it waits for none,
        None if nothing is known."""
        if request.id not in self.feature.queue:
            return 0.0
        return self._seen.left_s(now - request.spec.arrival_s)

    def compile(self, message: GenerateRequest, now: float) -> None:
        """A request with a grammar is open and waits while the feature compiles it."""
        grammar = message.sampling.grammar
        assert grammar is not None
        what = f"{grammar.name}, {len(grammar.text):,} characters: it is being compiled"
        self._core.note(message.id, EventKind.GRAMMAR, what, now)
        self._core.hooks.attach(self)

    def before_step(self, now: float) -> None:
        """Let requests continue whose grammar is ready; end requests whose grammar is refused."""
        warned: list[RequestWarning] = []
        for result in self.feature.take():
            if result.compile_s:
                request = self._core.scheduler.requests[result.id]
                self._seen.note(now - request.spec.arrival_s)
            if result.constraint is None:
                self._refuse(result)
                continue
            took = "from the cache"
            if result.compile_s:
                took = f"after {1e3 * result.compile_s:,.1f} ms"
            self._core.note(result.id, EventKind.GRAMMAR, f"ready {took}", now)
            warned += [RequestWarning(id=result.id, text=text) for text in result.warnings]
        if warned:
            self._core.send(StepOutput(warnings=warned))
        if not self.feature.queue:
            self._core.hooks.detach(self)

    def _refuse(self, result: CompileResult) -> None:
        scheduler = self._core.scheduler
        log.info("refused", rid=scheduler.requests[result.id].message.rid, reason=result.message)
        scheduler.abort(Abort(ids=(result.id,), message=result.message, status=result.status))
