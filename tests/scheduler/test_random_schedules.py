"""Random arrivals, aborts, failures and tiny memories, with every invariant of the design checked after every step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.scheduler.oracle_runner import OracleRunner, expected_output
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.loop import Loop
from weft.scheduler.request import NO_ROW, RequestState
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings

VOCAB = 300
EOS = 3


class World:
    """A scheduler with an oracle, the requests that were sent, and what came back."""

    def __init__(self, settings: SchedulerSettings, depth: int, fail_steps: set[int] | None = None) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings)
        num_slots = settings.num_pages * settings.page_size
        self.runner = OracleRunner(
            num_slots, settings.max_running_requests, settings.context_length, VOCAB, fail_steps or set()
        )
        self.time = 0.0
        self.failures: list[Exception] = []
        self.loop = Loop(
            self.scheduler, self.runner, clock=lambda: self.time, depth=depth, on_failure=self.failures.append
        )
        self.sent: dict[int, GenerateRequest] = {}
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.num_steps = 0

    def send(self, prompt: list[int], **sampling: object) -> int:
        id = len(self.sent)
        packed = np.array(prompt, dtype=np.int32).tobytes()
        salt = sampling.pop("salt", "")
        request = GenerateRequest(
            id=id, rid=f"r{id}", input_ids=packed, sampling=SamplingParams(**sampling), cache_salt=str(salt)
        )
        self.sent[id] = request
        self.outputs[id] = []
        self.scheduler.add_request(request, self.time)
        return id

    def step(self, check: bool = True) -> None:
        self.time += 1.0
        self.num_steps += 1
        output = self.loop.step()
        if output is not None:
            self.receive(output)
        if check:
            self.check()

    def receive(self, output: StepOutput) -> None:
        ids = np.frombuffer(output.ids, dtype=np.int64).tolist()
        tokens = np.frombuffer(output.tokens, dtype=np.int32).tolist()
        for id, token in zip(ids, tokens, strict=True):
            assert id not in self.finished, "a token after the final word"
            self.outputs[id].append(token)
        for finish in output.finished:
            assert finish.id not in self.finished, "two final words"
            self.finished[finish.id] = finish

    def run_dry(self, check: bool = True) -> None:
        idle = 0
        while self.loop.has_work:
            before = (sum(map(len, self.outputs.values())), len(self.finished), self.runner.num_tokens_run)
            self.step(check)
            after = (sum(map(len, self.outputs.values())), len(self.finished), self.runner.num_tokens_run)
            idle = idle + 1 if before == after else 0
            assert idle < 5, "there is work, and nothing happens"

    def check(self) -> None:
        """Design.md section 6, 1 to 5."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        scheduler.audit()
        kv.cache.check()
        with_row = [r for r in scheduler.requests.values() if r.row != NO_ROW]
        assert kv.rows.num_free + len(with_row) == kv.rows.num_rows
        assert len({r.row for r in with_row}) == len(with_row)
        waiting = list(scheduler.waiting_queue)
        assert len(waiting) + len(with_row) == len(scheduler.requests)
        assert all(r.state is RequestState.WAITING and not r.is_locked for r in waiting)
        open_prompts = [r for r in with_row if r.state is RequestState.PREFILLING and r.kv_len < r.fill_len]
        assert open_prompts == ([scheduler.chunked_req] if scheduler.chunked_req else [])
        locked = set()
        for request in with_row:
            node = request.handle if kv.cache.shares else None
            while node is not None and node.key:
                locked.add(id(node))
                node = node.parent
        if kv.cache.shares:
            assert locked == {id(node) for node in kv.cache.nodes() if node.locks}

    def check_idle(self) -> None:
        kv = self.scheduler.kv
        assert not self.scheduler.requests
        assert not len(self.scheduler.running_batch)
        assert self.scheduler.chunked_req is None
        assert kv.cache.protected_pages == 0
        assert kv.rows.num_free == kv.rows.num_rows
        assert kv.available == kv.capacity
        assert set(self.finished) == set(self.sent)

    def check_outputs(self) -> None:
        for id, request in self.sent.items():
            finish = self.finished[id]
            prompt = np.frombuffer(request.input_ids, dtype=np.int32).tolist()
            max_new = request.sampling.max_new_tokens or self.scheduler.max_len - len(prompt)
            eos = set(request.sampling.stop_token_ids) | (set() if request.sampling.ignore_eos else {EOS})
            expected = expected_output(prompt, max_new, VOCAB, eos)
            output = self.outputs[id]
            assert output == expected[: len(output)], f"request {id} differs from a run on its own"
            if finish.reason in ("stop", "length"):
                assert output == expected
                assert finish.reason == ("stop" if expected[-1] in eos else "length")
                assert finish.completion_tokens == len(output)


