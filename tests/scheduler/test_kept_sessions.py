"""Sessions that outlive their engine: what is told of them is enough to go on elsewhere."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.session_scene import Scene, prompt
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.messages.codec import decode_from_engine, encode
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort
from weft.messages.sessions import (
    CloseSession,
    KeepSessions,
    KeepSessionsReply,
    KeptSession,
    KeptTurn,
    OpenSession,
    OpenSessionReply,
    SessionChange,
    SessionChanges,
    SessionParams,
)
from weft.scheduler.features.turns import Session


class Copy:
    """What a store has of the sessions."""

    def __init__(self) -> None:
        self.sessions: dict[tuple[str, str], KeptSession] = {}
        self.turns: dict[tuple[str, str], dict[str, KeptTurn]] = {}

    def note(self, change: SessionChange) -> None:
        session = change.session
        key = (session.owner, session.id)
        if change.is_closed or change.is_new:
            self.sessions.pop(key, None)
            self.turns.pop(key, None)
        if change.is_closed:
            return
        self.sessions[key] = session
        turns = self.turns.setdefault(key, {})
        for name in change.forgotten:
            turns.pop(name, None)
        for turn in session.turns:
            turns[turn.name] = turn

    @property
    def kept(self) -> list[KeptSession]:
        found = []
        for key, one in self.sessions.items():
            turns = list(self.turns[key].values())
            found.append(
                KeptSession(
                    id=one.id,
                    owner=one.owner,
                    capacity=one.capacity,
                    timeout_s=one.timeout_s,
                    num_turns=one.num_turns,
                    last=one.last,
                    turns=turns,
                )
            )
        return found


class KeptScene(Scene):
    """A world whose sessions have a copy."""

    def __init__(self, sessions: list[KeptSession] | None = None, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.copy = Copy()
        self.told: list[object] = []  # in order
        reply = self.engine.submit(KeepSessions(call=9, sessions=sessions or []))
        assert isinstance(reply, KeepSessionsReply)
        self.refused = reply.refused

    def turn(self) -> list[StepOutput]:
        replies = [decode_from_engine(encode(reply)) for reply in self.engine.step()]
        for reply in replies:
            self.told.append(reply)
            if isinstance(reply, SessionChanges):
                for change in reply.changes:
                    self.copy.note(change)
        return [reply for reply in replies if isinstance(reply, StepOutput)]

    def ask(self, message: OpenSession | CloseSession) -> None:
        assert self.engine.submit(message) is None, "the reply comes after the changes"
        self.step()


def conversations(world: Scene) -> dict[tuple[str, str, str], tuple[bytes, int]]:
    """The history and the length of the prompt of each turn that has ended."""
    return {
        (session.owner, session.id, turn.name): (turn.history(turn.length), turn.prompt_len)
        for session in world.sessions.by_name.values()
        for turn in session.turns.values()
        if not turn.is_open
    }


def heads(world: Scene) -> dict[str, tuple[object, ...]]:
    def head(session: Session) -> tuple[object, ...]:
        last = None if session.last is None else session.last.name
        ended = [turn for turn in session.turns.values() if not turn.is_open]
        num_tokens = sum(len(turn.tokens) // TOKEN_BYTES for turn in ended)
        return session.capacity, session.timeout_s, last, num_tokens

    return {name: head(session) for name, session in world.sessions.by_name.items()}


def test_an_end_and_a_reply_are_told_after_what_they_say_is_kept() -> None:
    world = KeptScene()
    world.ask(OpenSession(call=1, session_id="s"))
    kinds = [type(one) for one in world.told]
    assert kinds == [SessionChanges, OpenSessionReply]
    first = world.say(prompt(10))
    world.run_dry()
    place = next(
        place
        for place, one in enumerate(world.told)
        if isinstance(one, StepOutput) and [end.id for end in one.finished] == [first]
    )
    before = [one for one in world.told[:place] if isinstance(one, SessionChanges)]
    [turn] = before[-1].changes[0].session.turns
    assert turn.name == world.sent[first].rid
    assert turn.start == 0
    assert turn.prompt_len == 10
    assert len(turn.tokens) == TOKEN_BYTES * (10 + len(world.outputs[first]))
    world.ask(CloseSession(call=2, session_id="s"))
    assert world.copy.sessions == {}


def test_a_conversation_goes_on_in_another_engine() -> None:
    world = KeptScene()
    world.ask(OpenSession(call=1, session_id="s", capacity=150, timeout_s=60.0))
    first = world.say(prompt(10), rid="first")
    world.run_dry()
    world.say([40, 41], rid="second")
    world.run_dry()
    world.say([50], rid="branch")
    history = world.turn_of(first)

    other = KeptScene(world.copy.kept)
    other.copy = world.copy  # it goes on with the same store
    assert heads(other)["s"] == (150, 60.0, "second", 10 + 6 + 2 + 6)
    continued = other.say([60], rid="third")
    params = SessionParams(id="s", rid="first", drop_previous_output=True)
    branch = other.send([70], session=params, rid="own", max_new_tokens=2, ignore_eos=True)
    again = other.send([5], session=SessionParams(id="s", rid="first"), rid="second")
    assert "has a turn 'second' already" in other.why_not(again)[1]
    other.run_dry()
    whole = world.sessions.by_name["s"].turns["second"]
    assert other.turn_of(continued)[: whole.length] == list(
        memoryview(whole.history(whole.length)).cast("i")
    )
    assert other.turn_of(branch)[:11] == [*history[:10], 70]
    third = KeptScene(other.copy.kept)
    assert {name for _, _, name in conversations(third)} == {*("first", "second", "third", "own")}
    other.replay(check=True)


def test_a_session_that_is_being_closed_does_not_come_back() -> None:
    world = KeptScene()
    world.ask(OpenSession(call=1, session_id="s"))
    world.say(prompt(5), max_new=30)
    world.step()
    world.ask(CloseSession(call=2, session_id="s"))
    assert "s" in world.sessions
    assert world.copy.sessions == {}
    world.run_dry()
    assert world.copy.sessions == {}


def test_limits_and_times_hold_as_before() -> None:
    tokens = bytes(TOKEN_BYTES * 8)
    turn = KeptTurn(name="t", prompt_len=5, tokens=tokens)
    hole = KeptTurn(name="after", parent="lost", start=4, prompt_len=5, tokens=tokens)
    far = KeptTurn(name="far", parent="t", start=9, prompt_len=10, tokens=tokens)
    kept = [
        KeptSession(
            id=id, owner=owner, capacity=500, timeout_s=50.0, idle_s=idle_s, turns=[turn, hole, far]
        )
        for id, owner, idle_s in (("a", "alice", 0.0), ("b", "alice", 45.0), ("c", "alice", 0.0))
    ]
    world = KeptScene(
        [*kept, *kept], max_sessions=3, max_per_owner=2, max_tokens=20, timeout_s=48.0
    )
    assert world.refused == [
        "2 sessions of this key are open, as many as --max-sessions-per-key allows",
        "the session 'a' is open already",
        "the session 'b' is open already",
        "2 sessions of this key are open, as many as --max-sessions-per-key allows",
    ]
    [one, two] = world.sessions.by_name.values()
    assert one.capacity == 20
    assert one.timeout_s == 48.0
    assert one.num_tokens == 8
    assert set(one.turns) == {"t"}
    for _ in range(4):
        world.step()
    assert set(world.sessions.by_name) == {one.name}, "the other has been idle for too long"
    assert two.name not in world.sessions
    assert list(world.copy.turns) == [], "what has not changed is not told"


def test_a_session_without_its_last_turn_does_not_go_on_with_less() -> None:
    turn = KeptTurn(name="first", prompt_len=1, tokens=b"1234")
    hole = KeptTurn(name="third", parent="second", prompt_len=1, tokens=b"1234")
    holey = KeptSession(
        id="s", capacity=10, timeout_s=0.0, num_turns=3, last="third", turns=[turn, hole]
    )
    empty = KeptSession(id="t", capacity=10, timeout_s=0.0, num_turns=1, last="lost")
    whole = KeptSession(id="u", capacity=10, timeout_s=0.0)
    world = KeptScene([holey, empty, whole])
    assert list(world.sessions.by_name) == ["u"]
    assert world.refused == [
        "the turn 'third', the last one of the session 's', is missing",
        "the turn 'lost', the last one of the session 't', is missing",
    ]


def test_without_a_copy_nothing_is_noted() -> None:
    world = Scene()
    world.open()
    world.say(prompt(5))
    world.run_dry()
    assert world.sessions.ledger.take() == []


@pytest.mark.parametrize("seed", range(12))
def test_the_copy_is_always_what_the_engine_has(seed: int) -> None:
    """Sessions open, close, branch, replace, are cut and aborted: a restored engine is equal."""
    rng = random.Random(f"kept {seed}")
    world = KeptScene(depth=seed % 2, max_sessions=6, max_turns=20)
    for number in range(60):
        name = rng.choice("abc")
        if name not in world.sessions:
            world.ask(OpenSession(call=1, session_id=name))
        session = world.sessions.by_name[name]
        turns = list(session.turns)
        what = rng.random()
        if what < 0.6:
            params = SessionParams(
                id=name,
                rid=rng.choice(["", *turns]),
                replace=rng.random() < 0.2,
                drop_previous_output=rng.random() < 0.2,
                offset=rng.choice([0, 0, 1, -1]),
            )
            world.send(
                prompt(rng.randint(1, 3)),
                session=params,
                rid=f"r{number}",
                max_new_tokens=rng.randint(1, 4),
                ignore_eos=True,
            )
        elif what < 0.7:
            world.ask(CloseSession(call=2, session_id=name))
        elif what < 0.8:
            ids = tuple(world.outputs)[-2:]
            lens = tuple(min(1, len(world.outputs[id])) for id in ids)
            world.abort(Abort(ids=ids, output_lens=lens if rng.random() < 0.7 else ()))
        for _ in range(rng.randint(0, 4)):
            world.step()
    world.run_dry()
    world.step()
    other = KeptScene(world.copy.kept, max_sessions=6, max_turns=20)
    assert other.refused == []
    assert conversations(other) == conversations(world)
    assert heads(other) == heads(world)
    world.replay()
