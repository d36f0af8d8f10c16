"""Sessions at random in a world, beside a model of what they remember: plain lists of tokens."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.world import VOCAB
from weft.messages.control import FlushCache
from weft.messages.requests import Abort
from weft.messages.sessions import (
    CloseSession,
    CloseSessionReply,
    OpenSession,
    OpenSessionReply,
    SessionParams,
)
from weft.scheduler.features.sessions import Sessions
from weft.scheduler.features.turns import Dropped
from weft.scheduler.settings import SchedulerSettings, SessionLimits

NAMES = ("a", "b", "c", "d")


def with_sessions(settings: SchedulerSettings, rng: random.Random) -> SchedulerSettings:
    limits = SessionLimits(
        max_sessions=3,
        max_turns=rng.choice([3, 30]),
        max_tokens=rng.choice([60, 300, 2_000]),
        timeout_s=rng.choice([0.0, 15.0, 300.0]),
    )
    return replace(settings, sessions=limits)


@dataclass
class Turn:
    id: int
    parent: str | None
    prompt: list[int]
    tokens: list[int] | None = None  # prompt and output, once it has ended


@dataclass
class Conversation:
    turns: dict[str, Turn] = field(default_factory=dict)
    last: str | None = None

    def followers(self, name: str | None) -> set[str]:
        """All turns behind this one; without a name, all."""
        found = {child for child, turn in self.turns.items() if turn.parent == name}
        for child in tuple(found):
            found |= self.followers(child)
        return found


class Talk:
    def __init__(self, world: RecordedWorld, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.said: dict[str, Conversation] = {}
        self.open: dict[int, str] = {}  # requests that have not ended, by their session
        self.cut: dict[int, int] = {}  # output tokens that count, of those that the front has ended
        self.live: set[str] = set()  # sessions that were not closed here
        self.told: set[Dropped] = set()  # KV that was
        self.count = Counter[str]()

    @property
    def sessions(self) -> Sessions:
        return self.world.engine._engine.services.sessions.feature

    def act(self) -> None:
        """Do something, perhaps."""
        self._take_in_ends()
        self._look()
        chance = self.rng.random()
        if chance < 0.06:
            self.open_one(self.rng.choice(NAMES))
        elif chance < 0.065:
            self.close_one(self.rng.choice(NAMES))
        elif chance < 0.3 and self.said:
            self.say(self.rng.choice([*self.said]))
        elif chance < 0.34:
            self.stop_one()
        elif chance < 0.36:
            self.world.tell(FlushCache(call=1, timeout_s=self.rng.choice([0.0, 20.0])))

    def open_one(self, name: str) -> None:
        there = name in self.sessions
        reply = self.world.engine.submit(OpenSession(call=1, session_id=name))
        assert isinstance(reply, OpenSessionReply)
        assert not (there and reply.success)
        if reply.success:
            self.said[name] = Conversation()
            self.live.add(name)
            self.count["opened"] += 1

    def close_one(self, name: str) -> None:
        there = name in self.sessions
        reply = self.world.engine.submit(CloseSession(call=1, session_id=name))
        assert isinstance(reply, CloseSessionReply)
        assert reply.success <= there
        running = {self.open[id] for id in self.world.scheduler.requests if id in self.open}
        assert (name in self.sessions) == (name in running)
        self.count["closed"] += reply.success
        self.live.discard(name)

    def say(self, name: str) -> None:
        talk = self.said[name]
        rng = self.rng
        ended = [rid for rid, turn in talk.turns.items() if turn.tokens is not None]
        rid = rng.choice(["", "", *ended[-4:], *talk.turns]) if rng.random() < 0.95 else "none"
        params = SessionParams(
            id=name,
            rid=rid,
            offset=rng.choice([0, 0, 0, -1, -3, 2, rng.randrange(-60, 60)]),
            drop_previous_output=rng.random() < 0.2,
            replace=rng.random() < 0.15,
        )
        own = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 3, 9]))]
        parent = rid or (None if params.replace else talk.last)
        history = self._history(talk, parent, params)
        id = self.world.send(
            own,
            whole=(history or []) + own,
            session=params,
            max_new_tokens=rng.choice([1, 2, 5, 12]),
            ignore_eos=rng.random() < 0.5,
            salt="" if rng.random() < 0.9 else "other",
            timeout_ms=rng.choice([0, 0, 0, 0, 20_000]),
        )
        if id not in self.world.scheduler.requests:
            self.count["refused"] += 1
            return
        assert history is not None, "it goes on where nothing is"
        self.count["branched" if rid else "appended"] += 1
        if params.replace:
            self._forget(talk, talk.followers(parent), parent)
        self.open[id] = name
        talk.turns[f"r{id}"] = Turn(id, parent, history + own)

    def stop_one(self) -> None:
        """As the front does when it has found a stop string."""
        running = [
            id for id in self.open if self.world.outputs[id] and id in self.world.scheduler.requests
        ]
        if running:
            id = self.rng.choice(running)
            self.cut[id] = self.rng.randrange(1, len(self.world.outputs[id]) + 1)
            self.world.abort(Abort(ids=(id,), output_lens=(self.cut[id],)))
            self._take_in(id, self.cut[id])
            self.count["stopped"] += 1

    def compare(self) -> None:
        """The engine remembers just what was said."""
        self._take_in_ends()
        for name, talk in self.said.items():
            session = self.sessions.by_name.get(name)
            if session is None:
                continue  # closed, or out of time
            assert set(session.turns) == set(talk.turns)
            for rid, turn in talk.turns.items():
                kept = session.turns[rid]
                if turn.tokens is not None:
                    assert (
                        np.frombuffer(kept.history(kept.length), dtype=np.int32).tolist()
                        == turn.tokens
                    )
            assert session.num_tokens == sum(
                turn.num_charged for turn in session.turns.values()
            ) + sum(
                turn.num_charged
                for turn in self.sessions._by_id.values()
                if turn.session is session and turn.is_forgotten
            )

    def end(self) -> None:
        """Close all that are open."""
        self.compare()
        for name in NAMES:
            self.close_one(name)
        assert not len(self.sessions)
        assert not self.sessions._by_id
        assert self.world.scheduler.kv.cache.pinned_pages == 0

    def _look(self) -> None:
        late = {name for name in self.live if name not in self.sessions}
        self.live -= late
        self.count["expired"] += len(late)
        told = {
            session.dropped
            for session in self.sessions.by_name.values()
            if session.dropped is not None
        }
        self.count["dropped"] += len(told - self.told)
        self.count["gave way"] += sum("memory" in one.lost.why for one in told - self.told)
        self.told |= told

    def _take_in_ends(self) -> None:
        for id in [id for id in self.world.finished if id in self.open]:
            finish = self.world.finished[id]
            self._take_in(
                id, len(self.world.outputs[id]) if finish.reason in ("stop", "length") else None
            )

    def _take_in(self, id: int, num_output: int | None) -> None:
        """A request has ended: with so many output tokens, or without a trace."""
        talk = self.said[self.open.pop(id)]
        rid = f"r{id}"
        turn = talk.turns.get(rid)
        if turn is None or turn.id != id:
            return  # replaced
        if num_output is None:
            del talk.turns[rid]
        else:
            turn.tokens = turn.prompt + self.world.outputs[id][:num_output]
            talk.last = rid

    @staticmethod
    def _history(talk: Conversation, parent: str | None, params: SessionParams) -> list[int] | None:
        """What a request goes on with; None if it cannot."""
        if (
            not params.rid
            and not params.replace
            and any(turn.tokens is None for turn in talk.turns.values())
        ):
            return None
        if parent is None:
            return []
        turn = talk.turns.get(parent)
        if turn is None or turn.tokens is None:
            return None
        kept = turn.prompt if params.drop_previous_output else turn.tokens
        if abs(params.offset) > len(kept):
            return None
        return kept[: params.offset] if params.offset else kept

    @staticmethod
    def _forget(talk: Conversation, names: set[str], parent: str | None) -> None:
        for name in names:
            del talk.turns[name]
        if talk.last in names:
            talk.last = parent