def random_settings(rng: random.Random) -> SchedulerSettings:
    page_size = rng.choice([1, 1, 2, 3, 4, 8, 16])
    num_pages = rng.choice([60, 100, 200, 300]) // page_size + rng.choice([3, 6])
    chunk = rng.choice([None, page_size, 2 * page_size, 16, 33])
    if chunk is not None:
        chunk = max(chunk, page_size)
    return SchedulerSettings(
        num_pages=num_pages,
        page_size=page_size,
        max_running_requests=rng.choice([1, 2, 6, 12]),
        context_length=rng.choice([40, 90, 160]),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        prefix_cache=rng.random() < 0.8,
        policy=rng.choice(["fcfs", "lpm"]),
        max_prefill_tokens=rng.choice([page_size, 20, 64, 1000]) if chunk is None else max(chunk, 64),
        chunked_prefill_size=chunk,
        mixed_chunk=rng.random() < 0.5,
        max_queued_requests=rng.choice([5, 1000, 1000, 1000]),
        schedule_conservativeness=rng.choice([0.0, 0.0, 0.3, 1.0]),
    )


def random_prompt(rng: random.Random, families: list[list[int]], longest: int) -> list[int]:
    head = rng.choice(families)[: rng.randrange(0, 60)] if rng.random() < 0.7 else []
    tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
    return (head + tail)[:longest]


def run_random(seed: int, num_requests: int = 40) -> World:
    rng = random.Random(seed)
    settings = random_settings(rng)
    fails = {rng.randrange(5, 200) for _ in range(3)} if rng.random() < 0.2 else set()
    world = World(settings, depth=rng.choice([0, 1, 2]), fail_steps=fails)
    families = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    sent = 0
    while sent < num_requests or world.loop.has_work:
        if sent < num_requests and rng.random() < 0.4:
            for _ in range(rng.choice([1, 1, 2, 8])):
                longest = world.scheduler.max_len * rng.choice([1, 1, 2, 4]) // 4
                prompt = random_prompt(rng, families, longest)
                max_new = rng.choice([None, 1, 2, 8, 20, 30, 40])
                if max_new is not None and rng.random() < 0.95:
                    max_new = max(1, min(max_new, world.scheduler.max_len - len(prompt)))
                world.send(
                    prompt,
                    max_new_tokens=max_new,
                    ignore_eos=rng.random() < 0.2,
                    stop_token_ids=(7,) if rng.random() < 0.2 else (),
                    salt=rng.choice(["", "", "", "other"]),
                )
                sent += 1
        if rng.random() < 0.02 and world.sent:
            world.scheduler.abort(Abort(ids=(rng.randrange(len(world.sent)),)))
        if rng.random() < 0.001:
            world.scheduler.abort(Abort(all=True))
        world.step()
        assert world.num_steps < 20_000, "no end in sight"
    world.run_dry()
    world.step()
    world.check_idle()
    world.check_outputs()
    return world


@pytest.mark.parametrize("seed", range(120))
def test_random_schedule_keeps_every_invariant(seed: int) -> None:
    run_random(seed)


def test_the_random_schedules_reach_what_they_are_meant_to() -> None:
    reached = dict.fromkeys(["retractions", "evictions", "hits", "aborted", "refused", "failed"], 0)
    for seed in range(60):
        world = run_random(seed)
        stats = world.scheduler.stats()
        reached["retractions"] += stats.total_retractions
        reached["evictions"] += stats.total_evicted_tokens
        reached["hits"] += stats.total_cached_tokens
        reached["aborted"] += stats.total_aborted
        reached["refused"] += sum(finish.status in (400, 503) for finish in world.finished.values())
        reached["failed"] += len(world.failures)
    assert min(reached.values()) > 20, reached
