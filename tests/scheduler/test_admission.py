"""PrefillAdder's arithmetic, in numbers that can be checked by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.scheduler.admission import make_adder, make_kv, make_request
from weft.memory.prefix_cache import NO_PAGES, CacheKey
from weft.scheduler.admission import CLIP_MAX_NEW_TOKENS, AddResult
from weft.scheduler.pace.pace import StepBudget


def test_a_request_needs_strictly_less_than_what_is_left() -> None:
    kv = make_kv(num_pages=100, page_size=4)
    # 10 -> 12 tokens of pages, + one page, + 20 to generate = 36
    request = make_request(kv, 10, 20)
    assert (
        make_adder(kv, reserved=364.0).add_one_req(request, has_chunked_req=False)
        is AddResult.NO_TOKEN
    )
    assert (
        make_adder(kv, reserved=363.0).add_one_req(request, has_chunked_req=False)
        is not AddResult.NO_TOKEN
    )
    assert kv.cache.protected_pages == 0


def test_what_is_taken_is_charged_in_whole_pages() -> None:
    kv = make_kv(num_pages=100, page_size=4)
    adder = make_adder(kv, chunked_prefill_size=64)
    assert adder.add_one_req(make_request(kv, 10, 20), has_chunked_req=False) is AddResult.CONTINUE
    assert adder.rem_total_tokens == 400 - (12 + 4 + 20)
    assert adder.cur_rem_tokens == 400 - 12
    assert adder.rem_step_tokens == 64 - 12


def test_expected_output_is_clipped() -> None:
    kv = make_kv(num_pages=6000, page_size=1)
    adder = make_adder(kv)
    adder.add_one_req(make_request(kv, 10, 7000), has_chunked_req=False)
    assert adder.rem_total_tokens == 6000 - (10 + 1 + CLIP_MAX_NEW_TOKENS)


def test_mixed_decode_tokens_count_against_every_budget() -> None:
    kv = make_kv(num_pages=100, page_size=4)
    adder = make_adder(kv, mixed_tokens=3, mixed_kv=8, reserved=10.0, chunked_prefill_size=64)
    assert adder.rem_step_tokens == 61
    assert adder.rem_total_tokens == 400 - 18
    assert adder.cur_rem_tokens == 400 - 8


def test_memory_is_tested_again_when_the_prefix_is_locked() -> None:
    kv = make_kv(num_pages=30, page_size=1)
    shared = np.arange(20, dtype=np.int32)
    kv.cache.insert(CacheKey("", shared.tobytes()), kv.allocator.alloc(20))
    request = make_request(kv, 22, 15)
    assert request.kv_len == 20
    # 10 free + 20 evictable = 30: 2 + 1 + 15 fit. Locked, the prefix cannot be evicted: 10 are
    # left.
    adder = make_adder(kv)
    assert adder.add_one_req(request, has_chunked_req=False) is AddResult.NO_TOKEN
    assert not request.prefix.is_locked
    assert kv.cache.protected_pages == 0


def test_a_prompt_is_cut_down_to_whole_pages() -> None:
    kv = make_kv(num_pages=100, page_size=4)
    adder = make_adder(kv, chunked_prefill_size=30)
    first = make_request(kv, 9, 5)
    second = make_request(kv, 50, 5, first=100)
    assert adder.add_one_req(first, has_chunked_req=False) is AddResult.CONTINUE
    assert (
        adder.add_one_req(second, has_chunked_req=False) is AddResult.CONTINUE
    )  # 30 - 12 = 18 -> 16
    assert second.extend_len == 16
    assert adder.new_chunked_req is second
    assert adder.rem_step_tokens == 2
    third = make_request(kv, 9, 5, first=200)
    assert adder.add_one_req(third, has_chunked_req=True) is AddResult.OTHER
    assert not third.prefix.is_locked


def test_there_is_never_a_second_open_prompt() -> None:
    kv = make_kv(num_pages=100, page_size=1)
    adder = make_adder(kv, chunked_prefill_size=30)
    assert adder.add_one_req(make_request(kv, 50, 5), has_chunked_req=True) is AddResult.OTHER
    assert adder.new_chunked_req is None


@pytest.mark.parametrize("cut_by", ["tokens of a chunk", "tokens of a step", "time"])
def test_whatever_cuts_a_prompt_no_other_is_cut_in_the_same_step(cut_by: str) -> None:
    kv = make_kv(num_pages=400, page_size=4)
    changes: dict[str, dict[str, object]] = {
        "tokens of a chunk": {"chunked_prefill_size": 24},
        "tokens of a step": {"chunked_prefill_size": 200, "max_prefill_tokens": 24},
        # The first stands behind no other token; the second costs as much a token, and there is
        # time for 8 more.
        "time": {"chunked_prefill_size": 200, "budget": Hurry([24, 8, 8])},
    }
    adder = make_adder(kv, **changes[cut_by])
    first, second, short = (
        make_request(kv, length, 5, first=1_000 * length) for length in (50, 60, 7)
    )
    adder.add_one_req(first, has_chunked_req=False)
    assert adder.new_chunked_req == first
    assert first.extend_len == 24
    assert adder.add_one_req(second, has_chunked_req=False) is AddResult.OTHER
    assert adder.new_chunked_req is first
    assert not second.prefix.is_locked
    result = adder.add_one_req(short, has_chunked_req=False)
    assert (result is AddResult.CONTINUE) == (cut_by == "time"), (
        "a short prompt fits whole where time is left"
    )
    assert [request.is_prefilled for request in (first, second)] == [False, False]


class Hurry(StepBudget):
    """Allows so many tokens to each that asks."""

    def __init__(self, limits: list[int]) -> None:
        super().__init__(1.0, (1.0, 0.0), 1_000, 0)
        self._limits = limits

    def limit(self, start: int) -> int:
        return self._limits.pop(0)


def test_an_open_chunk_keeps_to_the_tokens_of_a_step() -> None:
    kv = make_kv(num_pages=400, page_size=4)
    request = make_request(kv, 200, 5)
    adder = make_adder(kv, chunked_prefill_size=128, max_prefill_tokens=30)
    assert adder.add_chunked_req(request) is request
    assert request.extend_len == 28
    request.kv_len = 176
    adder = make_adder(kv, chunked_prefill_size=128, max_prefill_tokens=30)
    assert adder.add_chunked_req(request) is None
    assert request.extend_len == 24


def test_without_chunks_only_the_first_prompt_may_exceed_the_budget_of_a_step() -> None:
    kv = make_kv(num_pages=400, page_size=1)
    adder = make_adder(kv, max_prefill_tokens=30)
    assert adder.add_one_req(make_request(kv, 50, 5), has_chunked_req=False) is AddResult.OTHER
    assert len(adder.can_run) == 1
    adder = make_adder(kv, max_prefill_tokens=60)
    assert adder.add_one_req(make_request(kv, 40, 5), has_chunked_req=False) is AddResult.CONTINUE
    assert (
        adder.add_one_req(make_request(kv, 40, 5, first=100), has_chunked_req=False)
        is AddResult.OTHER
    )
    assert len(adder.can_run) == 1


def test_an_open_chunk_goes_on_as_far_as_the_budgets_allow() -> None:
    kv = make_kv(num_pages=10, page_size=4)
    request = make_request(kv, 38, 1)
    adder = make_adder(kv, chunked_prefill_size=16)
    assert adder.add_chunked_req(request) is request
    assert request.extend_len == 16
    request.kv_len = 32
    adder = make_adder(kv, chunked_prefill_size=16)
    assert adder.add_chunked_req(request) is None
    assert request.extend_len == 6
    adder = make_adder(
        kv, chunked_prefill_size=16, mixed_kv=36
    )  # one page is left, and two are needed
    assert adder.add_chunked_req(request) is request
    assert request.extend_len == 4
    adder = make_adder(kv, chunked_prefill_size=16, mixed_kv=40)
    assert adder.add_chunked_req(request) is request
    assert adder.can_run == []


def test_a_request_that_runs_alone_may_use_all_there_is() -> None:
    kv = make_kv(num_pages=10, page_size=4)
    request = make_request(kv, 38, 2)
    assert make_adder(kv).add_one_req(request, has_chunked_req=False) is AddResult.NO_TOKEN
    adder = make_adder(kv, is_alone=True)
    adder.add_one_req(request, has_chunked_req=False)
    assert adder.can_run == [request]
    assert request.prefix.pages is NO_PAGES


@pytest.mark.parametrize("seed", range(20))
def test_the_prompts_of_a_pass_take_together_no_more_time_than_it_has(seed: int) -> None:
    rng = random.Random(f"time of a pass {seed}")
    kv = make_kv(num_pages=8_000, page_size=1)
    left_s = rng.uniform(0.01, 0.2)
    token_s = 4e-4
    pair_s = rng.choice([0.0, 1e-6])
    budget = StepBudget(left_s, (token_s, pair_s), 5_000, min_tokens=0)
    adder = make_adder(kv, max_prefill_tokens=5_000, chunked_prefill_size=5_000, budget=budget)
    while True:
        request = make_request(kv, rng.randrange(1, 200), 1)
        if (
            adder.add_one_req(request, has_chunked_req=False) is not AddResult.CONTINUE
            or adder.new_chunked_req
        ):
            break
    lens = [request.extend_len for request in adder.can_run]
    spent_s = sum(token_s * n + pair_s * n * n / 2 for n in lens)
    assert left_s - 2 * (token_s + pair_s * 200) < spent_s <= left_s


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("max_new", [0, 1, 7])
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_a_refused_request_is_said_to_need_is_the_least_with_which_it_is_taken(
    page_size: int, max_new: int, is_alone: bool
) -> None:
    refused = set()
    for left in range(1, 60):
        kv = make_kv(num_pages=100, page_size=page_size)
        adder = make_adder(kv, reserved=float(kv.room.available - left), is_alone=is_alone)
        adder.add_one_req(make_request(kv, 10, max_new), has_chunked_req=False)
        if not adder.can_run:
            assert adder.shortage is not None
            assert adder.shortage.available == left
            refused.add((left, adder.shortage.needed))
    assert [left for left, _ in sorted(refused)] == list(range(1, len(refused) + 1))
    assert {needed for _, needed in refused} == {len(refused) + 1}
