"""The work of a step does not grow with the requests that wait, or that run as before: calls are
counted, not time."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.scheduler.calls import num_calls
from tests.seeds import every_second
from weft.bench.overhead import message_of
from weft.messages.replies import StepOutput
from weft.plan.step import Result
from weft.scheduler import policies
from weft.scheduler.batch import Batch
from weft.scheduler.recovery import Recovery
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings

COMPOSED = ("priority > lpm", "lof > lpm", "fair(key) > fcfs", "priority > fair(key) > lpm")
ORDERS = [name for name in (*policies.names(), *COMPOSED) if name != "static"]
FEW = 1_100  # more than are looked at one by one
MANY = 3_300


def filled(policy: str, num_running: int, num_waiting: int, chunk_len: int = 1_024) -> Scheduler:
    """All rows decode, and others wait: of three lengths, each with tokens of its own."""
    settings = SchedulerSettings(
        num_pages=16 * num_running,
        page_size=4,
        max_running_requests=num_running,
        context_length=64,
        vocab_size=10_000,
        schedule_policy=policy,
        chunked_prefill_size=chunk_len,
        mixed_chunk=False,
        max_queued_requests=num_running + num_waiting,
        aging_s=5.0,
    )
    scheduler = Scheduler(settings)
    for number in range(num_running + num_waiting):
        prompt = np.arange(number, number + 4 + number % 3, dtype=np.int32)
        scheduler.add_request(message_of(number, prompt.tobytes(), max_new=40), 0.0)
        if number == num_running - 1:
            step(scheduler)
    return scheduler


def plan(scheduler: Scheduler) -> Batch:
    batch = scheduler.get_next_batch_to_run(1.0, in_flight=False)
    assert batch is not None
    return batch


def commit(scheduler: Scheduler, batch: Batch) -> StepOutput | None:
    tokens = np.full(len(batch.sample_rows), 7, dtype=np.int32)
    return scheduler.process_batch_result(batch, Result(tokens=tokens))


def step(scheduler: Scheduler) -> Batch:
    batch = plan(scheduler)
    commit(scheduler, batch)
    return batch


def calls_of_decode(scheduler: Scheduler) -> int:
    step(scheduler)
    step(scheduler)
    return num_calls(lambda: step(scheduler))


def calls_of_admission(scheduler: Scheduler) -> int:
    step(scheduler)
    scheduler.fail(2, "it has to go")
    num_before = scheduler.counters.steps.num_prefill
    num = num_calls(lambda: step(scheduler))
    assert scheduler.counters.steps.num_prefill == num_before + 1
    return num


def test_a_decode_step_takes_no_more_calls_if_more_wait() -> None:
    few = calls_of_decode(filled("fcfs", 4, 5))
    many = calls_of_decode(filled("fcfs", 4, 500))
    assert few == many


def test_a_decode_step_takes_no_more_calls_if_more_run() -> None:
    few = calls_of_decode(filled("fcfs", 4, 5))
    many = calls_of_decode(filled("fcfs", 64, 5))
    assert few == many


def test_a_step_of_prompts_takes_no_more_calls_after_others_of_its_kind() -> None:
    """None of those whose first tokens have come decodes before all prompts are computed."""
    scheduler = filled("fcfs", 240, 0, chunk_len=12)
    calls = []
    for _ in range(60):
        batch = plan(scheduler)
        assert len(batch.rows) == len(batch.prefills)
        calls.append(num_calls(partial(commit, scheduler, batch)))
    assert max(calls[-9:]) <= max(calls[3:12])


@pytest.mark.parametrize("policy", every_second(ORDERS))
def test_an_admission_takes_no_more_calls_if_more_wait(policy: str) -> None:
    few = calls_of_admission(filled(policy, 4, FEW))
    many = calls_of_admission(filled(policy, 4, MANY))
    # Places of the queue are looked at in blocks of some thousands.
    assert many <= few + 20


def test_what_stays_of_requests_is_read_once_for_steps_of_the_same_rows() -> None:
    scheduler = filled("fcfs", 4, 0)
    first = step(scheduler)
    second = step(scheduler)
    assert first.facts is second.facts
    assert first.plan.sampling.temperature is second.plan.sampling.temperature
    scheduler.fail(2, "it has to go")
    third = step(scheduler)
    assert third.facts is not first.facts
    assert third.facts.ids.tolist() == [0, 1, 3]


def test_a_request_that_is_shortened_while_its_step_runs_ends_with_it() -> None:
    scheduler = filled("fcfs", 1, 0)
    step(scheduler)
    batch = plan(scheduler)
    known = int(scheduler.kv.columns.known_len[0])
    allocator = scheduler.kv.allocator
    free = allocator.free_pages()
    lost = allocator.num_pages - 2  # two pages are left, which the request has
    assert known == 2 * scheduler.kv.page_size - 2
    for page in free[:lost].tolist():
        allocator.quarantine(page, is_owned=False)
    Recovery(scheduler).shrink()
    commit(scheduler, batch)
    output = commit(scheduler, plan(scheduler))
    assert output is not None
    assert [finish.reason for finish in output.finished] == ["length"]
    assert not scheduler.has_work
