"""Taking messages in: two sources, dispatch, limits of the queue, batches, calls by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.engine.engine_world import EngineWorld, request
from tests.scheduler.scenes import settings
from weft.config.options import SettingsError
from weft.engine.control.handlers import HANDLERS, IncompleteTable, require_all
from weft.engine.engine import Engine
from weft.engine.intake import MAX_RECV_PER_POLL, Intake
from weft.launch import rpc as rpc_client
from weft.launch.worker import _receive
from weft.messages.by_name import BadCall, plain, request_named
from weft.messages.calls import ControlReply
from weft.messages.channel import Receiver, RpcSocket, Sender, Sleeper
from weft.messages.codec import (
    REQUESTS,
    BadMessage,
    FromEngine,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
)
from weft.messages.control import (
    BlockInput,
    FlushCache,
    FlushCacheReply,
    GetState,
    GetStateReply,
    ListRequests,
    ListRequestsReply,
    SetPolicy,
)
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.status import UnreadableMessages
from weft.messages.weights import DestroyWeightsUpdateGroup, WeightsReply
from weft.observe.log import EventLog

HANG_S = 240.0  # whatever takes so long does not come any more

# Two sources


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Sockets]:
    found = Sockets(tmp_path)
    yield found
    found.close()


class Sockets:
    """Both ends of the front's socket and of the RPC socket."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.folder = folder
        self.front = Sender(self.context, f"ipc://{folder / 'in'}", bind=True)
        self.receiver = Receiver(self.context, f"ipc://{folder / 'in'}", decode_to_engine)
        self.rpc = RpcSocket(self.context, f"ipc://{folder / 'rpc'}")
        self.sleeper = Sleeper(self.receiver, self.rpc)
        self.sent: list[FromEngine] = []  # to the front
        self.intake = Intake(self.receiver, self.sent.append, self.rpc)
        self._others: list[zmq.Socket[bytes]] = []

    def client(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.connect(f"ipc://{self.folder / 'rpc'}")
        self._others.append(socket)
        return socket

    def serve(self, engine: Engine) -> None:
        """Once, as the engine process does when something has come."""
        assert self.sleeper.wait(240.0)
        _receive(engine, self.intake)
        for reply in engine.step():
            self.intake.send(reply)

    @contextmanager
    def serving(self, engine: Engine) -> Iterator[None]:
        """Serve in a thread, for as long as the block lasts."""
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                if self.sleeper.wait(0.05):
                    self.serve(engine)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def close(self) -> None:
        for socket in self._others:
            socket.close(linger=0)
        self.front.close()
        self.receiver.close()
        self.rpc.close()
        self.context.term()


def test_replies_to_rpc_calls_go_to_the_caller_and_all_others_to_the_front(
    sockets: Sockets,
) -> None:
    world = EngineWorld(settings())
    one = sockets.client()
    other = sockets.client()
    one.send(msgspec.msgpack.encode(ListRequests(call=7)))
    sockets.serve(world.engine)
    other.send(msgspec.msgpack.encode(FlushCache(call=7)))  # answered with the next step
    sockets.serve(world.engine)
    sockets.front.send(GetState(call=9))
    sockets.serve(world.engine)
    assert one.poll(240_000)
    assert other.poll(240_000)
    listed = decode_from_engine(one.recv())
    assert isinstance(listed, ListRequestsReply)
    assert listed.call == 7
    assert listed.queue.max_queued_requests == 4_096
    assert decode_from_engine(other.recv()) == FlushCacheReply(call=7, success=True)
    [to_front] = [reply for reply in sockets.sent if isinstance(reply, ControlReply)]
    assert isinstance(to_front, GetStateReply)
    assert to_front.call == 9
    assert to_front.stats.kv_tokens == world.scheduler.kv.room.capacity


def test_the_front_hears_of_new_weights_whoever_has_changed_them(sockets: Sockets) -> None:
    client = sockets.client()
    client.send(msgspec.msgpack.encode(DestroyWeightsUpdateGroup(call=3)))
    assert sockets.sleeper.wait(240.0)
    [call] = sockets.intake.recv_requests()
    assert isinstance(call, DestroyWeightsUpdateGroup)
    sockets.intake.send(WeightsReply(call=call.call, success=True, weight_version="v2"))
    assert client.poll(240_000)
    assert decode_from_engine(client.recv()) == WeightsReply(
        call=3, success=True, weight_version="v2"
    )
    [to_front] = sockets.sent
    assert isinstance(to_front, WeightsReply)
    assert to_front.weight_version == "v2"


def test_one_poll_takes_no_more_than_its_cap_and_the_rest_comes_with_the_next(
    sockets: Sockets,
) -> None:
    for call in range(MAX_RECV_PER_POLL + 3):
        sockets.front.send(GetState(call=call))
    sockets.client().send(msgspec.msgpack.encode(GetState(call=1)))
    taken: list[ToEngine] = []
    sizes = []
    while len(taken) < MAX_RECV_PER_POLL + 4:
        assert sockets.sleeper.wait(240.0)
        received = sockets.intake.recv_requests()
        taken += received
        sizes.append(len(received))
    assert max(sizes) <= MAX_RECV_PER_POLL + 1  # with the call, which had a poll of its own
    assert sockets.intake.recv_requests() == []
    calls = [message.call for message in taken if isinstance(message, GetState)]
    assert [call for call in calls if call >= 0] == list(range(MAX_RECV_PER_POLL + 3))


def test_what_no_socket_can_read_is_dropped_counted_and_harms_nobody(
    sockets: Sockets,
) -> None:
    world = EngineWorld(settings())
    client = sockets.client()
    deep = (
        b"\x84\xa4type\xa3rpc\xa4call\x01\xa6method\xa1x\xa6params\x81\xa1a"
        + b"\x91" * 200_000
        + b"\x00"
    )
    for junk in (
        b"",
        b"\xff" * 100,
        b"GET / HTTP/1.1",
        deep,
        msgspec.msgpack.encode({"type": "nothing"}),
    ):
        sockets.front._socket.send(junk)
        client.send(junk)
    client.send_multipart([b"a", b"b"])
    client.send(msgspec.msgpack.encode(Abort(all=True)))  # no call: aborts come from the front
    sockets.front.send(GetState(call=3))
    while not sockets.sent or world.scheduler.stats().total_dropped_messages < 12:
        sockets.serve(world.engine)
    assert world.scheduler.stats().total_dropped_messages == 12
    assert isinstance(sockets.sent[0], GetStateReply)


def test_a_message_that_is_too_deep_is_no_message() -> None:
    with pytest.raises(BadMessage):
        decode_to_engine(b"\x81\xa4type" + b"\x91" * 200_000 + b"\x00")


# Dispatch


def test_a_table_that_lacks_a_message_is_refused_at_the_start() -> None:
    lacking = {kind: handler for kind, handler in HANDLERS.items() if kind is not BlockInput}
    with pytest.raises(IncompleteTable, match=r"without a handler: BlockInput$"):
        require_all(lacking, HANDLERS)


def test_unknown_messages_and_numbers_that_are_taken_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = EngineWorld(settings())
    first = world.send([1, 2], max_new_tokens=3)
    with caplog.at_level(logging.WARNING, "weft"):
        for _ in range(50):
            assert world.tell("what is this?") is None  # type: ignore[arg-type]
    world.take_in(world.sent[first])
    world.tell(UnreadableMessages(num=4))
    stats = world.scheduler.stats()
    assert stats.total_unknown_messages == 50
    assert stats.total_duplicate_requests == 1
    assert stats.total_dropped_messages == 4
    assert [record.message for record in caplog.records].count("unknown_message") <= 1
    world.run_dry()
    world.check_outputs()


def test_what_comes_in_masses_is_logged_once_a_minute_with_its_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr("weft.observe.log.time.monotonic", lambda: now)
    log = EventLog("masses")
    with caplog.at_level(logging.WARNING, "weft"):
        for second in range(130):
            now = 1_000.0 + second
            log.seldom("flood")
    assert [record.fields["times"] for record in caplog.records if record.message == "flood"] == [
        1,
        60,
        60,
    ]  # type: ignore[attr-defined]


# Limits of the queue


def test_the_queue_is_limited_in_tokens_too_but_a_lone_request_may_be_long() -> None:
    world = EngineWorld(settings(max_queued_tokens=20, max_running_requests=1))
    world.send([1], max_new_tokens=30, ignore_eos=True)
    world.step()
    long, short, over = (world.send([1] * n, max_new_tokens=1) for n in (30, 1, 1))
    assert long in world.scheduler.requests
    world.step()
    assert {id: end.message for id, end in world.finished.items()} == dict.fromkeys(
        (short, over), "The request queue is full."
    )
    assert {end.status for end in world.finished.values()} == {503}
    world.abort(Abort(ids=(long,)))
    fit = [world.send([1] * 10, max_new_tokens=1) for _ in range(3)]
    world.run_dry()
    assert [world.finished[id].status for id in fit] == [200, 200, 503]
    stats = world.scheduler.stats()
    assert stats.total_queue_full == 3
    assert stats.num_waiting_tokens == 0
    world.check_idle()


def test_with_priorities_a_full_queue_refuses_the_worst_that_waits_and_not_the_newcomer() -> None:
    world = EngineWorld(
        settings(schedule_policy="priority", max_queued_requests=3, max_running_requests=1)
    )
    world.send([1], max_new_tokens=40, ignore_eos=True, priority=9)
    world.step()
    waiting = [
        world.send([2, i], max_new_tokens=1, priority=priority)
        for i, priority in enumerate((5, 1, 1))
    ]
    better, equal, worse = (
        world.send([3, i], max_new_tokens=1, priority=p) for i, p in enumerate((2, 1, 0))
    )
    world.step()
    # `better` has pushed out the last of the lowest class; after that nobody is below a newcomer of
    # class 1
    assert set(world.finished) == {waiting[2], equal, worse}
    assert {end.status for end in world.finished.values()} == {503}
    world.run_dry()
    assert world.finished[better].reason in ("stop", "length")
    world.check_idle()


def test_nobody_is_pushed_out_in_vain() -> None:
    world = EngineWorld(
        settings(
            schedule_policy="priority",
            max_queued_tokens=100,
            max_running_requests=1,
            context_length=200,
            num_pages=300,
        )
    )
    world.send([1], max_new_tokens=40, ignore_eos=True, priority=9)
    world.step()
    low = world.send([2] * 50, max_new_tokens=1)
    high = world.send([3] * 50, max_new_tokens=1, priority=5)
    newcomer = world.send([4] * 60, max_new_tokens=1, priority=3)
    world.step()
    assert set(world.finished) == {newcomer}  # without `low` it would not fit either
    assert {low, high} <= set(world.scheduler.requests)
    world.send([5] * 50, max_new_tokens=1, priority=3)
    world.step()
    assert set(world.finished) == {newcomer, low}
    world.run_dry()
    world.check_idle()


def test_retracted_requests_are_never_refused() -> None:
    world = EngineWorld(settings(num_pages=100, context_length=100, schedule_conservativeness=0.0))
    ids = [world.send([i] * 8, max_new_tokens=60, ignore_eos=True) for i in range(4)]
    world.step()
    world.scheduler.apply(replace(world.scheduler.settings, max_queued_requests=0))
    world.run_dry()
    assert world.scheduler.stats().total_retractions
    assert {world.finished[id].reason for id in ids} == {"length"}
    world.check_outputs()


# Batches


def batch(*members: GenerateRequest) -> BatchGenerate:
    return BatchGenerate(
        prompts=[member.input_ids for member in members],
        requests=[msgspec.structs.replace(member, input_ids=b"") for member in members],
        prompt_of=list(range(len(members))),
    )


def test_a_batch_is_one_message_whose_members_are_answered_one_by_one() -> None:
    world = EngineWorld(settings())
    members = [
        request(id, prompt, max_new_tokens=3)
        for id, prompt in enumerate(([1, 2], [], [3], [999], [4, 5]))
    ]
    message = batch(*members)
    message.prompt_of[2] = 77  # a prompt that is not there
    world.expect(*members)
    assert world.tell(decode_to_engine(msgspec.msgpack.encode(message))) is None
    world.run_dry()
    assert {id: end.message for id, end in world.finished.items() if end.status == 400} == {
        1: "the prompt is empty",
        2: "the prompt is empty",
        3: "the prompt has token id 999; 0 to 299 are allowed",
    }
    assert {world.finished[id].reason for id in (0, 4)} <= {"stop", "length"}
    world.check_idle()
    for id in (1, 2, 3):
        del world.sent[id]
    world.check_outputs()


def test_a_batch_larger_than_the_queue_is_refused_in_part() -> None:
    world = EngineWorld(settings(max_queued_requests=2, max_running_requests=1))
    members = [request(id, [id], max_new_tokens=2) for id in range(5)]
    world.expect(*members)
    world.tell(batch(*members))
    world.run_dry()
    assert [world.finished[id].status for id in range(5)] == [200, 200, 200, 503, 503]


def test_members_of_a_batch_are_held_explained_and_aborted_like_any_other() -> None:
    world = EngineWorld(settings())
    world.tell(BlockInput(call=1))
    world.tell(batch(*(request(id, [id], group="all", max_new_tokens=2) for id in range(3))))
    assert world.why() == ["the input is blocked until POST /unblock"] * 3
    world.abort(Abort(names=("all",)))
    world.step()
    assert {end.reason for end in world.finished.values()} == {"abort"}


# RPC


def test_a_call_by_name_is_a_control_request_and_nothing_else() -> None:
    for name in ("__class__", "step", "submit", "generate", "shutdown", ""):
        with pytest.raises(BadCall, match=r"there is no method .* the methods are abort_request, "):
            request_named(name, {})
    for name, params, wrong in (
        ("explain_request", {}, "explain_request: rid is missing; it is required"),
        ("explain_request", {"rid": 1}, "explain_request: rid is 1; a text is needed"),
        ("get_state", {"what": 1}, "there is no field 'what'; its fields are: "),
        ("get_state", {"call": 1}, "there is no field 'call'"),
    ):
        with pytest.raises(BadCall, match=wrong):
            request_named(name, params)
    assert request_named("set_policy", {"policy": "lpm"}) == SetPolicy("lpm")


def test_calls_by_name_do_what_their_messages_do() -> None:
    world = EngineWorld(settings())

    def call(method: str, **params: Any) -> dict[str, Any]:
        reply = world.tell(request_named(method, params))
        assert isinstance(reply, ControlReply)
        return plain(reply)

    assert call("set_policy", policy="magic")["success"] is False
    assert call("set_policy", policy="lpm")["before"] == "fcfs"
    assert world.scheduler.settings.schedule_policy == "lpm"
    assert call("abort_request")["message"] == "give rid or abort_all"
    world.send([1, 2], max_new_tokens=2)
    assert call("abort_request", rid="r0")["aborted"] == 1
    assert call("abort_request", rid="r0")["aborted"] == 0
    assert call("log_request_processing_time", rid="r0") == {"num_requests": 1}
    assert set(call("list_methods")["methods"]) == set(REQUESTS)


def test_the_client_finds_the_server_of_this_machine_and_calls_it(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rpc_client, "running", dict)
    with pytest.raises(SettingsError, match="no server of this user"):
        rpc_client.rpc("get_state")
    monkeypatch.setattr(rpc_client, "running", lambda: {1: tmp_path, 2: tmp_path})
    with pytest.raises(SettingsError, match="process id: 1, 2"):
        rpc_client.rpc("get_state")
    with pytest.raises(SettingsError, match="no server with the process id 9; there are 1, 2"):
        rpc_client.rpc("get_state", pid=9)
    with pytest.raises(SettingsError, match=r"not answered for 0\.05 s"):
        rpc_client.rpc("get_state", pid=2, timeout_s=0.05)
    engine = EngineWorld(settings()).engine
    with sockets.serving(
        engine
    ):  # until it is enough: whether the call that was given up arrives is not certain
        assert (
            rpc_client.rpc("list_requests", pid=1, timeout_s=HANG_S)["queue"]["waiting_queue_size"]
            == 0
        )
        with pytest.raises(SettingsError, match="there is no method 'no'"):
            rpc_client.rpc("no", pid=1, timeout_s=HANG_S)
