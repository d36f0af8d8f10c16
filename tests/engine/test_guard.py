"""A message whose handling raises ends what it brought, and nothing else: faults are planted into
every function that taking it in enters or leaves, and into every handler."""

from __future__ import annotations

import logging
import typing
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.engine_world import EngineWorld, request
from tests.examples import example_of
from tests.faults import Injected, Places
from tests.scheduler.scenes import settings
from tests.seeds import seeds
from weft.engine.control import handlers as control
from weft.engine.health import PROBE
from weft.launch.worker import _answer
from weft.messages import codec
from weft.messages.calls import CallFailed
from weft.messages.codec import FromEngine, ToEngine, encode
from weft.messages.control import (
    FlushCache,
    FlushCacheReply,
    GetStateReply,
    HealthCheck,
    HealthCheckReply,
    SetPolicy,
)
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sampling import Grammar
from weft.messages.sessions import OpenSession, SessionParams
from weft.messages.status import Stats
from weft.scheduler import policies
from weft.scheduler.feature import Feature
from weft.scheduler.policies.kinds.fair import Fair

# These stand around the guard.
SPARED = frozenset({"submit", "repair_if_in_doubt", "take_faults", "is_in_doubt"})


def busy(policy: str = "fcfs") -> EngineWorld:
    """An engine with an open session, two requests that run and one that waits."""
    limits = settings(schedule_policy=policy, max_queue_s=500.0, max_running_requests=3)
    world = EngineWorld(limits, depth=1)
    world.expected_failures = (Injected,)
    world.tell(OpenSession(call=1, session_id="s"))
    for start in (40, 60):
        world.send(list(range(start, start + 9)), max_new_tokens=12, user=f"u{start}")
    world.step()
    world.step()
    world.send(list(range(80, 90)), max_new_tokens=4, user="u40", priority=3)
    return world


def newcomers(world: EngineWorld) -> BatchGenerate:
    """One of each kind: plain, with a prompt that another has too, of a session, with a grammar."""
    first = len(world.sent)
    prompts = [[7, 8, 9, 10], [7, 8, 9, 10], [11, 12, 13], [14, 15]]
    grammar = Grammar("choice", '["yes"]')
    members = [
        msgspec.structs.replace(
            request(first, prompts[0], max_new_tokens=3), user="u40", timeout_ms=500_000
        ),
        msgspec.structs.replace(
            request(first + 1, prompts[1], max_new_tokens=3), priority=-2, user="new"
        ),
        msgspec.structs.replace(
            request(first + 2, prompts[2], max_new_tokens=3), session=SessionParams(id="s")
        ),
        request(first + 3, prompts[3], max_new_tokens=3, grammar=grammar),
    ]
    world.expect(*members)
    return BatchGenerate(
        prompts=[np.array(ids, dtype=np.int32).tobytes() for ids in prompts],
        requests=[msgspec.structs.replace(one, input_ids=b"") for one in members],
        prompt_of=[0, 1, 2, 3],
    )


def broken(world: EngineWorld) -> list[Finish]:
    """The final words that tell of a planted fault."""
    return [finish for finish in world.finished.values() if finish.status == 500]


def run_to_the_end(world: EngineWorld) -> None:
    """Everybody gets a final word and the tokens of a run on its own, and nothing is left of
    anybody."""
    world.run_dry()
    world.check_idle()
    world.check_outputs()
    engine = world.engine
    assert not engine.services.grammars.feature.queue
    assert not engine.services.features.vectors.by_id
    assert not engine.services.sessions.feature._by_id or set(
        engine.services.sessions.feature._by_id
    ) <= {id for id, finish in world.finished.items() if finish.status == 200}
    policy = engine.scheduler.waiting_queue.online.policy
    if isinstance(policy, Fair):
        assert not policy._waiting
        assert not policy._tenants.num_waiting.any()
        assert not policy._tenants.num_rows.any()
    assert engine.scheduler.waiting_queue.num_tokens == 0
    assert not engine.scheduler.history._open


