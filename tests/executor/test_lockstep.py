"""Engines that have the experts of one model between them, and take their steps together."""

from __future__ import annotations

import fcntl
import math
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.launch.tiny_model import write_model_with_experts, write_uneven_experts
from tests.seeds import slow
from weft.assemble.build import Built, build_engine
from weft.assemble.cache import weight_store
from weft.assemble.prepare import Prepared, prepare
from weft.config.engine import EngineConfig
from weft.executor.lockstep.steps import LockstepDevice, LockstepPass
from weft.executor.runner import DecoderOutput
from weft.launch.engine_group import socket_pairs
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.ops.expert_parallel import ExpertRange, OwnedExperts, PeerRank, experts_of
from weft.ops.muladd import fused_muladd
from weft.ops.plain import PlainMatrix
from weft.ops.sharding import RankLost
from weft.parallel.lockstep import Lockstep, StepWish, agree
from weft.parallel.peers import Peers
from weft.plan.device import DeviceReply, DeviceRequest, GetWeight, MeetOthers, ReleaseMemory
from weft.plan.step import ForwardMode
from weft.scheduler.speculation import speculator

NOTHING, DECODE, PREFILL, TOGETHER = StepWish

Answers = list[list[tuple[int, float]]]

WAIT_S = 60.0  # for a thread of this process; never waited for


@pytest.mark.parametrize(
    ("wanted", "last", "done"),
    [
        ((DECODE, NOTHING), DECODE, DECODE),
        ((NOTHING, PREFILL), PREFILL, PREFILL),
        ((DECODE, PREFILL), DECODE, PREFILL),
        ((DECODE, PREFILL), PREFILL, DECODE),
        ((DECODE, PREFILL), NOTHING, PREFILL),
        ((TOGETHER, NOTHING), DECODE, NOTHING),
        ((TOGETHER, DECODE), DECODE, DECODE),
        ((TOGETHER, TOGETHER), PREFILL, TOGETHER),
    ],
)
def test_all_draw_the_same_conclusion_from_what_each_wants(
    wanted: tuple[StepWish, ...], last: StepWish, done: StepWish
) -> None:
    assert agree(wanted, last) is done
    assert agree(wanted[::-1], last) is done


class FakeExchange:
    """A step of one side: all meet a few times in it, as layers with experts do."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.kinds: list[int] = []  # of each step: the sum of what all have said

    def run(self, kind: int) -> None:
        words = {other: bytes([kind]) for other in self.peers.others}
        for _ in range(2):
            heard = self.peers.swap(words)
        self.kinds.append(kind + sum(word[0] for word in heard.values()))

    def idle(self) -> None:
        self.run(0)


class Plan(NamedTuple):
    mode: ForwardMode


class Side:
    """One engine's device, whose steps are `FakeExchange`'s."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.exchange = FakeExchange(peers)
        self.lockstep = Lockstep(peers, self.exchange.idle)
        self.locked = LockstepPass(self.lockstep)
        self.thread = ThreadPoolExecutor(1)
        self.device = LockstepDevice(self.thread, self.lockstep)
        self.fails = False

    def run(self, plan: Plan) -> DecoderOutput:
        if self.fails:
            raise MemoryError
        self.exchange.run(1 if plan.mode is ForwardMode.DECODE else 100)
        return DecoderOutput(None, ())

    def launch(self, mode: ForwardMode) -> Any:
        run = partial(self.locked.run, then=self.run)  # type: ignore[arg-type]
        return self.device.launch(run, Plan(mode))  # type: ignore[arg-type]


def make_peers(num: int) -> list[Peers]:
    return [Peers(rank, ends, WAIT_S) for rank, ends in enumerate(socket_pairs(num))]


@pytest.fixture
def sides() -> Iterator[Callable[[int], list[Side]]]:
    made: list[Side] = []

    def make(num: int) -> list[Side]:
        made.extend(Side(peers) for peers in make_peers(num))
        return made

    yield make
    for side in made:
        side.device.close()


