"""Work for the device that is no step: what becomes of requests, cache and journal."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from tests.scheduler.oracle_runner import expected_output
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.world import VOCAB
from tests.seeds import seeds
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import (
    ContinueGeneration,
    DumpExpertDistributionRecord,
    ExpertDistributionReply,
    FlushCache,
    GetExpertDistributionRecord,
    HealthCheck,
    HealthCheckReply,
    PauseGeneration,
)
from weft.messages.replies import StepOutput
from weft.messages.weights import (
    GetWeightsByName,
    ReleaseMemoryOccupation,
    ResumeMemoryOccupation,
    UpdateWeightsFromDisk,
    UpdateWeightsFromTensor,
    WeightsReply,
)
from weft.scheduler.settings import SchedulerSettings

SETTINGS = SchedulerSettings(
    num_pages=64,
    page_size=4,
    max_running_requests=8,
    context_length=128,
    vocab_size=VOCAB,
    eos_token_ids=(3,),
    mixed_chunk=False,
    aging_s=0.0,
)
PROMPT = list(range(10, 31))
BOTH = ["weights", "kv_cache"]


class Bench(RecordedWorld):
    """A world that also keeps what is no output."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__(SETTINGS, depth)
        self.replies: list[FromEngine] = []
        self.num_before: dict[
            int, int
        ] = {}  # output tokens of each request when the last of them came

    def turn(self) -> list[StepOutput]:
        replies = self.engine.step()
        for index, reply in enumerate(replies):
            if isinstance(reply, WeightsReply | HealthCheckReply | ExpertDistributionReply):
                self.replies.append(reply)
                before = [one for one in replies[:index] if isinstance(one, StepOutput)]
                tokens = Counter(
                    id for one in before for id in np.frombuffer(one.ids, dtype=np.int64).tolist()
                )
                self.num_before = {
                    id: len(output) + tokens[id] for id, output in self.outputs.items()
                }
        return [reply for reply in replies if isinstance(reply, StepOutput)]

    def ask(self, message: ToEngine) -> WeightsReply:
        """The reply to a request about weights, some steps later."""
        assert self.engine.submit(message) is None
        self.replies.clear()
        for _ in range(20):
            self.step()
            if self.replies:
                break
        (reply,) = self.replies
        assert isinstance(reply, WeightsReply)
        return reply

    def outputs_by(self, weights: int, id: int, start: int = 0) -> list[int]:
        """What these weights would have continued a request with, from output token `start` on."""
        known = self.prompts[id] + self.outputs[id][:start]
        return expected_output(known, len(self.outputs[id]) - start, VOCAB, set(), weights)

    def replay(self) -> None:
        super().replay(check=True)


def update(
    folder: str, version: str | None = None, *, aborts: bool = False
) -> UpdateWeightsFromDisk:
    return UpdateWeightsFromDisk(
        call=7, model_path=folder, weight_version=version, abort_all_requests=aborts
    )


def generate(bench: Bench, prompt: list[int] = PROMPT, num_tokens: int = 12) -> int:
    return bench.send(prompt, max_new_tokens=num_tokens, ignore_eos=True)


@pytest.mark.parametrize("depth", [0, 1])
def test_after_an_update_nobody_goes_on_with_old_kv(depth: int) -> None:
    bench = Bench(depth)
    running = generate(bench, [*PROMPT, 5])
    for _ in range(6):
        bench.step()
    reply = bench.ask(update("9", "nine"))
    num_before = bench.num_before[running]
    assert (reply.success, reply.weight_version, reply.num_paused_requests) == (True, "nine", 1)
    bench.run_dry()
    assert 0 < num_before < 12
    assert bench.outputs[running][:num_before] == bench.outputs_by(0, running)[:num_before]
    assert bench.outputs[running][num_before:] == bench.outputs_by(9, running, num_before)
    bench.replay()


def test_an_update_empties_the_prefix_cache() -> None:
    bench = Bench()
    first = generate(bench)
    bench.run_dry()
    bench.ask(update("9"))
    second = generate(bench)
    bench.run_dry()
    assert bench.finished[second].cached_tokens == 0
    assert bench.outputs[second] == bench.outputs_by(9, second) != bench.outputs[first]


def test_a_refused_update_leaves_everything_as_it_was() -> None:
    bench = Bench()
    ids = [generate(bench), generate(bench, [1, 2, 3])]
    for _ in range(5):
        bench.step()
    reply = bench.ask(update("no such", "ten"))
    assert (reply.success, reply.status, reply.weight_version, reply.num_paused_requests) == (
        False,
        400,
        "default",
        0,
    )
    assert bench.scheduler.counters.num_retractions == 0
    bench.run_dry()
    bench.check_outputs()
    assert all(bench.finished[id].retractions == 0 for id in ids)
    bench.replay()


def test_an_update_can_abort_what_is_open_and_only_if_it_succeeds() -> None:
    bench = Bench()
    id = generate(bench)
    bench.step()
    assert not bench.ask(update("no such", aborts=True)).success
    assert id not in bench.finished
    assert bench.ask(update("9", aborts=True)).num_paused_requests == 1
    assert bench.finished[id].reason == "abort"
    assert bench.finished[id].message == "the weights were updated"
    bench.run_dry()
    bench.check_idle()
    bench.replay()


def test_no_step_runs_while_the_device_works_and_messages_are_taken_in() -> None:
    bench = Bench()
    bench.runner.patience = 8
    running = generate(bench)
    for _ in range(4):
        bench.step()
    bench.tell(update("9"))
    bench.tell(update("0"))  # one after the other
    bench.step()
    num_run = bench.runner.num_tokens_run
    waiting = bench.send(PROMPT, max_new_tokens=2, ignore_eos=True, timeout_ms=3_000)
    bench.tell(HealthCheck(call=3))
    for _ in range(6):
        bench.step()
    assert bench.runner.num_tokens_run == num_run
    assert bench.finished[waiting].status == 503  # its time is over, as always
    for _ in range(20):
        bench.step()
    assert len(bench.replies) == 2
    bench.run_dry()
    assert bench.outputs[running] == bench.outputs_by(0, running)
    bench.replay()