def num_places(policy: str, event: str) -> int:
    world = busy(policy)
    with Places(event=event, spared=SPARED).watched() as places:
        world.tell(newcomers(world))
    return places.num


@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize("policy", ["fair", "dfs-weight"])  # they keep most in mind
@pytest.mark.parametrize("first", seeds(1, 6))
def test_a_fault_anywhere_in_taking_requests_in_ends_only_those_that_are_not_in(
    policy: str, event: str, first: int
) -> None:
    total = num_places(policy, event)
    assert total > 60
    for at in range(first, total, 6):
        world = busy(policy)
        message = newcomers(world)
        old = set(world.sent) - {one.id for one in message.requests}
        with Places(at, event, SPARED).watched() as places:
            assert world.tell(message) is None
        assert places.raised_in, "the same message takes the same way"
        run_to_the_end(world)
        failed = broken(world)
        assert (
            world.scheduler.counters.messages.num_failed + world.scheduler.counters.num_faults == 1
        )
        assert not old & {finish.id for finish in failed}, "a request that was in before"
        assert all("Injected" in finish.message for finish in failed)
        others = [
            one.id for one in message.requests if one.id not in {finish.id for finish in failed}
        ]
        assert all(
            world.finished[id].reason == "length" or world.finished[id].status == 400
            for id in others
        )


@pytest.mark.parametrize("policy", policies.names())
def test_a_number_that_no_column_holds_ends_its_own_request(policy: str) -> None:
    world = busy(policy)
    for wrong in (
        {"priority": 2**63},
        {"priority": -(2**63) - 1},
        {"priority": 2**31},
        {"timeout_ms": 10**400},
    ):
        one = msgspec.structs.replace(request(len(world.sent), [5, 6], max_new_tokens=2), **wrong)
        world.expect(one)
        assert world.tell(one) is None
        world.step()
    run_to_the_end(world)
    assert [world.finished[id].status for id in (3, 4, 5, 6)] == [400, 400, 400, 500]


