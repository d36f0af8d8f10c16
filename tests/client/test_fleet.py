"""Several engines with the face of one, without a process: what each gets, and what comes back."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.examples import example_of
from weft.client.engine_state import HangDetector
from weft.client.fleet.changes import EngineChanges
from weft.client.fleet.fleet import PREPARING_S, Fleet
from weft.client.fleet.joined import JOINERS, join, join_stats
from weft.client.fleet.member import Member
from weft.client.fleet.wanted import wanted_rank
from weft.messages.adapters import AdapterReply, LoadLoraAdapter, UnloadLoraAdapter
from weft.messages.cache import ForgetPrefixReply, GetCacheReply
from weft.messages.calls import (
    CallFailed,
    ControlReply,
    ControlRequest,
    SuccessReply,
    control_requests,
    reply_type,
)
from weft.messages.control import (
    AbortRequest,
    AbortRequestReply,
    AuditReply,
    BlockInput,
    ConfigureLogging,
    ContinueGeneration,
    ExpertDistributionReply,
    ExpertRecordReply,
    ExplainRequest,
    ExplainRequestReply,
    Explanation,
    FlushCache,
    FlushCacheReply,
    GetState,
    GetStateReply,
    InputReply,
    ListRequests,
    ListRequestsReply,
    PauseGeneration,
    QueueStatus,
    RequestRow,
    SetInternalState,
    SetPolicy,
    SetPolicyReply,
    SlowDown,
    StartExpertDistributionRecord,
    StartProfile,
    StartProfileReply,
    StopExpertDistributionRecord,
    StopProfileReply,
    UnblockInput,
)
from weft.messages.handoff import HandoffParams
from weft.messages.media import MediaItem
from weft.messages.outside import CallOutside, CallOutsideReply
from weft.messages.picture import (
    GetPrefix,
    GetPrefixReply,
    Picture,
    QueueColumns,
    RowColumns,
    Seen,
    StepColumns,
    Watch,
)
from weft.messages.pins import PinStatus, UnpinReply
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.messages.sessions import (
    CloseSession,
    CloseSessionReply,
    OpenSession,
    OpenSessionReply,
    SessionParams,
)
from weft.messages.status import EngineReady, Stats
from weft.messages.weights import (
    InitWeightsUpdateGroup,
    ReleaseMemoryOccupation,
    ResumeMemoryOccupation,
    UpdateWeightsFromDisk,
    UpdateWeightsFromTensor,
    WeightsReply,
)
from weft.observe.engine_numbers import EngineNumbers
from weft.route.policy import METHODS, EngineRouter

READY = EngineReady(
    model_summary="", vocab_size=9, context_length=99, max_prompt_tokens=98, kv_tokens=900,
    page_size=1, startup=[],
)  # fmt: skip


class World:
    """A fleet of engines that only write down what they get."""

    def __init__(self, num: int = 2, method: str = "round_robin") -> None:
        members = [Member(rank, EngineNumbers("m", rank), HangDetector()) for rank in range(num)]
        self.unavailable = ""
        self.fleet = Fleet(
            members, EngineRouter(method, num, 1_000), on_availability=self.note_availability
        )
        self.got: list[list[Any]] = [[] for _ in range(num)]
        for rank in range(num):
            self.start(rank)
        self.told()

    def note_availability(self, why_not: str) -> None:
        self.unavailable = why_not

    def start(self, rank: int) -> None:
        self.got[rank] = []
        self.fleet.attach(rank, self.got[rank].append)
        self.fleet.take(rank, READY)

    def told(self) -> list[Any]:
        """What the client has been told since."""
        found = []
        while not self.fleet._inbox.empty():
            found.append(self.fleet._inbox.get_nowait())
        return found

    def send(self, id: int, **fields: Any) -> None:
        self.fleet.send(request(id, **fields))

    def ids(self, rank: int) -> list[int]:
        return [one.id for one in self.got[rank] if isinstance(one, GenerateRequest)]

    def call(self, message: ControlRequest[Any], *replies: ControlReply) -> ControlReply:
        """Make a call; each engine that gets it answers with its reply. Returns what is told."""
        self.fleet.send(message)
        for rank, reply in enumerate(replies):
            self.fleet.take(rank, reply)
        (found,) = self.told()
        return found


def request(id: int, key: int = 0, **fields: Any) -> GenerateRequest:
    ids = np.full(64, key, dtype=np.int32).tobytes()
    fields = {"rid": f"r{id}", "sampling": SamplingParams(), "input_ids": ids} | fields
    return GenerateRequest(id=id, **fields)


def finish(id: int) -> StepOutput:
    return StepOutput(finished=[Finish(id=id, reason="length")])


def test_the_client_hears_that_it_is_ready_when_all_engines_are() -> None:
    world = World()
    fleet = Fleet(world.fleet.members, EngineRouter("round_robin", 2, 1_000))
    for rank in range(2):
        fleet.attach(rank, world.got[rank].append)
    fleet.take(1, READY)
    assert fleet._inbox.empty()
    fleet.take(0, READY)
    assert asyncio.run(fleet.receive()) == READY


def test_requests_go_to_engines_and_their_outputs_to_the_client() -> None:
    world = World()
    for id in (1, 2, 3):
        world.send(id)
    assert [world.ids(0), world.ids(1)] == [[1, 3], [2]]
    world.fleet.take(1, finish(2))
    assert world.told() == [finish(2)]
    world.fleet.send(Abort(ids=(1, 2, 3), message="enough"))
    assert world.got[0][-1] == Abort(ids=(1, 3), message="enough")
    assert world.ids(1) == [2]


def test_the_lengths_of_an_abort_go_with_their_requests() -> None:
    world = World()
    for id in (1, 2, 3):
        world.send(id)
    world.fleet.send(Abort(ids=(1, 2, 3), output_lens=(10, 20, 30)))
    assert world.got[0][-1] == Abort(ids=(1, 3), output_lens=(10, 30))
    assert world.got[1][-1] == Abort(ids=(2,), output_lens=(20,))


def test_completions_of_one_prompt_stay_together_and_prompts_of_a_batch_part() -> None:
    world = World()
    requests = [request(id, rid="same", input_ids=b"") for id in range(4)]
    prompts = [np.full(8, key, np.int32).tobytes() for key in range(2)]
    batch = BatchGenerate(prompts=prompts, requests=requests, prompt_of=[0, 0, 1, 1])
    world.fleet.send(batch)
    ((one,), (other,)) = world.got
    assert [each.id for each in one.members()] == [0, 1]
    assert [each.id for each in other.members()] == [2, 3]
    assert {each.input_ids for each in other.members()} == {prompts[1]}
    world.send(9, rid="same", input_ids=prompts[1])  # sent later, for it exceeded a share
    assert world.ids(1) == [9]


def test_a_request_that_names_an_engine_gets_it() -> None:
    world = World()
    token = wanted_rank.set(1)
    for id in range(3):
        world.send(id)
    wanted_rank.reset(token)
    assert world.ids(1) == [0, 1, 2]


def test_a_session_stays_with_its_engine() -> None:
    world = World()
    for number, name in enumerate("abc"):
        world.fleet.send(OpenSession(name, call=number + 1))
        rank = number % 2
        world.fleet.take(rank, OpenSessionReply(call=number + 1, success=True))
    assert all(reply.success for reply in world.told())
    for id, name in enumerate("abcabc"):
        world.send(id, session=SessionParams(id=name))
    assert [world.ids(0), world.ids(1)] == [[0, 2, 3, 5], [1, 4]]
    world.fleet.send(CloseSession("b", call=9))
    assert isinstance(world.got[1][-1], CloseSession)
    assert not isinstance(world.got[0][-1], CloseSession)
    world.fleet.take(1, CloseSessionReply(call=9, success=True))
    assert world.told() == [CloseSessionReply(call=9, success=True)]


def test_the_requests_of_a_lost_engine_end_with_503_and_others_go_on() -> None:
    world = World()
    for id in (1, 2, 3):
        world.send(id)
    world.fleet.lose(0, "it was killed")
    ended = [one for step in world.told() if isinstance(step, StepOutput) for one in step.finished]
    assert [(one.id, one.status) for one in ended] == [(1, 503), (3, 503)]
    assert "it was killed" in ended[0].message
    for id in (4, 5):
        world.send(id)
    assert world.ids(1) == [2, 4, 5]
    world.fleet.take(1, finish(2))
    assert finish(2) in world.told()


def test_without_an_engine_requests_are_refused_at_once() -> None:
    world = World()
    world.fleet.lose(0, "gone")
    world.fleet.lose(1, "gone, too")
    assert "gone, too" in world.unavailable
    world.told()
    world.send(1)
    ((refused,),) = [step.finished for step in world.told()]
    assert (refused.id, refused.status) == (1, 503)
    world.start(1)
    world.fleet.take(1, GetStateReply(call=world.got[1][-1].call, stats=Stats()))
    assert not world.unavailable
    world.told()
    world.send(2)
    assert world.ids(1) == [2]


def test_an_engine_that_hangs_gets_nothing_until_it_recovers() -> None:
    world = World()
    world.send(1)
    world.fleet.hangs(0, "it stands still")
    ((ended,),) = [step.finished for step in world.told()]
    assert (ended.id, ended.status) == (1, 503)
    assert world.got[0][-1] == Abort(ids=(1,), message="it stands still")
    world.send(2)
    world.send(3)
    assert world.ids(1) == [2, 3]
    world.fleet.recovers(0)
    world.send(4)
    assert world.ids(0) == [1, 4]


def test_a_new_engine_that_hangs_and_recovers_still_waits_until_it_is_set_up() -> None:
    world = World()
    world.fleet.lose(1, "gone")
    world.start(1)
    world.fleet.hangs(1, "it stands still")
    world.fleet.recovers(1)
    world.send(1)
    world.send(2)
    assert world.ids(1) == []
    world.fleet.take(1, GetStateReply(call=world.got[1][-1].call, stats=Stats()))
    world.send(3)
    assert world.ids(1) == [3]


class RandomFleet:
    """A fleet whose engines come, go, hang and recover at random, beside what should be true."""

    def __init__(self, seed: int, method: str) -> None:
        self.rng = random.Random(seed)
        self.world = World(3, method)
        self.open: dict[int, int] = {}  # id: rank
        self.names: dict[int, tuple[str, int]] = {}
        self.ended: set[int] = set()
        self.is_lost = [False] * 3
        self.stats = Stats()  # the latest that the client was told
        self.has_token: set[int] = set()
        self.calls: dict[int, set[int]] = {}  # open calls: engines that have not replied
        self.replies: Counter[int] = Counter()  # by call
        self.num_sent = 0
        self.num_siblings = 0

    @property
    def up(self) -> set[int]:
        return {member.rank for member in self.world.fleet.members if member.is_up}

    def read(self) -> None:
        """What the client is told: each request ends once."""
        for message in self.world.told():
            if isinstance(message, Stats):
                self.stats = message
            if isinstance(message, ControlReply):
                self.replies[message.call] += 1
                del self.calls[message.call]
            if isinstance(message, StepOutput):
                for one in message.finished:
                    assert one.id not in self.ended
                    self.ended.add(one.id)
                    self.open.pop(one.id, None)

    def send(self) -> None:
        id = self.num_sent
        self.num_sent += 1
        name = (self.rng.choice("ab"), self.rng.randrange(2))
        before = [len(got) for got in self.world.got]
        siblings = {rank for one, rank in self.open.items() if self.names[one] == name}
        self.world.send(id, rid=name[0], key=name[1])
        got = [rank for rank in range(3) if len(self.world.got[rank]) > before[rank]]
        if not self.up:
            assert got == []
            self.read()
            assert id in self.ended
            return
        (rank,) = got
        assert rank in (siblings or self.up)
        self.num_siblings += bool(siblings)
        self.open[id] = rank
        self.names[id] = name

    def finish(self) -> None:
        if self.open:
            id = self.rng.choice(list(self.open))
            self.world.fleet.take(self.open[id], finish(id))

    def give_token(self) -> None:
        if self.open:
            id = self.rng.choice(list(self.open))
            ids = np.array([id], dtype=np.int64).tobytes()
            self.world.fleet.take(self.open[id], StepOutput(ids=ids, tokens=bytes(4)))
            self.has_token.add(id)

    def give_numbers(self) -> None:
        rank = self.rng.randrange(3)
        if not self.is_lost[rank]:
            self.world.fleet.take(rank, Stats(total_steps=self.rng.randrange(1, 1_000)))

    def call(self) -> None:
        """Ask all engines; a new engine is asked, too, when it is ready."""
        if not all(self.is_lost):
            number = 10_000 + len(self.calls) + self.replies.total()
            self.calls[number] = {rank for rank in range(3) if not self.is_lost[rank]}
            self.world.fleet.send(AbortRequest(rid="nobody", call=number))

    def reply(self) -> None:
        if self.calls:
            number = self.rng.choice(list(self.calls))
            rank = self.rng.choice(sorted(self.calls[number]))
            assert number in [getattr(one, "call", 0) for one in self.world.got[rank]]
            self.calls[number].discard(rank)
            self.world.fleet.take(rank, AbortRequestReply(call=number, success=True))

    def change(self) -> None:
        rank = self.rng.randrange(3)
        fleet = self.world.fleet
        if self.is_lost[rank]:
            self.world.start(rank)
            self.is_lost[rank] = False
            asked = [getattr(one, "call", 0) for one in self.world.got[rank]]
            assert [number for number in self.calls if number not in asked] == []
        elif rank in fleet._catching_up.values():
            call = next(number for number, of in fleet._catching_up.items() if of == rank)
            fleet.take(rank, GetStateReply(call=call, stats=Stats()))
        elif rank in self.up and self.rng.random() < 0.5:
            fleet.hangs(rank, "it stands still")
        elif rank not in self.up and self.rng.random() < 0.5:
            fleet.recovers(rank)
        else:
            self.is_lost[rank] = True
            for awaited in self.calls.values():
                awaited.discard(rank)
            fleet.lose(rank, "it was killed")

    def drive(self, num: int) -> None:
        for _ in range(num):
            actions = [self.send, self.send, self.finish, self.change, self.give_token]
            self.rng.choice([*actions, self.give_numbers, self.call, self.reply])()
            self.read()
            fleet = self.world.fleet
            assert self.world.unavailable == fleet.why_unavailable()
            assert self.stats == join_stats([member.stats for member in fleet.members])
            for rank, engine in enumerate(fleet._open.router.engines):
                begun = [id for id, at in self.open.items() if at == rank and id in self.has_token]
                num_waiting = engine.num_open - len(begun)
                assert num_waiting <= engine.pending_tokens <= 64 * num_waiting
            assert set(self.open.values()) <= self.up
            router = self.world.fleet._open.router
            assert {id: router.rank_of(id) for id in self.open} == self.open
            assert sum(engine.num_open for engine in router.engines) == len(self.open)
        assert len(self.ended) + len(self.open) == self.num_sent
        assert set(self.replies.values()) == {1}


@pytest.mark.parametrize("method", METHODS)
def test_requests_are_only_on_engines_that_take_them_and_each_ends_once(method: str) -> None:
    num_siblings = 0
    for seed in range(6):
        fleet = RandomFleet(seed, method)
        fleet.drive(200)
        num_siblings += fleet.num_siblings
    assert num_siblings > 50


@pytest.mark.parametrize("of", control_requests().values())
@pytest.mark.parametrize("refused", [False, True])
def test_the_index_of_an_engine_is_cleared_only_when_its_cache_is_empty(
    of: type[ControlRequest[Any]], refused: bool
) -> None:
    world = World(2, "cache_aware")
    for id in range(4):
        world.send(id, key=id)
        world.fleet.take(id % 2, finish(id))
    indexes = [engine.index for engine in world.fleet._open.router.engines]
    known = [len(one) for one in indexes]
    assert min(known) > 0
    world.fleet.send(example_of(of, call=1))
    kind = reply_type(of)
    reply = CallFailed(call=1, message="no") if refused else kind(**{"call": 1} | _made(kind))
    asked = [rank for rank in range(2) if isinstance(world.got[rank][-1], of)]
    for rank in asked:
        world.fleet.take(rank, reply)
    empties = of is FlushCache or (issubclass(kind, WeightsReply) and not refused)
    assert [len(one) for one in indexes] == ([0, 0] if empties else known)


def test_a_call_goes_to_all_engines_and_has_one_reply() -> None:
    world = World()
    held = InputReply(call=1, state="blocked", held_requests=2)
    assert world.call(BlockInput(call=1), held, held) == InputReply(
        call=1, state="blocked", held_requests=4
    )


@pytest.mark.parametrize("passes", [(), ("lockstep",)])
def test_all_engines_change_their_inputs_at_one_moment_or_at_the_same_step(
    passes: tuple[str, ...],
) -> None:
    world = World()
    for member in world.fleet.members:
        member.ready = msgspec.structs.replace(member.ready, passes=passes)
    world.fleet.send(UnblockInput(call=1, ramp_s=3.0))
    first, second = (world.got[rank][-1] for rank in range(2))
    assert first == second
    assert (first.ramp_s, first.together) == (3.0, bool(passes))
    assert first.at_s > time.monotonic()
    world.told()
    world.fleet.hangs(1, "no sign of life")
    (failed,) = [one for one in world.told() if isinstance(one, CallFailed)]
    assert (failed.call, failed.status) == (1, 503)
    then = "no input changes unless it is back within 8 s of the call"
    if not passes:
        then = "the others have changed; its input changes when it is back"
    assert failed.message == f"engine 1 does not answer (no sign of life): {then}"


def test_replicas_block_at_the_moment_at_which_the_front_sends_it() -> None:
    """Each engine gets it before all requests that are sent later."""
    world = World()
    world.fleet.send(BlockInput(call=1))
    world.fleet.send(request(1))
    sent = [message for rank in range(2) for message in world.got[rank]]
    assert [one for one in sent if isinstance(one, BlockInput)] == [BlockInput(call=1)] * 2
    for rank in range(2):
        last = world.got[rank][-1]
        assert isinstance(last, BlockInput) or last.id == 1


@pytest.mark.parametrize("is_blocked", [False, True])
def test_the_input_of_a_new_engine_opens_with_the_ramp_of_a_start(is_blocked: bool) -> None:
    changes = EngineChanges()
    changes.start_ramp_s = 30.0
    if is_blocked:
        changes.note(BlockInput())
        assert changes.for_new_engine() == [BlockInput()]
    else:
        assert changes.for_new_engine() == [UnblockInput(ramp_s=30.0)]


def test_a_new_engine_gets_the_last_control_request_of_ones_own_that_all_have_carried_out() -> None:
    world = World()
    world.fleet.changes.kept_outside = frozenset({"kept"})
    good = CallOutsideReply(call=1)
    for name, body in (("kept", b"a"), ("kept", b"b"), ("other", b"c")):
        assert world.call(CallOutside(name=name, body=body, call=1), good, good) == good
    wrong = CallOutsideReply(call=1, wrong="no")
    assert world.call(CallOutside(name="kept", body=b"d", call=1), good, wrong) == wrong
    assert world.fleet.changes.for_new_engine() == [CallOutside(name="kept", body=b"b", call=1)]


def test_a_call_fails_if_one_engine_refuses() -> None:
    world = World()
    good = SetPolicyReply(call=1, success=True, before="fcfs")
    bad = SetPolicyReply(call=1, success=False, before="fcfs", message="no such policy")
    reply = world.call(SetPolicy("x", call=1), good, bad)
    assert reply == SetPolicyReply(
        call=1, success=False, before="fcfs", message="engine 1: no such policy"
    )
    assert isinstance(
        world.call(GetState(call=2), GetStateReply(call=2, stats=Stats()), CallFailed(call=2, message="x")),
        CallFailed,
    )  # fmt: skip


def test_a_call_does_not_wait_for_an_engine_that_is_lost() -> None:
    world = World()
    world.fleet.send(FlushCache(call=1))
    world.fleet.take(0, FlushCacheReply(call=1, success=True))
    world.fleet.lose(1, "killed")
    assert FlushCacheReply(call=1, success=True) in world.told()
    world.fleet.send(FlushCache(call=2))
    world.fleet.lose(0, "killed")
    assert any(isinstance(one, CallFailed) and one.call == 2 for one in world.told())


def test_a_new_engine_gets_the_settings_of_the_others() -> None:
    world = World()
    done = SetPolicyReply(call=1, success=True, before="fcfs")
    world.call(SetPolicy("lpm", call=1), done, done)
    for uid in "ab":
        loaded = AdapterReply(call=2, success=True)
        world.call(LoadLoraAdapter(lora_path=uid, uid=uid, call=2), loaded, loaded)
    unloaded = AdapterReply(call=3, success=True)
    world.call(UnloadLoraAdapter(uid="a", call=3), unloaded, unloaded)
    blocked = InputReply(call=4, state="blocked", held_requests=0)
    world.call(BlockInput(call=4), blocked, blocked)
    world.call(UnblockInput(call=4), blocked, blocked)
    counted = ExpertRecordReply(call=5, success=True)
    world.call(StartExpertDistributionRecord(call=5), counted, counted)
    world.fleet.lose(1, "killed")
    world.told()
    world.start(1)
    *changes, last = world.got[1]
    assert [type(one) for one in changes] == [
        LoadLoraAdapter,
        SetPolicy,
        StartExpertDistributionRecord,
    ]
    assert changes[0].uid == "b"
    world.send(1)
    assert world.ids(0) == [1], "the new engine is not as the others yet"
    world.fleet.take(1, AdapterReply(call=changes[0].call, success=True))
    world.fleet.take(1, SetPolicyReply(call=changes[1].call, success=True, before="fcfs"))
    world.fleet.take(1, ExpertRecordReply(call=changes[2].call, success=True))
    world.fleet.take(1, GetStateReply(call=last.call, stats=Stats()))
    world.send(2)
    assert world.ids(1) == [2]


def test_adapters_that_one_engine_dropped_are_told_though_another_refuses_the_new_one() -> None:
    world = World()
    loaded = AdapterReply(call=1, success=True)
    world.call(LoadLoraAdapter(lora_path="a", uid="a", call=1), loaded, loaded)
    told = world.call(
        LoadLoraAdapter(lora_path="b", uid="b", call=2),
        AdapterReply(call=2, success=True, evicted=["a"]),
        AdapterReply(call=2, success=False, message="all are in use", status=409),
    )
    assert isinstance(told, AdapterReply)
    assert (told.success, told.status, told.evicted) == (False, 409, ["a"])
    assert told.message == "engine 1: all are in use"


def test_weights_that_a_client_sent_cannot_be_given_to_a_new_engine() -> None:
    world = World()
    done = WeightsReply(call=1, success=True, weight_version="2")
    world.call(UpdateWeightsFromTensor(content=b"", call=1), done, done)
    assert world.fleet.changes.are_lost


def test_each_engine_has_a_rank_of_its_own_in_a_group_that_sends_weights() -> None:
    world = World()
    message = InitWeightsUpdateGroup(
        master_address="h", master_port=1, rank_offset=1, world_size=3, call=1
    )
    world.fleet.send(message)
    assert [world.got[rank][-1].rank_offset for rank in range(2)] == [1, 2]


def test_a_viewer_gets_the_steps_of_each_engine_since_its_last_picture() -> None:
    world = World(3)
    seen = {0: Seen(7, 1), 2: Seen(40, 3)}
    pictures = [drawn(rank) for rank in range(3)]
    told = world.call(Watch(call=1, since_step=7, since_round=1, seen=seen), *pictures)
    assert isinstance(told, Picture)
    assert [told.rank, *(one.rank for one in told.others)] == [0, 1, 2]
    asked = [got[-1] for got in world.got]
    assert [(one.rank, one.since_step, one.since_round) for one in asked] == [
        (0, 7, 1),
        (1, -1, 0),
        (2, 40, 3),
    ]
    assert not any(one.seen for one in asked)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_is_asked_of_the_engine_whose_picture_has_it(rank: int) -> None:
    world = World()
    token = wanted_rank.set(rank or None)
    world.fleet.send(GetPrefix(node=3, call=1))
    wanted_rank.reset(token)
    assert [len(got) for got in world.got] == [1 - rank, rank]
    world.fleet.take(rank, GetPrefixReply(call=1, hits=5))
    assert world.told()[-1].hits == 5


def drawn(rank: int) -> Picture:
    return Picture(
        call=1,
        at_s=0.0,
        stats=Stats(),
        steps=StepColumns(),
        rows=RowColumns(),
        queue=QueueColumns(),
        rank=rank,
    )


def test_numbers_are_reported_for_all_together() -> None:
    world = World()
    world.fleet.take(0, Stats(num_running=3, kv_tokens=100, new_token_ratio=0.5))
    world.fleet.take(1, Stats(num_running=4, kv_tokens=100, new_token_ratio=0.1))
    total = world.told()[-1]
    assert (total.num_running, total.kv_tokens, total.new_token_ratio) == (7, 200, 0.3)
    assert [member.stats.num_running for member in world.fleet.members] == [3, 4]


@pytest.mark.parametrize("kind", JOINERS, ids=lambda kind: kind.__name__)
def test_replies_are_joined_to_one_of_their_kind(kind: type[ControlReply]) -> None:
    assert isinstance(join({0: kind(**_made(kind)), 1: kind(**_made(kind))}), kind)
    if issubclass(kind, SuccessReply):
        bad = _made(kind) | {"success": False, "message": "why"}
        joined = join({0: kind(**_made(kind)), 1: kind(**bad)})
        assert not joined.success
        assert joined.message == "engine 1: why"


def _made(kind: type[ControlReply]) -> dict[str, Any]:
    """Values for the fields of a reply that must be given."""
    from weft.messages.control import QueueStatus

    if kind is Picture:
        return msgspec.structs.asdict(drawn(0))
    queue = QueueStatus(
        waiting_queue_size=1, running_batch_size=1, prefilling=0, max_queued_requests=9,
        max_running_requests=4, batch_is_full=False, chunked_rid=None, free_tokens=10,
    )  # fmt: skip
    values = {
        "stats": Stats(), "queue": queue, "state": "none", "success": True, "server_args": {},
        "before_s": None, "methods": {}, 
    }  # fmt: skip
    if kind.__name__ in ("InputReply", "GetInternalStateReply"):
        values["state"] = "open" if kind.__name__ == "InputReply" else {}
    found = {}
    for name in kind.__struct_fields__:
        if name in values:
            found[name] = values[name]
        elif str(kind.__annotations__.get(name)).startswith("list"):
            found[name] = []
        elif kind.__annotations__.get(name) in ("str", str) and name != "message":
            found[name] = ""
    for name in kind.__struct_fields__:
        field = kind.__annotations__.get(name)
        if field in ("int", int, "float", float) and name != "call" and name not in found:
            found[name] = 1
    if kind is CallFailed:
        found["message"] = "x"
    return found


def test_counts_of_ended_requests_and_faults_are_added_up() -> None:
    assert join({0: AbortRequestReply(success=True, aborted=2), 1: AbortRequestReply(success=True, aborted=3)}).aborted == 5  # fmt: skip
    audit = AuditReply(faults=["x"], num_pages=5, free=1, cached=0, held=4, rows=0, quarantined=0, total_faults=1)  # fmt: skip
    both = join({0: audit, 1: audit})
    assert (both.num_pages, both.faults) == (10, ["engine 0: x", "engine 1: x"])
    joined = join_stats([Stats(batch_is_full=True), Stats()])
    assert not joined.batch_is_full


@pytest.mark.parametrize("ranks", [(0,), (2,), (0, 1), (1, 3), (3, 0, 2)])
def test_texts_of_engines_stand_behind_their_ranks_also_if_others_are_lost(
    ranks: tuple[int, ...],
) -> None:
    def audit(rank: int) -> AuditReply:
        # An engine without faults says nothing.
        return AuditReply(**_made(AuditReply) | {"faults": [f"page {rank}"] * (rank % 3)})

    def profile(rank: int) -> StopProfileReply:
        table = f"operators of {rank}" if rank != 1 else ""
        values = {"state": "done", "table": table, "trace": table}
        return StopProfileReply(**_made(StopProfileReply) | values)

    in_order = sorted(ranks)
    audited = join({rank: audit(rank) for rank in ranks})
    assert audited.faults == [
        f"engine {rank}: page {rank}" for rank in in_order for _ in range(rank % 3)
    ]
    profiled = join({rank: profile(rank) for rank in ranks})
    saying = [rank for rank in in_order if rank != 1]
    assert profiled.table == "\n".join(f"engine {rank}: operators of {rank}" for rank in saying)
    assert profiled.trace == ", ".join(f"operators of {rank}" for rank in saying)


@pytest.mark.parametrize("says", [(), (0,), (1,), (0, 1), (2,)])
def test_files_and_stores_of_all_engines_are_reported(says: tuple[int, ...]) -> None:
    ranks = range(3)
    experts = {
        rank: ExpertDistributionReply(success=True, file=f"/{rank}" if rank in says else "")
        for rank in ranks
    }
    assert join(experts).file == ", ".join(f"/{rank}" for rank in says)
    forgotten = {
        rank: ForgetPrefixReply(tokens=2, left=rank, stored="on disk" if rank in says else "")
        for rank in ranks
    }
    both = join(forgotten)
    assert (both.tokens, both.left, both.stored) == (6, 2, "on disk" if says else "")


def test_an_engine_that_prepares_its_profiler_is_asked_again_alone() -> None:
    async def start() -> tuple[World, list[Any]]:
        world = World()
        preparing = StartProfileReply(call=7, success=True, is_preparing=True)
        recording = StartProfileReply(call=7, success=True)
        world.fleet.send(StartProfile(call=7, num_steps=3))
        world.fleet.take(0, preparing)
        world.fleet.take(1, recording)
        assert not world.told()
        while len(world.got[0]) < 2:
            await asyncio.sleep(0.01)
        world.fleet.take(0, recording)
        return world, world.told()

    world, told = asyncio.run(start())
    assert told == [StartProfileReply(call=7, success=True)]
    assert world.got == [
        [StartProfile(call=7, num_steps=3)] * 2,
        [StartProfile(call=7, num_steps=3)],
    ]


def test_an_engine_that_is_lost_while_it_prepares_is_not_asked_again() -> None:
    async def start() -> World:
        world = World()
        world.fleet.send(StartProfile(call=7))
        world.fleet.take(0, StartProfileReply(call=7, success=True, is_preparing=True))
        world.fleet.lose(0, "it was ended")
        world.fleet.take(1, StartProfileReply(call=7, success=True))
        assert StartProfileReply(call=7, success=True) in world.told()
        await asyncio.sleep(2 * PREPARING_S)
        return world

    assert asyncio.run(start()).got[0] == [StartProfile(call=7)]


def test_pins_of_all_engines_are_reported_and_one_is_enough_to_remove_one() -> None:
    pin = PinStatus(
        name="p", tenant="", tokens=32, state="firm", ttl_s=60.0, expires_in_s=50.0, uses=1
    )
    mine = GetCacheReply(**_made(GetCacheReply) | {"pins": [pin], "pinned_tokens": 32})
    other = GetCacheReply(**_made(GetCacheReply) | {"pins": [], "pinned_tokens": 0})
    both = join({0: other, 1: mine})
    assert (both.pins, both.pinned_tokens, both.max_pinned_tokens) == ([pin], 32, 2)
    without = UnpinReply(success=False, message="there is no pin 'p'")
    removed = UnpinReply(success=True, tokens=32)
    assert join({0: without, 1: removed}) == removed
    assert join({0: removed, 1: without}) == removed
    assert join({0: without, 1: without}) == without


def test_counts_of_experts_are_added_up_and_grow_if_those_of_one_engine_do() -> None:
    mine = ExpertDistributionReply(success=True, layers=[2], prefill=[[1, 2]], decode=[[3, 4]])
    other = ExpertDistributionReply(
        success=True,
        layers=[2],
        prefill=[[10, 20]],
        decode=[[30, 40]],
        is_recording=True,
    )
    both = join({0: mine, 1: other})
    assert (both.layers, both.prefill, both.decode) == ([2], [[11, 22]], [[33, 44]])
    assert both.is_recording


def picture(seed: int) -> MediaItem:
    digest = hashlib.sha256(bytes([seed])).digest()
    return MediaItem(kind="image", digest=digest, start=0, length=64)


def test_a_picture_goes_where_it_was_sent_and_another_is_not_taken_for_it() -> None:
    world = World(2, "cache_aware")
    for id, seed in enumerate([1, 2, 2, 1, 1, 2]):
        world.send(id, media=(picture(seed),))
        for rank in range(2):
            world.fleet.take(rank, finish(id))
    assert [world.ids(rank) for rank in range(2)] == [[0, 3, 4], [1, 2, 5]]


def test_prompts_of_a_batch_part_where_their_pictures_differ() -> None:
    world = World()
    for id in range(4):
        world.send(id, rid="same", media=(picture(id // 2),))
    assert [world.ids(rank) for rank in range(2)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("method", ["round_robin", "cache_aware"])
def test_nothing_is_remembered_of_requests_that_have_ended(method: str) -> None:
    world = World(3, method)
    for id in range(30):
        world.send(id, key=id % 4)
    for rank in range(3):
        for id in world.ids(rank):
            world.fleet.take(rank, StepOutput(ids=np.array([id]).tobytes()))
            world.fleet.take(rank, finish(id))
    fleet = world.fleet
    assert fleet._open.is_empty
    assert not fleet._open.router._open


def test_the_number_of_a_room_says_which_engine_gets_a_request() -> None:
    world = World(num=3, method="follow_bootstrap_room")
    for id, room in enumerate(["7", "2", "7/1", "12"]):
        world.send(id, key=id, handoff=HandoffParams(room))
    assert [world.ids(rank) for rank in range(3)] == [[3], [0, 2], [1]]
    world.send(4, key=4, handoff=HandoffParams("a name"))
    world.send(5, key=5)
    assert [world.ids(rank) for rank in range(3)] == [[3], [0, 2, 5], [1, 4]], "in turn"


def test_requests_of_all_engines_say_which_engine_has_them() -> None:
    world = World()
    queue = example_of(QueueStatus)
    rows = [example_of(RequestRow, rid=rid) for rid in ("a", "b", "c")]
    reply = world.call(
        ListRequests(call=1),
        ListRequestsReply(call=1, queue=queue, requests=rows[:2]),
        ListRequestsReply(call=1, queue=queue, requests=rows[2:]),
    )
    assert isinstance(reply, ListRequestsReply)
    assert [(row.rid, row.dp_rank) for row in reply.requests] == [("a", 0), ("b", 0), ("c", 1)]
    world.fleet.lose(0, "it is gone")
    world.told()
    world.fleet.send(ExplainRequest(call=2, rid="c"))
    story = example_of(Explanation, rid="c")
    world.fleet.take(1, ExplainRequestReply(call=2, found=[story]))
    (reply,) = world.told()
    assert [one.dp_rank for one in reply.found] == [1], "the first engine is not asked any more"


# What belongs together stays together, and a new engine is as the others


@pytest.mark.parametrize("seed", range(6))
def test_sessions_are_shared_out_evenly_and_their_turns_follow_them(seed: int) -> None:
    rng = random.Random(seed)
    world = World(3)
    bound: dict[tuple[str, str], int] = {}
    for number in range(1, 150):
        name = (rng.choice("abcd"), rng.choice(["x", "y"]))
        before = [len(got) for got in world.got]
        what = rng.choice(["open", "close", "turn", "turn"])
        if what == "turn":
            world.send(number, session=SessionParams(id=name[0], owner=name[1]))
        elif what == "open":
            world.fleet.send(OpenSession(name[0], owner=name[1], call=number))
        else:
            world.fleet.send(CloseSession(name[0], owner=name[1], call=number))
        (rank,) = [one for one in range(3) if len(world.got[one]) > before[one]]
        counts = [list(bound.values()).count(one) for one in range(3)]
        if name in bound:
            assert rank == bound[name]
        elif what != "turn":
            assert rank == counts.index(min(counts))
        if what == "turn":
            world.fleet.take(rank, finish(number))  # binds nothing: only opening a session does
        elif what == "open":
            success = rng.random() < 0.7
            world.fleet.take(rank, OpenSessionReply(call=number, success=success))
            if success:
                bound[name] = rank
        else:
            world.fleet.take(rank, CloseSessionReply(call=number, success=True))
            bound.pop(name, None)
        assert world.fleet._sessions.rank == bound


ALL_TAGS = {"kv_cache", "weights"}
CHANGES: list[Any] = [
    lambda rng: SetPolicy(rng.choice(["lpm", "fcfs"])),
    lambda rng: SlowDown(rng.choice([None, 0.1, 0.2])),
    lambda rng: ConfigureLogging(log_level=rng.choice(["info", "debug"])),
    lambda rng: rng.choice([BlockInput, UnblockInput])(),
    lambda rng: rng.choice([PauseGeneration, ContinueGeneration])(),
    lambda rng: rng.choice([StartExpertDistributionRecord, StopExpertDistributionRecord])(),
    lambda rng: SetInternalState(server_args={rng.choice("ab"): rng.randrange(3)}),
    lambda rng: LoadLoraAdapter(lora_path=rng.choice("pq"), uid=rng.choice("abc")),
    lambda rng: UnloadLoraAdapter(uid=rng.choice("abc")),
    lambda rng: UpdateWeightsFromDisk(model_path=rng.choice(["one", "two"])),
    lambda rng: UpdateWeightsFromTensor(content=b"x"),
    lambda rng: ReleaseMemoryOccupation(tags=rng.choice([None, ["kv_cache"], ["weights"]])),
    lambda rng: ResumeMemoryOccupation(tags=rng.choice([None, ["kv_cache"], ["weights"]])),
]


class ChangedEngine:
    """What an engine is after some changes."""

    def __init__(self) -> None:
        self.last: dict[str, object] = {}
        self.settings: dict[str, object] = {}
        self.adapters: dict[str, str] = {}
        self.weights = ""
        self.released: set[str] = set()

    def carry_out(self, change: ControlRequest[Any]) -> None:
        match change:
            case SetPolicy() | SlowDown() | ConfigureLogging():
                self.last[type(change).__name__] = change
            case BlockInput() | PauseGeneration() | StartExpertDistributionRecord():
                self.last[type(change).__name__] = True
            case UnblockInput():
                self.last.pop("BlockInput", None)
            case ContinueGeneration():
                self.last.pop("PauseGeneration", None)
            case StopExpertDistributionRecord():
                self.last.pop("StartExpertDistributionRecord", None)
            case SetInternalState():
                self.settings |= change.server_args
            case LoadLoraAdapter():
                self.adapters[change.uid] = change.lora_path
            case UnloadLoraAdapter():
                self.adapters.pop(change.uid, None)
            case UpdateWeightsFromDisk():
                self.weights = change.model_path
            case UpdateWeightsFromTensor():
                self.weights = "sent"
            case ReleaseMemoryOccupation():
                self.released |= set(change.tags or ALL_TAGS)
            case ResumeMemoryOccupation():
                self.released -= set(change.tags or ALL_TAGS)


@pytest.mark.parametrize("seed", range(20))
def test_a_new_engine_is_as_one_that_was_there_for_all_changes(seed: int) -> None:
    rng = random.Random(seed)
    changes, old = EngineChanges(), ChangedEngine()
    assert changes.for_new_engine() == []
    assert not changes.are_lost
    for _ in range(60):
        change = rng.choice(CHANGES)(rng)
        old.carry_out(change)
        changes.note(change)
        if rng.random() < 0.1:
            changes.forget_adapters(["a", "c"])
            old.adapters.pop("a", None)
            old.adapters.pop("c", None)
        assert changes.are_lost == (old.weights == "sent")
        new = ChangedEngine()
        asked = changes.for_new_engine()
        for one in asked:
            new.carry_out(one)
        if not changes.are_lost:
            assert vars(new) == vars(old)
        if not old.released and isinstance(change, ResumeMemoryOccupation) and change.tags is None:
            kinds = ReleaseMemoryOccupation | ResumeMemoryOccupation
            assert not any(isinstance(one, kinds) for one in asked)


def test_a_state_of_one_engine_is_reported_for_all() -> None:
    queue = ListRequestsReply(queue=_made(ListRequestsReply)["queue"], requests=[])
    for name, usual, other in (
        ("input_state", "unblocked", "blocked"),
        ("paused", "", "retract"),
        ("chunked_rid", None, "r1"),
    ):
        for rank in range(2):
            replies = dict.fromkeys(range(2), queue)
            assert getattr(join(replies).queue, name) == usual
            told = msgspec.structs.replace(queue.queue, **{name: other})
            replies[rank] = msgspec.structs.replace(queue, queue=told)
            assert getattr(join(replies).queue, name) == other
    full = msgspec.structs.replace(queue.queue, batch_is_full=True)
    only = {0: queue, 1: msgspec.structs.replace(queue, queue=full)}
    assert not join(only).queue.batch_is_full
    assert join({0: only[1], 1: only[1]}).queue.batch_is_full
    cache = example_of(GetCacheReply, disk="open", disk_blocks=3, disk_bytes=7)
    closed = msgspec.structs.replace(cache, disk="no room", disk_blocks=5)
    assert join({0: cache, 1: cache}).disk == "open"
    for replies in ({0: cache, 1: closed}, {0: closed, 1: cache}):
        assert (join(replies).disk, join(replies).disk_blocks) == ("no room", 5)


def test_the_first_engine_alone_tells_what_is_the_same_in_all() -> None:
    first = msgspec.structs.replace(_made(ListRequestsReply)["queue"], policy="lpm")
    second = msgspec.structs.replace(first, policy="fcfs")
    joined = join(
        {
            1: ListRequestsReply(queue=second, requests=[]),
            0: ListRequestsReply(queue=first, requests=[]),
        }
    )
    assert joined.queue.policy == "lpm"