@pytest.mark.parametrize("num_steps", [100, *slow([1000])])
def test_steps_of_one_engine_alone_do_not_wait_for_work_of_the_others(
    sides: Callable[[int], list[Side]], num_steps: int
) -> None:
    busy, idle = sides(2)
    random = Random(7)
    modes = (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED)
    last = None
    for _ in range(num_steps):
        last = busy.launch(random.choice(modes))
        if random.random() < 0.3:
            last.result(WAIT_S)
    last.result(WAIT_S)
    idle.device.close()  # behind what it computes
    assert len(busy.exchange.kinds) == num_steps
    assert idle.exchange.kinds == busy.exchange.kinds
    assert busy.lockstep.num_idle == 0
    assert idle.lockstep.num_idle == num_steps


def test_prefills_and_decodes_of_several_engines_keep_apart(
    sides: Callable[[int], list[Side]],
) -> None:
    all_sides = sides(3)
    random = Random(3)
    launched = []
    for side in all_sides:
        modes = [random.choice((ForwardMode.EXTEND, ForwardMode.DECODE)) for _ in range(20)]
        launched += [side.launch(mode) for mode in modes]
    for step in launched:
        step.result(WAIT_S)
    for side in all_sides:
        side.device.close()
    kinds = all_sides[0].exchange.kinds
    assert all(side.exchange.kinds == kinds for side in all_sides)
    assert all(kind <= 3 or kind % 100 == 0 for kind in kinds), "no step had both"
    assert sum(kind % 100 + kind // 100 for kind in kinds) == 60


def test_a_step_that_breaks_off_ends_the_steps_of_all(
    sides: Callable[[int], list[Side]],
) -> None:
    broken, other = sides(2)
    broken.fails = True
    with pytest.raises(MemoryError):
        broken.launch(ForwardMode.DECODE).result(WAIT_S)
    with pytest.raises(RankLost, match="engine 0 is gone"):
        other.launch(ForwardMode.DECODE).result(WAIT_S)


BEYOND_SELECT = 1_100  # a number of a file that select() does not take


def with_high_number(end: socket.socket) -> socket.socket:
    high = fcntl.fcntl(end.fileno(), fcntl.F_DUPFD, BEYOND_SELECT)
    end.close()
    return socket.socket(fileno=high)


@pytest.fixture
def many_open() -> Iterator[None]:
    """As many files may be open as `BEYOND_SELECT` needs."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many_open")
def test_engines_with_many_open_files_wait_for_each_other_too() -> None:
    pair = [
        Peers(rank, {other: with_high_number(end) for other, end in ends.items()}, WAIT_S)
        for rank, ends in enumerate(socket_pairs(2))
    ]
    assert not pair[0].wait_for(0.0)
    with ThreadPoolExecutor(1) as thread:
        called = thread.submit(pair[1].call, b"!")
        assert pair[0].wait_for(WAIT_S)
        assert pair[0].call(b"?") == {1: b"!"}
        assert called.result(WAIT_S) == {0: b"?"}
    for peers in pair:
        peers.close()


class FakeStore:
    def __init__(self, *, ok: bool = True) -> None:
        self.done: list[DeviceRequest] = []
        self._ok = ok

    def do(self, request: DeviceRequest) -> DeviceReply:
        self.done.append(request)
        return DeviceReply(ok=self._ok)


@pytest.mark.parametrize("request_", [ReleaseMemory(("weights",)), MeetOthers()])
def test_memory_is_released_and_inputs_change_when_all_engines_want_it_and_not_before(
    sides: Callable[[int], list[Side]], monkeypatch: pytest.MonkeyPatch, request_: DeviceRequest
) -> None:
    first, second = sides(2)
    stores = [FakeStore(), FakeStore()]
    whole = [
        partial(side.locked.do, then=store.do)
        for store, side in zip(stores, (first, second), strict=True)
    ]
    request = request_
    assert first.device.submit(lambda: whole[0](GetWeight("w", 1))).result(WAIT_S).ok
    asked = first.device.submit(lambda: whole[0](request))
    second.launch(ForwardMode.DECODE).result(WAIT_S)  # goes on meanwhile
    assert request not in stores[0].done
    both = [asked, second.device.submit(lambda: whole[1](request))]
    assert [reply.result(WAIT_S).ok for reply in both] == [True, True]
    assert [store.done[-1] for store in stores] == [request, request]

    monkeypatch.setattr("weft.executor.lockstep.steps.MEET_S", 0.0)
    refused = first.device.submit(lambda: whole[0](request)).result(WAIT_S)
    assert (refused.ok, refused.status, len(stores[0].done)) == (False, 503, 2)


def test_inputs_change_in_no_engine_if_one_of_them_comes_too_late(
    sides: Callable[[int], list[Side]],
) -> None:
    both = sides(2)
    stores = [FakeStore(), FakeStore()]
    replies = []
    for side, store, until_s in zip(both, stores, (math.inf, 0.0), strict=True):
        whole = partial(side.locked.do, MeetOthers(until_s), then=store.do)
        replies.append(side.device.submit(whole))
    for reply in replies:
        told = reply.result(WAIT_S)
        assert (told.ok, told.status) == (False, 503)
        assert "in time; nothing was changed" in told.message
    assert [store.done for store in stores] == [[], []]
    steps = [side.launch(ForwardMode.DECODE) for side in both]  # and go on together
    for step in steps:
        step.result(WAIT_S)


def test_engines_that_would_have_different_weights_compute_nothing_more(
    sides: Callable[[int], list[Side]],
) -> None:
    request = ReleaseMemory(("weights",))
    replies = []
    for side, store in zip(sides(2), (FakeStore(), FakeStore(ok=False)), strict=True):
        whole = partial(side.locked.do, then=store.do)
        replies.append(side.device.submit(lambda whole=whole: whole(request)))  # type: ignore[misc]
    for reply in replies:
        assert reply.result(WAIT_S).status == 500


def test_experts_are_divided_between_all_engines() -> None:
    places = [PeerRank(rank, 3) for rank in range(3)]
    assert [experts_of(8, place) for place in places] == [
        ExpertRange(0, 2),
        ExpertRange(2, 3),
        ExpertRange(5, 3),
    ]


def test_a_matrix_of_experts_keeps_those_of_its_engine() -> None:
    local = PlainMatrix(2, (1, 1) * 2, False, torch.float32, torch.device("cpu"))
    whole = OwnedExperts(local, 2, (1, 1), 3, ExpertRange(1, 2), number=0)
    for part in range(6):
        whole.put(part, torch.full((1, 2), float(part)))
    found = torch.cat([whole.get(part) for part in range(6)])[:, 0]
    assert found[:2].isnan().all()
    assert found[2:].tolist() == [2, 3, 4, 5]


def test_a_product_and_a_sum_are_rounded_once() -> None:
    random = np.random.default_rng(5)
    a = random.standard_normal(400).astype(np.float32)
    b = random.standard_normal(400).astype(np.float32)
    c = (-a * b).astype(np.float32)
    # In float64 this is rounded to the middle between two float32, from above and from below.
    a[:2], b[:2], c[:2] = 1 + 2**-12, (1 + 2**-13, 1 - 2**-13), (2**24, 2**24 + 2)
    a[2:4], b[2:4], c[2:4] = (2**-60, -(2**-60)), 1.0, 1.0
    a[4:6], b[4:6] = (1 + 2**-23), (2**-24 + 2**-47, 2**-24)
    c[4:6] = 1.0
    found = fused_muladd(a, b, c)
    for one, other, third, got in zip(a, b, c, found, strict=True):
        exact = Fraction(float(one)) * Fraction(float(other)) + Fraction(float(third))
        error = abs(Fraction(float(got)) - exact)
        for towards in (-np.inf, np.inf):
            beside = Fraction(float(np.nextafter(got, np.float32(towards))))
            assert error <= abs(beside - exact)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_with_experts(tmp_path_factory.mktemp("experts"))


def prepared(folder: Path, **settings: Any) -> Prepared:
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        threads=1,
        kv_tokens=512,
        max_running_requests=4,
        context_length=128,
        chunked_prefill_size=32,
        page_size=4,
    )
    return prepare(EngineConfig(**{**vars(config), **settings}))


SAMPLED = SamplingParams(max_new_tokens=6, temperature=1.0, ignore_eos=True, logprobs=0)
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0)


def answers(built: Built, prompts: list[list[int]], params: SamplingParams = SAMPLED) -> Answers:
    """Tokens and their log probabilities, of requests that run beside each other."""
    found: dict[int, list[tuple[int, float]]] = {}
    for id, prompt in enumerate(prompts):
        sampling = replace(params, seed=prompt[0])
        request = GenerateRequest(
            id=id,
            rid=str(id),
            input_ids=np.array(prompt, np.int32).tobytes(),
            sampling=sampling,
        )
        built.engine.submit(request)
    while built.engine.has_work:
        for message in built.engine.step():
            if isinstance(message, StepOutput):
                ids = np.frombuffer(message.ids, np.int64).tolist()
                tokens = np.frombuffer(message.tokens, np.int32).tolist()
                for id, token, told in zip(ids, tokens, message.logprobs, strict=True):
                    found.setdefault(id, []).append((token, told.logprob))
    return [found[id] for id in range(len(prompts))]


def test_engines_with_experts_between_them_give_the_bits_of_one(folder: Path) -> None:
    expected, found = of_one_and_of_two(folder, "auto")
    assert found == expected
    assert len({token for answer in expected for token, _ in answer}) > 10


@pytest.fixture(scope="module")
def one_sided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uneven_experts(tmp_path_factory.mktemp("one_sided"))


@pytest.mark.parametrize("num_together", [1, 3])
def test_guesses_are_compared_between_engines_as_in_one(
    one_sided: Path, num_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine alone with its guesses: the other one has the expert of one of several tokens."""
    monkeypatch.setattr(speculator, "least_chance", lambda *_: 0.01)
    monkeypatch.setattr(speculator, "steps_of_rest", lambda *_: 0)
    random = Random(2)
    words = [[random.randrange(256) for _ in range(random.randint(2, 9))] for _ in range(16)]
    prompts = [word * 4 for word in words]
    one = prepared(one_sided, speculative="off", max_running_requests=num_together)
    expected = answers(build_engine(one.config, one.folder), prompts, GREEDY)
    half = prepared(
        one_sided,
        speculative="tree,ngram",
        max_running_requests=num_together,
        enable_dp_attention=True,
        ep_size=2,
    )
    found, engines = of_two(half, [prompts, []], GREEDY)
    assert found == expected
    # How many pay is a matter of measured times; the first ones are tried in any case.
    assert engines[0].engine.services.stats().total_accepted_ngram > 0


def test_an_engine_that_keeps_step_with_others_stores_its_kv(folder: Path, tmp_path: Path) -> None:
    stored = prepared(folder, enable_dp_attention=True, ep_size=2, cache_dir=str(tmp_path))
    all_peers = make_peers(2)
    found: list[str] = ["", ""]

    def serve(rank: int) -> None:
        built = build_engine(stored.config, stored.folder, all_peers[rank])
        found[rank] = type(weight_store(built.runner)).__name__
        done.wait(WAIT_S)
        built.runner.close()

    done = threading.Barrier(2)
    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["WeightStore", "WeightStore"]


@pytest.mark.slow
def test_torch_computes_for_other_engines_too(folder: Path) -> None:
    """Its sums depend on how many rows there are."""
    expected, found = of_one_and_of_two(folder, "torch")
    for one, other in zip(expected, found, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [told for _, told in one] == pytest.approx([told for _, told in other], abs=1e-4)


def of_one_and_of_two(folder: Path, kernels: str) -> tuple[Answers, Answers]:
    """The answers to the same prompts."""
    random = Random(1)
    prompts = [[random.randrange(256) for _ in range(random.randrange(2, 50))] for _ in range(7)]
    one = prepared(folder, kernels=kernels)
    expected = answers(build_engine(one.config, one.folder), prompts)
    half = prepared(folder, kernels=kernels, enable_dp_attention=True, ep_size=2)
    found, _ = of_two(half, [prompts[:5], prompts[5:]])
    return expected, found


def of_two(
    half: Prepared, parts: list[list[list[int]]], params: SamplingParams = SAMPLED
) -> tuple[Answers, list[Built]]:
    """The answers of two engines, each to its part of the prompts; and the engines, at their
    end."""
    found: list[Answers] = [[], []]
    engines: dict[int, Built] = {}
    all_peers = make_peers(2)

    def serve(rank: int) -> None:
        built = engines[rank] = build_engine(half.config, half.folder, all_peers[rank])
        found[rank] = answers(built, parts[rank], params)
        done.wait(WAIT_S)
        built.runner.close()

    done = threading.Barrier(2)  # whoever is ready still computes for the other
    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0] + found[1], [engines[0], engines[1]]
