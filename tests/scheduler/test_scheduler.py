"""The scheduler's behaviour in small scenes that can be counted by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from tests.scheduler.oracle_runner import OracleRunner, extend_hash, next_token
from tests.scheduler.scenes import Patience, Recorder, settings
from tests.scheduler.world import EOS, VOCAB, World
from weft.memory.radix.cache import RadixCache
from weft.messages.requests import Abort
from weft.plan.logits import LogitBias, Penalties
from weft.plan.outputs import SampledLogprobs, SampledLogprobsRequest
from weft.plan.step import ForwardMode, Plan, Result, find
from weft.scheduler.features.bias import LogitBiasFeature
from weft.scheduler.features.logprobs import LogprobsFeature
from weft.scheduler.features.penalties import PenaltiesFeature
from weft.scheduler.limits import QueueDrain
from weft.scheduler.request import RequestState

# Continuous batching


def test_a_request_that_ends_leaves_at_once_and_a_waiting_one_takes_its_place() -> None:
    world = World(settings(max_running_requests=2))
    short = world.send([1, 2], max_new_tokens=2, ignore_eos=True)
    world.send([4, 5], max_new_tokens=30, ignore_eos=True)
    waiting = world.send([6, 7], max_new_tokens=5, ignore_eos=True)
    world.step()
    world.step()
    assert short in world.finished
    assert world.request(waiting).state is RequestState.WAITING
    world.step()
    assert len(world.outputs[waiting]) == 1
    world.run_dry()
    world.check_outputs()


def test_prompts_go_before_decoding_or_with_it_by_setting() -> None:
    for mixed, mode in [(False, ForwardMode.EXTEND), (True, ForwardMode.MIXED)]:
        world = Recorder(settings(mixed_chunk=mixed))
        world.send([1, 2, 3], max_new_tokens=20)
        world.step()
        world.step()
        assert world.plans[-1].mode is ForwardMode.DECODE
        world.send([5, 6, 7, 8], max_new_tokens=20)
        world.step()
        plan = world.plans[-1]
        assert plan.mode is mode
        assert plan.lens.tolist() == ([4, 1] if mixed else [4])
        assert plan.samples.all()
        world.run_dry()
        world.check_outputs()


def test_a_long_prompt_is_cut_into_chunks_and_samples_only_after_the_last() -> None:
    world = Recorder(settings(chunked_prefill_size=16, page_size=4, num_pages=50))
    id = world.send(list(range(10, 60)), max_new_tokens=3, ignore_eos=True)
    for _ in range(4):
        world.step()
    assert [(p.starts.tolist(), p.lens.tolist(), p.samples.tolist()) for p in world.plans] == [
        ([0], [16], [False]),
        ([16], [16], [False]),
        ([32], [16], [False]),
        ([48], [2], [True]),
    ]
    assert len(world.outputs[id]) == 1
    world.run_dry()
    world.check_outputs()


def test_a_chunk_shares_its_step_with_what_still_fits() -> None:
    world = Recorder(settings(chunked_prefill_size=16))
    world.send(list(range(20)), max_new_tokens=2)
    world.send([50, 51], max_new_tokens=2)
    world.step()
    world.step()
    assert world.plans[1].lens.tolist() == [4, 2]


def test_overlap_launches_the_next_step_before_the_result_is_known_and_outputs_are_the_same() -> (
    None
):
    outputs = []
    for depth in (0, 1):
        world = Recorder(settings(), depth=depth)
        for i in range(6):
            world.send([i, i + 1, i + 2], max_new_tokens=12)
        world.run_dry()
        world.check_outputs()
        outputs.append(world.outputs)
    assert outputs[0] == outputs[1]


def test_a_request_that_ends_by_length_runs_no_extra_step_under_overlap() -> None:
    world = Recorder(settings(), depth=1)
    world.send([1, 2, 3], max_new_tokens=4, ignore_eos=True)
    world.run_dry()
    assert [plan.num_tokens for plan in world.plans] == [3, 1, 1, 1]


def test_a_part_can_make_a_request_wait_and_others_go_before() -> None:
    patience = Patience()
    world = World(settings(), features=(patience,))
    ids = [world.send([i], max_new_tokens=3, ignore_eos=True) for i in range(4)]
    for _ in range(4):
        world.step()
    assert sorted(world.finished) == ids[::2]
    patience.is_over = True
    world.run_dry()
    world.check_idle()
    world.check_outputs()


# The prefix cache


def test_a_cached_prefix_is_not_computed_again() -> None:
    world = Recorder(settings(page_size=4, num_pages=50))
    prompt = list(range(30, 50))
    world.send(prompt, max_new_tokens=1)
    world.run_dry()
    again = world.send(prompt, max_new_tokens=1)
    world.run_dry()
    assert world.plans[-1].starts.tolist() == [
        16
    ]  # the last token must be computed, so only whole pages before it
    assert world.finished[again].cached_tokens == 16
    world.check_outputs()


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight"])
def test_a_request_that_caches_no_page_leaves_nothing_of_its_salt(policy: str) -> None:
    world = World(settings(page_size=16, schedule_policy=policy, max_queued_requests=1_000))
    for i in range(300):
        world.send([1, 2, 3], max_new_tokens=4, salt=f"salt {i}")
    world.run_dry(check=False)
    world.check()
    cache = world.scheduler.kv.cache
    assert isinstance(cache, RadixCache)
    assert len(cache.tree.roots) == 0
    index = world.scheduler.waiting_queue.online.policy.prefix_index
    assert index is None or not index._buckets


@pytest.mark.parametrize("salt", ["", "new"])
def test_requests_with_the_same_new_prefix_wait_a_pass_also_under_a_new_salt(
    salt: str,
) -> None:
    world = World(settings(num_pages=500, context_length=200))
    prefix = list(range(100))
    for i in range(3):
        world.send([*prefix, 200 + i], max_new_tokens=2, salt=salt)
    world.run_dry()
    assert world.scheduler.counters.num_prefilled_tokens == 101 + 2
    world.check_outputs()


def test_another_salt_shares_nothing() -> None:
    world = World(settings())
    prompt = list(range(30, 50))
    world.send(prompt, max_new_tokens=1)
    world.run_dry()
    other = world.send(prompt, max_new_tokens=1, salt="tenant")
    world.run_dry()
    assert world.finished[other].cached_tokens == 0


def test_requests_that_arrive_together_compute_their_common_prefix_once() -> None:
    world = Recorder(settings(chunked_prefill_size=-1, max_running_requests=9))
    prefix = list(range(100, 180))
    for i in range(8):
        world.send([*prefix, i], max_new_tokens=2)
    world.step()
    world.step()
    assert [plan.num_tokens for plan in world.plans] == [81, 7]
    world.run_dry()
    world.check_outputs()


def test_longest_prefix_match_goes_first_under_lpm() -> None:
    world = World(settings(schedule_policy="lpm", max_running_requests=1))
    world.send(list(range(100, 140)), max_new_tokens=1)
    world.run_dry()
    cold = world.send([1, 2, 3], max_new_tokens=3, ignore_eos=True)
    warm = world.send([*range(100, 140), 7], max_new_tokens=3, ignore_eos=True)
    world.step()
    assert world.outputs[warm]
    assert not world.outputs[cold]
    world.run_dry()


def test_flush_empties_the_cache_only_when_idle() -> None:
    world = World(settings())
    id = world.send(list(range(30)), max_new_tokens=5, ignore_eos=True)
    world.step()
    assert not world.scheduler.flush_cache()
    world.run_dry()
    assert world.scheduler.stats().kv_evictable > 0
    assert world.scheduler.flush_cache()
    assert world.scheduler.stats().kv_evictable == 0
    assert id in world.finished


# Memory


def test_a_retracted_request_keeps_its_output_and_resumes_first() -> None:
    world = World(settings(num_pages=100, context_length=100, schedule_conservativeness=0.0))
    ids = [world.send([i], max_new_tokens=60, ignore_eos=False) for i in range(4)]
    while not world.scheduler.counters.num_retractions:
        world.step()
    late = world.send([90, 91], max_new_tokens=2)
    taken_back = [r for r in world.scheduler.waiting_queue if r.retractions]
    assert taken_back
    assert next(iter(world.scheduler.waiting_queue)) is taken_back[0]
    world.run_dry()
    assert any(world.finished[id].retractions for id in ids)
    assert late in world.finished
    world.check_idle()
    world.check_outputs()


def test_retraction_waits_for_the_result_that_is_in_flight() -> None:
    world = World(
        settings(num_pages=100, context_length=100, schedule_conservativeness=0.0), depth=1
    )
    for i in range(4):
        world.send([i], max_new_tokens=60)
    world.run_dry()
    assert world.scheduler.counters.num_retractions
    world.check_outputs()


def test_an_open_chunk_gives_way_to_the_last_running_request() -> None:
    world = World(
        settings(
            num_pages=64, context_length=64, chunked_prefill_size=4, schedule_conservativeness=0.0
        ),
    )
    world.send([1], max_new_tokens=60, ignore_eos=False)
    world.step()
    world.step()
    world.send(list(range(100, 150)), max_new_tokens=2)
    world.run_dry()
    world.check_idle()
    world.check_outputs()


def test_the_new_token_ratio_falls_rises_and_is_reset() -> None:
    world = World(settings(num_pages=100, context_length=100, schedule_conservativeness=0.5))
    ratio = world.scheduler.prefills.new_token_ratio
    assert ratio.init == pytest.approx(0.35)
    world.send([1], max_new_tokens=20, ignore_eos=True)
    world.step()
    world.step()
    assert ratio.current == pytest.approx(ratio.init - (ratio.init - ratio.min) / 600)
    ratio.raise_after_retraction(num_decoded=10, num_requests=2, max_new=99)
    assert ratio.current == pytest.approx(0.5)
    world.run_dry()
    world.scheduler.get_next_batch_to_run(0.0, in_flight=False)
    assert ratio.current == ratio.init


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_for_the_next_decode_step_follow_the_known_rule(page_size: int) -> None:
    world = World(settings(page_size=page_size, num_pages=100))
    columns, kv = world.scheduler.kv.columns, world.scheduler.kv
    columns.seq_len[:] = [5, 6, 8, 9]
    columns.kv_len[:] = columns.seq_len - 1  # K and V of the last token are still to be written
    rows = np.arange(4, dtype=np.int32)
    assert kv.room.decode_pages(rows) == (4 if page_size == 1 else 2)
    columns.kv_len[:] = [2, 3, 4, 9 - 7]  # and of some before it
    assert (kv.room.decode_tokens(rows), kv.room.decode_pages(rows)) == (
        17,
        17 if page_size == 1 else 1 + 1 + 1 + 2,
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_admission_opens_again_where_nothing_that_runs_could_end(depth: int) -> None:
    world = World(settings(num_pages=40, context_length=40), depth=depth)
    lost = world.scheduler.kv.allocator.alloc(30)
    id = world.send([7] * 20, max_new_tokens=5, ignore_eos=True)
    for _ in range(3):
        world.step(check=False)
    assert world.request(id).state is RequestState.WAITING
    world.scheduler.kv.allocator.free(lost)
    world.run_dry()
    world.check_outputs()


# What cannot be served


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    world = World(settings(num_pages=50))
    id = world.send(list(range(40)), max_new_tokens=20)
    world.step()
    assert world.finished[id].status == 400
    assert "40 tokens" in world.finished[id].message
    assert "at most 50" in world.finished[id].message


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "empty"), ([1, VOCAB], f"token id {VOCAB}"), ([-1], "token id -1")]
)
def test_a_bad_prompt_is_refused(prompt: list[int], words: str) -> None:
    world = World(settings())
    id = world.send(prompt)
    world.step()
    assert world.finished[id].status == 400
    assert words in world.finished[id].message


def test_a_full_queue_refuses_with_503() -> None:
    world = World(settings(max_queued_requests=2, max_running_requests=1))
    ids = [world.send([1, 2]) for _ in range(4)]
    world.step()
    assert world.finished[ids[3]].status == 503
    assert world.finished[ids[3]].message == "The request queue is full."


@pytest.mark.parametrize("num_running", [0, 3, 8])
def test_a_burst_is_refused_only_beyond_the_free_rows_and_the_queue(num_running: int) -> None:
    world = World(settings(max_queued_requests=6, max_running_requests=8))
    for _ in range(num_running):
        world.send([1, 2, 3], max_new_tokens=20, ignore_eos=True)
    world.step()
    ids = [world.send([7, 8], max_new_tokens=2, ignore_eos=True) for _ in range(15 - num_running)]
    world.run_dry()
    assert [world.finished[id].status for id in ids] == [200] * (14 - num_running) + [503]


def test_a_refusal_says_how_long_the_queue_takes_to_drain() -> None:
    """A request takes 10 steps of a second, one after the other."""
    world = World(settings(max_queued_requests=3, max_running_requests=1))
    ids = [world.send([1, 2], max_new_tokens=10, ignore_eos=True) for _ in range(4)]
    while ids[1] not in world.finished:
        world.step()
    world.step()
    ids += [world.send([3, 4], max_new_tokens=10, ignore_eos=True) for _ in range(3)]
    world.step()
    told = [world.finished[id].retry_after_s for id in ids if id in world.finished]
    admitted = [world.request(ids[2]).admitted_s, 1.0]  # and one between these two
    assert (world.finished[ids[-1]].status, told[:2]) == (503, [0, 0])
    assert told[2] == math.ceil(3 / (3 / (max(admitted) - min(admitted))))
    world.run_dry()


def test_the_time_to_come_again_is_bounded_and_follows_from_the_admissions() -> None:
    drain = QueueDrain()
    assert drain.retry_after_s(100, 0.0) == 1, "nothing is known yet"
    for second in range(20):
        drain.admitted(float(second))
    assert drain.retry_after_s(10, 19.0) == 10
    assert drain.retry_after_s(10, 19.0) == 10, "to ask changes nothing"
    assert drain.retry_after_s(0, 19.0) == 1
    assert drain.retry_after_s(10_000, 19.0) == 60
    assert drain.retry_after_s(5, 1_000.0) == 60, "nobody got a row for a while"
    for _ in range(10_000):
        drain.admitted(1_000.0)
    assert drain.retry_after_s(100, 1_000.0) == 1


# Aborts


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "state", ["waiting", "mid-chunk", "prefilled", "running", "retracted", "finished"]
)
def test_abort_ends_a_request_in_every_state(state: str, depth: int) -> None:
    world = World(
        settings(
            chunked_prefill_size=8, num_pages=100, context_length=100, schedule_conservativeness=0.0
        ),
        depth=depth,
    )
    id = world.send(list(range(20)), max_new_tokens=10, ignore_eos=True)
    if state == "mid-chunk":
        world.step()
        assert world.scheduler.prefills.chunked_req is world.request(id)
    elif state == "prefilled":
        for _ in range(3):
            world.step()
    elif state == "running":
        for _ in range(6):
            world.step()
    elif state == "retracted":
        while world.request(id).row < 0 or world.request(id).state is not RequestState.DECODING:
            world.step()
        while depth and world.loop._in_flight:
            world.receive(world.loop._commit(world.loop._in_flight.popleft()))  # type: ignore[arg-type]
        world.scheduler.retract(world.request(id))
    elif state == "finished":
        world.run_dry()
    world.scheduler.abort(Abort(ids=(id,), message="enough"))
    world.run_dry()
    world.step()
    finish = world.finished[id]
    assert finish.reason == ("length" if state == "finished" else "abort")
    assert world.scheduler.stats().total_aborted == (state != "finished")
    world.check_idle()
    world.check_outputs()


def test_abort_is_exact() -> None:
    world = World(settings())
    ids = [world.send([1, 2], max_new_tokens=3) for _ in range(12)]
    world.scheduler.abort(Abort(ids=(1,)))
    world.run_dry()
    assert [id for id in ids if world.finished[id].reason == "abort"] == [1]


# Faults


def test_a_failed_step_ends_its_own_requests_and_no_other() -> None:
    world = World(settings(max_running_requests=2), fail_steps={3})
    first = [world.send([i, 1], max_new_tokens=8, ignore_eos=True) for i in range(2)]
    later = world.send([9, 9], max_new_tokens=4)
    world.run_dry()
    assert [world.finished[id].reason for id in first] == ["error", "error"]
    assert world.finished[first[0]].status == 500
    assert world.finished[later].reason in ("stop", "length")
    assert len(world.failures) == 1
    world.check_idle()
    world.check_outputs()


def test_others_go_on_with_the_same_output_after_a_failed_prefill() -> None:
    world = World(settings(), depth=1, fail_steps={4})
    survivor = world.send([1, 2, 3], max_new_tokens=10, ignore_eos=True)
    for _ in range(4):
        world.step()
    victim = world.send([5, 6, 7], max_new_tokens=10)
    world.run_dry()
    assert world.finished[victim].reason == "error"
    assert world.finished[survivor].reason == "length"
    world.check_outputs()


class PoisonedRunner(OracleRunner):
    """The logits of the first sampling request of step 1 are not finite."""

    def execute(self, plan: Plan) -> Result:
        result = super().execute(plan)
        invalid = np.zeros(len(result.tokens), dtype=np.bool_)
        invalid[0] = plan.step == 1
        return Result(tokens=result.tokens, invalid=invalid)


def test_logits_that_are_not_finite_end_that_request_alone() -> None:
    world = World(settings())
    world.runner.__class__ = PoisonedRunner
    bad = world.send([1, 2], max_new_tokens=5, ignore_eos=True)
    good = world.send([3, 4], max_new_tokens=5, ignore_eos=True)
    world.run_dry()
    assert world.finished[bad].reason == "error"
    assert world.finished[good].reason == "length"
    world.check_outputs()


# Sampling


def test_the_same_seed_is_passed_on_and_requests_without_one_get_their_own() -> None:
    world = Recorder(settings(seed=5))
    world.send([1], max_new_tokens=2, seed=77)
    world.send([2], max_new_tokens=2)
    world.send([3], max_new_tokens=2)
    world.step()
    seeds = world.plans[0].sampling.seeds.tolist()
    assert seeds[0] == 77
    assert len(set(seeds)) == 3
    assert world.plans[0].sampling.positions.tolist() == [1, 1, 1]


def test_min_tokens_forbids_what_would_end_the_request_until_then() -> None:
    world = Recorder(settings(), features=(LogitBiasFeature((EOS,), VOCAB),))
    world.send(
        [1, 2],
        max_new_tokens=6,
        min_new_tokens=2,
        stop_token_ids=(9, VOCAB, 2**31 - 1),
        ignore_eos=False,
    )
    world.send([4, 5], max_new_tokens=3, logit_bias={8: -3.0})
    world.run_dry()
    first = find(world.plans[0].logits, LogitBias)
    assert first is not None
    assert first.index.tolist() == [0, 0, 1]
    assert first.tokens.tolist() == [EOS, 9, 8]
    assert first.values.tolist() == [-np.inf, -np.inf, -3.0]
    biases = [find(plan.logits, LogitBias) for plan in world.plans[:3]]
    lengths = [0 if bias is None else len(bias.tokens) for bias in biases]
    assert lengths == [3, 3, 1]
    assert not world.plans[-1].logits


@pytest.mark.parametrize("depth", [0, 1])
def test_penalties_see_prompt_and_output_and_say_what_only_the_device_knows(depth: int) -> None:
    world = Recorder(settings(), depth=depth, features=(PenaltiesFeature(),))
    world.send([7], max_new_tokens=4, ignore_eos=True)
    id = world.send([1, 2, 1], max_new_tokens=4, ignore_eos=True, presence_penalty=0.5)
    world.run_dry()
    output = world.outputs[id]
    for n, plan in enumerate(world.plans[:4]):
        penalties = find(plan.logits, Penalties)
        assert penalties is not None
        assert penalties.index.tolist() == [1]
        assert penalties.presence.tolist() == [0.5]
        unknown = depth if n else 0
        assert penalties.history.tolist() == [1, 2, 1, *output[: n - unknown]]
        assert penalties.output_starts.tolist() == [3]
        assert penalties.lacks_last.tolist() == [bool(unknown)]


class LogprobRunner(OracleRunner):
    def execute(self, plan: Plan) -> Result:
        result = super().execute(plan)
        asked = find(plan.outputs, SampledLogprobsRequest)
        if asked is None:
            return result
        top = np.tile(np.arange(5, dtype=np.int32), (len(asked.index), 1))
        given = SampledLogprobs(
            logprob=np.full(len(asked.index), -1.0, dtype=np.float32),
            top_ids=top,
            top_logprobs=-top.astype(np.float32),
        )
        return Result(tokens=result.tokens, outputs=(given,))


@pytest.mark.parametrize("depth", [0, 1])
def test_each_token_of_a_request_that_asks_has_its_log_probability(depth: int) -> None:
    world = World(settings(), depth=depth, features=(LogprobsFeature(),))
    world.runner.__class__ = LogprobRunner
    got = []
    world.send([7], max_new_tokens=4, ignore_eos=True)
    id = world.send(
        [1, 2, 1], max_new_tokens=4, logprobs=2, stop_token_ids=tuple(range(0, VOCAB, 3))
    )
    while world.loop.has_work:
        output = world.loop.step()
        if output is not None:
            got += output.logprobs
            world.receive(output)
    assert len(got) == len(world.outputs[id])
    assert all(entry.id == id and entry.top_ids == [0, 1] for entry in got)


class TwoAtOnce(OracleRunner):
    """Gives each sampling request the next two tokens of its sequence."""

    def execute(self, plan: Plan) -> Result:
        result = super().execute(plan)
        ends = (np.cumsum(plan.lens) - 1)[plan.samples]
        tokens: list[int] = []
        for slot, first in zip(plan.slots[ends].tolist(), result.tokens.tolist(), strict=True):
            state = extend_hash(int(self.state[slot]), first)
            tokens += [first, next_token(state, VOCAB)]
        return Result(
            tokens=np.array(tokens, dtype=np.int32),
            counts=np.full(len(ends), 2, dtype=np.int32),
        )


def test_a_step_may_give_a_request_several_tokens() -> None:
    world = World(settings())
    world.runner.__class__ = TwoAtOnce
    ids = [world.send([1, 2, i], max_new_tokens=length) for i, length in enumerate((1, 8, 9, 40))]
    world.run_dry()
    world.check_idle()
    world.check_outputs()
    most = max(len(world.outputs[id]) for id in ids)
    assert world.scheduler.planner.num_steps <= most // 2 + 2


def test_stop_token_ids_end_a_request_and_are_named() -> None:
    world = World(settings())
    id = world.send(
        [1, 2], max_new_tokens=50, ignore_eos=True, stop_token_ids=tuple(range(0, VOCAB, 4))
    )
    world.run_dry()
    finish = world.finished[id]
    assert finish.reason == "stop"
    assert finish.matched == world.outputs[id][-1]


def test_stop_tokens_beyond_the_vocabulary_end_nothing() -> None:
    world = World(settings())
    id = world.send([1, 2], max_new_tokens=5, ignore_eos=True, stop_token_ids=(VOCAB, 2**31 - 1))
    world.run_dry()
    assert world.finished[id].reason == "length"
    assert len(world.outputs[id]) == 5


def test_the_core_imports_no_torch() -> None:
    code = "import weft.engine.engine, weft.engine.core, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
