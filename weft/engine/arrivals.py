"""Arrivals: from a message to an open request, or to its refusal.

    refuses   services that refuse requests ▸ the features that the request uses ▸ its session
    open      in the scheduler, which may refuse it, too; then its features are notified
    opened    its session and grammar ▸ services that make it wait

A request visits only the services that it concerns. This module does not know how the scheduler
orders requests.
"""

from __future__ import annotations

from weft.engine.core import EngineCore
from weft.engine.grammar_service import GrammarService
from weft.engine.session_service import SessionService
from weft.messages.requests import BatchGenerate, GenerateRequest
from weft.observe.survivable import is_survivable
from weft.scheduler.feature import Feature
from weft.scheduler.limits import Refusal


class Arrivals:
    """Opens the requests of one engine."""

    def __init__(
        self,
        core: EngineCore,
        sessions: SessionService,
        grammars: GrammarService,
    ) -> None:
        self._core = core
        self._sessions = sessions
        self._grammars = grammars

    def take_in(self, message: GenerateRequest, now: float) -> None:
        """Open a request, or refuse it. If anything raises, only this request ends."""
        is_new = message.id not in self._core.scheduler.requests
        try:
            self._open(message, now, is_new=is_new)
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            if is_new:
                self._core.guard.request_failed(message, exc)
            else:
                self._core.guard.note(type(message).__name__, exc)

    def take_in_batch(self, batch: BatchGenerate, now: float) -> None:
        """Open each member separately: an invalid one ends with an error and does not affect the
        others."""
        for member in batch.members():
            self.take_in(member, now)

    def _open(self, message: GenerateRequest, now: float, *, is_new: bool) -> None:
        """`is_new`: no open request has its id. Otherwise the scheduler only counts the
        duplicate."""
        scheduler = self._core.scheduler
        features = scheduler.hooks.used_by(message)
        refusal = self._refusal(message, features, now)
        if refusal is None and message.session is not None:
            opened = self._sessions.with_history(message)
        else:
            opened = message
        # Refused requests, too: the scheduler sends their final reply and adds them to its history.
        scheduler.add_request(opened, now, refusal, features=features)
        if is_new and message.id in scheduler.requests:
            self._opened(message, now)

    def _refusal(
        self, message: GenerateRequest, features: tuple[Feature, ...], now: float
    ) -> Refusal | None:
        """Why a request cannot be opened; None if only the scheduler can say."""
        for service in self._core.hooks.refuses:
            refusal = service.refuses(message, now)
            if refusal is not None:
                return refusal
        for feature in features:
            refusal = feature.refusal(message)
            if refusal is not None:
                return refusal
        if message.session is not None:
            return self._sessions.begin_turn(message, now)
        return None

    def _opened(self, message: GenerateRequest, now: float) -> None:
        """The request is open. The last service that notes why it waits is the one that users
        see."""
        if message.session is not None:
            self._sessions.enter_turn(message, now)
        if message.sampling.grammar is not None:
            self._grammars.compile(message, now)
        for service in self._core.hooks.opened:
            service.opened(message, now)