KINDS = [kind for kind in typing.get_args(codec.ToEngine)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_handler_that_raises_costs_nobody_else_anything(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = busy()

    def handler(*what: object) -> None:
        raise Injected("planted")

    if kind is BatchGenerate:
        message: ToEngine = newcomers(world)
    elif kind is GenerateRequest:
        message = request(len(world.sent), [5, 6, 7], max_new_tokens=3)
        world.expect(message)
    elif kind is Abort:
        message = Abort(ids=(0,))
    else:
        message = example_of(kind)
    arrivals = {GenerateRequest: "take_in", BatchGenerate: "take_in_batch"}
    if kind in arrivals:
        monkeypatch.setattr(world.engine.services.arrivals, arrivals[kind], handler)
    else:
        monkeypatch.setitem(control.HANDLERS, kind, handler)
    with caplog.at_level(logging.ERROR):
        reply = world.tell(message)
    monkeypatch.undo()
    assert [record.exc_info is not None for record in caplog.records] == [True], (
        "one line, with the traceback"
    )
    assert world.scheduler.stats().total_failed_messages == 1
    if "call" in kind.__struct_fields__:
        assert isinstance(reply, CallFailed)
        assert (reply.call, kind.__name__ in reply.message) == (message.call, True)  # type: ignore[union-attr]
    else:
        assert reply is None
    run_to_the_end(world)
    blamed = {BatchGenerate: 4, GenerateRequest: 1, Abort: 1}.get(kind, 0)
    assert len(broken(world)) == blamed


def test_a_number_that_is_taken_stays_its_owners_when_its_double_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = busy()

    def used_by(message: GenerateRequest) -> None:
        raise Injected("planted")

    monkeypatch.setattr(world.scheduler.hooks, "used_by", used_by)
    world.tell(request(0, [5, 6, 7], max_new_tokens=3))
    run_to_the_end(world)
    assert not broken(world)


def test_a_policy_that_cannot_take_the_queue_over_is_not_switched_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for at in range(40):
        world = busy("fair")
        with Places(at, spared=SPARED).watched():
            reply = world.tell(SetPolicy(call=5, policy="dfs-weight"))
        if isinstance(reply, CallFailed):
            assert world.scheduler.settings.schedule_policy == "fair"
            assert isinstance(world.scheduler.waiting_queue.online.policy, Fair)
        run_to_the_end(world)
        assert not broken(world)


@pytest.mark.parametrize("moment", ["end", "release"])
def test_a_part_that_fails_at_an_end_keeps_nobody_from_the_final_word(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(*what: object) -> None:
        raise Injected("planted")

    world = busy()
    hooks = world.scheduler.hooks
    broken = Feature()
    setattr(broken, moment, hook)
    of = hooks.of
    unsubscribe = hooks.unsubscribe
    monkeypatch.setattr(hooks, "of", lambda request: (broken, *of(request)))
    monkeypatch.setattr(hooks, "unsubscribe", lambda request: (broken, *unsubscribe(request)))
    world.abort(Abort(ids=(0, 2)))
    run_to_the_end(world)
    assert [world.finished[id].reason for id in range(3)] == ["abort", "length", "abort"]
    assert world.scheduler.counters.num_faults >= 2


def test_a_health_check_whose_request_cannot_be_opened_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = EngineWorld(settings())
    line = world.scheduler.waiting_queue.online
    append = line.resume
    monkeypatch.setattr(line, "resume", lambda one: 1 / 0)
    assert isinstance(world.tell(HealthCheck(call=3)), CallFailed)
    monkeypatch.setattr(line, "resume", append)
    assert world.tell(HealthCheck(call=4)) is None
    world.step()
    assert PROBE.id in world.scheduler.requests or world.answers(HealthCheckReply)
    world.run_dry()
    assert 4 in [reply.call for reply in world.answers(HealthCheckReply) if reply.success]


def test_a_reply_that_cannot_be_written_ends_its_call_or_its_requests() -> None:
    world = busy()
    sent: list[FromEngine] = []

    def answer(reply: FromEngine) -> None:
        encode(reply)
        sent.append(reply)

    _answer(world.engine, GetStateReply(call=9, stats=Stats(num_running=2**70)), answer)
    step = StepOutput(
        ids=np.array([0, 1], dtype=np.int64).tobytes(),
        tokens=bytes(8),
        finished=[Finish(id=77, reason="length", prompt_tokens=2**70)],
    )
    _answer(world.engine, step, answer)
    called, words = sent
    assert isinstance(called, CallFailed)
    assert called.call == 9
    assert isinstance(words, StepOutput)
    assert [(one.id, one.status) for one in words.finished] == [(77, 500)]
    run_to_the_end(world)
    assert {finish.id for finish in broken(world)} == {0, 1}


@pytest.mark.parametrize("hook", ["after_step", "before_step"])
def test_what_fails_beside_a_step_in_every_step_ends_nobody_and_fills_no_log(
    hook: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(now: float) -> None:
        raise Injected("planted")

    world = busy()
    services = world.engine.services
    if hook == "after_step":
        monkeypatch.setattr(services.sessions, hook, fail)
    else:
        services.core.hooks.attach(services.grammars)
        monkeypatch.setattr(services.grammars, hook, fail)
    with caplog.at_level(logging.WARNING):
        run_to_the_end(world)
    assert not broken(world)
    assert world.scheduler.counters.messages.num_failed > 5
    assert [record.exc_info is not None for record in caplog.records][:1] == [True]
    assert len(caplog.records) <= 2, "the traceback once, and a line a minute"


def test_a_flush_of_the_cache_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = EngineWorld(settings())
    flush = world.scheduler.flush_cache
    monkeypatch.setattr(world.scheduler, "flush_cache", lambda: 1 / 0)
    world.tell(FlushCache(call=7))
    world.step()
    monkeypatch.setattr(world.scheduler, "flush_cache", flush)
    world.step()
    assert [(reply.call, reply.success) for reply in world.answers(FlushCacheReply)] == [(7, True)]