def test_a_health_check_is_answered_while_the_device_works() -> None:
    bench = Bench()
    bench.runner.patience = 5
    bench.tell(update("9"))
    bench.step()
    reply = bench.engine.submit(HealthCheck(call=3))
    assert reply == HealthCheckReply(
        call=3, success=True, message="weights or memory are being changed"
    )


def test_memory_is_not_released_under_running_requests() -> None:
    bench = Bench()
    id = generate(bench)
    for _ in range(3):
        bench.step()
    reply = bench.ask(ReleaseMemoryOccupation(call=1, tags=BOTH))
    assert (reply.success, reply.status, reply.released) == (False, 400, [])
    assert "1 requests hold KV memory" in reply.message
    bench.run_dry()
    bench.check_outputs()
    assert id in bench.finished


def test_while_memory_is_released_new_requests_are_refused_and_waiting_ones_stay() -> None:
    bench = Bench()
    generate(bench)
    bench.run_dry()
    waiting = generate(bench, [7, *PROMPT])
    for _ in range(4):
        bench.step()
    bench.tell(PauseGeneration(call=1, mode="retract"))
    assert bench.ask(ReleaseMemoryOccupation(call=2, tags=BOTH)).released == ["kv_cache", "weights"]
    refused = generate(bench)
    bench.step()
    assert bench.finished[refused].status == 503
    assert (
        "released until POST /resume_memory_occupation (kv_cache, weights)"
        in bench.finished[refused].message
    )
    bench.tell(ContinueGeneration(call=3))
    for _ in range(3):
        bench.step()
    assert waiting not in bench.finished
    assert bench.ask(ResumeMemoryOccupation(call=4, tags=["weights"])).released == ["kv_cache"]
    assert bench.ask(ResumeMemoryOccupation(call=5, tags=["kv_cache"])).released == []
    again = generate(bench)
    bench.run_dry()
    assert bench.outputs[waiting] == bench.outputs_by(0, waiting)
    assert bench.outputs[again] == bench.outputs_by(0, again)
    assert bench.finished[again].cached_tokens == 0
    bench.replay()


def test_a_journal_is_put_aside_while_memory_is_released_but_not_while_the_device_works() -> None:
    bench = Bench()
    bench.put_aside_in_every_step()
    bench.runner.patience = 3
    bench.tell(ReleaseMemoryOccupation(call=2, tags=BOTH))
    bench.step()
    assert bench.engine._engine.services.device_jobs.is_busy
    assert not bench.records.parts
    while bench.engine._engine.services.device_jobs.is_busy:
        bench.step()
    assert len(bench.records.parts) == 1
    bench.ask(ResumeMemoryOccupation(call=2, tags=BOTH))
    bench.replay()


def test_counts_of_experts_are_told_between_steps_and_a_journal_holds_none() -> None:
    bench = Bench()
    running = generate(bench)
    bench.step()
    for message in (GetExpertDistributionRecord(call=1), DumpExpertDistributionRecord(call=2)):
        assert bench.engine.submit(message) is None
    bench.run_dry()
    looked, dumped = bench.replies
    assert isinstance(looked, ExpertDistributionReply)
    # The device of this world tells none, as that of a replay.
    assert looked.call == 1
    assert looked.prefill == []
    assert looked.decode == []
    assert isinstance(dumped, ExpertDistributionReply)
    assert len(bench.outputs[running]) == 12
    bench.replay()


def test_a_journal_holds_no_weights() -> None:
    bench = Bench()
    bench.ask(UpdateWeightsFromTensor(call=1, content=b"secret" * 100))
    assert not any(b"secret" in record for record in bench.records)
    bench.replay()


@pytest.mark.parametrize("seed", seeds(4, 6))
def test_random_device_work_among_random_requests_is_replayed_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(depth=seed % 2)
    if seed >= 4:
        bench.put_aside_in_every_step()
    for _ in range(300):
        bench.runner.patience = rng.choice([0, 0, 3])
        chance = rng.random()
        if chance < 0.25:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([3, 20, 50]))]
            bench.send(
                prompt[: rng.randrange(1, len(prompt) + 1)], max_new_tokens=rng.choice([1, 9, 30])
            )
        elif chance < 0.28:
            bench.tell(update(rng.choice(["1", "2", "no such"]), aborts=rng.random() < 0.2))
        elif chance < 0.31:
            tags = rng.choice([BOTH, ["weights"], ["kv_cache"]])
            bench.tell(ReleaseMemoryOccupation(call=1, tags=tags))
        elif chance < 0.37:
            bench.tell(ResumeMemoryOccupation(call=1, tags=BOTH))
        elif chance < 0.39:
            bench.tell(
                rng.choice(
                    [
                        PauseGeneration(call=1, mode="retract"),
                        GetWeightsByName(call=1, name="a", truncate_size=1),
                    ]
                )
            )
        elif chance < 0.42:
            bench.tell(ContinueGeneration(call=1))
        elif chance < 0.44:
            bench.tell(FlushCache(call=1))
        bench.step()
    bench.runner.patience = 0
    bench.tell(ResumeMemoryOccupation(call=1, tags=BOTH))
    bench.tell(ContinueGeneration(call=1))
    for _ in range(60):
        bench.step()  # through all that was asked for
    bench.run_dry()
    bench.check_idle()
    bench.replay()
