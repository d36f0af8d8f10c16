"""A world with sessions."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.world import VOCAB
from weft.messages.sessions import (
    CloseSession,
    CloseSessionReply,
    OpenSession,
    OpenSessionReply,
    SessionParams,
)
from weft.scheduler.features.sessions import Sessions
from weft.scheduler.settings import SchedulerSettings, SessionLimits

PAGE = 4


class Scene(RecordedWorld):
    """A world in which sessions are opened and closed, and requests belong to them."""

    def __init__(
        self,
        *,
        num_pages: int = 100,
        depth: int = 0,
        fail_steps: set[int] | None = None,
        **settings: object,
    ) -> None:
        limits = {
            name: settings.pop(name)
            for name in SessionLimits.__dataclass_fields__
            if name in settings
        }
        super().__init__(
            SchedulerSettings(
                num_pages=num_pages,
                page_size=PAGE,
                max_running_requests=4,
                context_length=200,
                vocab_size=VOCAB,
                sessions=SessionLimits(**limits),  # type: ignore[arg-type]
                **settings,  # type: ignore[arg-type]
            ),
            depth,
            fail_steps,
        )

    @property
    def sessions(self) -> Sessions:
        return self.engine._engine.services.sessions.feature

    def open(self, name: str = "s", **fields: object) -> str:
        """Open a session. Returns why not."""
        reply = self.engine.submit(OpenSession(call=1, session_id=name, **fields))  # type: ignore[arg-type]
        assert isinstance(reply, OpenSessionReply)
        assert reply.success == (not reply.message)
        return reply.message

    def close(self, name: str = "s") -> CloseSessionReply:
        reply = self.engine.submit(CloseSession(call=1, session_id=name))
        assert isinstance(reply, CloseSessionReply)
        return reply

    def say(
        self,
        own: list[int],
        name: str = "s",
        *,
        rid: str | None = None,
        max_new: int | None = 6,
        **fields: object,
    ) -> int:
        """Send a request of a session, which is named after its number if not by `rid`."""
        options: dict[str, Any] = {} if rid is None else {"rid": rid}
        params = SessionParams(id=name, **fields)  # type: ignore[arg-type]
        return self.send(own, session=params, max_new_tokens=max_new, ignore_eos=True, **options)

    def turn_of(self, id: int) -> list[int]:
        """The prompt and output of a request, as its session remembers it."""
        turn = next(
            turn
            for session in self.sessions.by_name.values()
            for turn in session.turns.values()
            if turn.id == id
        )
        return np.frombuffer(turn.history(turn.length), dtype=np.int32).tolist()

    def why_not(self, id: int) -> tuple[int, str]:
        """How a request was refused."""
        self.step()
        return self.finished[id].status, self.finished[id].message


def prompt(length: int, first: int = 10) -> list[int]:
    return list(range(first, first + length))
