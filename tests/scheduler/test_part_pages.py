"""Requests copy the tokens of a page that they share with another sequence in part."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.scheduler.scenes import Recorder, settings
from weft.plan.step import Plan

PROMPT = list(range(100, 121))  # two pages of 8 tokens, and 5 tokens


def world_of(**changes: object) -> Recorder:
    return Recorder(settings(page_size=8, copies_pages=True, **changes))


def computed(world: Recorder, prompt: list[int], **sampling: Any) -> tuple[int, int]:
    """Where the first step of a request begins, and how many tokens it copies."""
    num_before = len(world.plans)
    world.send(prompt, max_new_tokens=4, ignore_eos=True, **sampling)
    world.run_dry()
    plan: Plan = world.plans[num_before]
    num_copied = 0 if plan.copies is None else len(plan.copies.targets)
    assert all(later.copies is None for later in world.plans[num_before + 1 :])
    return int(plan.starts[0]), num_copied


def test_a_repeated_prompt_computes_its_last_token_alone() -> None:
    world = world_of()
    assert computed(world, PROMPT) == (0, 0)
    # The page of the prompt's last tokens is full of the answer's, and is in the cache.
    assert computed(world, PROMPT) == (20, 4)
    world.check_outputs()
    assert world.finished[1].cached_tokens == 20


def test_a_turn_goes_on_behind_the_last_token_of_the_one_before() -> None:
    world = world_of()
    computed(world, PROMPT[:18])
    # Of 18 + 4 tokens the last was not computed.
    turn = [*PROMPT[:18], *world.outputs[0], 250, 251, 252]
    assert computed(world, turn) == (21, 5)
    world.check_outputs()


def test_a_prompt_that_parts_inside_of_a_page_copies_what_is_the_same() -> None:
    world = world_of()
    computed(world, [*PROMPT, *range(200, 220)])
    other = [*PROMPT[:19], 299, *range(200, 220)]
    assert computed(world, other) == (19, 3)
    world.check_outputs()


def test_the_page_with_most_of_it_is_copied() -> None:
    world = world_of()
    for length in (18, 20, 17):
        computed(world, [*PROMPT[:length], *([200 + length] * 12)])
    assert computed(world, [*PROMPT[:21], 299]) == (20, 4)
    world.check_outputs()


def test_nothing_of_another_tenant_or_of_another_salt_is_copied() -> None:
    world = world_of()
    computed(world, PROMPT, tenant="a")
    assert computed(world, PROMPT, tenant="b") == (16, 0)
    assert computed(world, PROMPT, tenant="a") == (20, 4)
    assert computed(world, PROMPT, tenant="a", salt="other") == (0, 0)
    world.check_outputs()


def test_log_probabilities_of_prompt_tokens_are_computed() -> None:
    world = world_of()
    computed(world, PROMPT)
    begin, _ = computed(world, PROMPT, prompt_logprobs=1)
    assert begin == 0
    begin, num_copied = computed(world, PROMPT, prompt_logprobs=1, prompt_logprobs_start=18)
    assert (begin, num_copied) == (18, 2)


@pytest.mark.parametrize("changes", [{"prefix_cache": False}, {"copies_pages": False}])
def test_without_a_cache_or_where_it_is_off_nothing_is_copied(changes: dict[str, object]) -> None:
    world = Recorder(settings(**{"page_size": 8, "copies_pages": True, **changes}))
    computed(world, PROMPT)
    assert computed(world, PROMPT)[1] == 0


def test_last_pages_are_given_up_for_requests_that_need_all_memory() -> None:
    world = world_of(num_pages=64, context_length=512, max_running_requests=2)
    kv = world.scheduler.kv
    for first in range(8):
        computed(world, [first] * 12)
    assert kv.copies is not None
    parts = kv.copies.parts
    assert parts.num_owned == 1, "one in 64 pages"
    world.send([299] * 500, max_new_tokens=8, ignore_eos=True)
    world.run_dry()
    assert parts.num_owned == 1, "its own"
    assert len(world.outputs[8]) == 8
    world.check_outputs()
    world.scheduler.kv.reset_cache()
    assert parts.num_owned == 0
    assert kv.allocator.num_free == 64


def test_turns_of_many_chats_have_the_tokens_that_each_has_alone() -> None:
    """With chunks, pages that are evicted, and two tenants."""
    rng = random.Random(7)
    world = world_of(num_pages=48, context_length=160, chunked_prefill_size=16, mixed_chunk=True)
    chats: list[list[int]] = [[rng.randrange(4, 9)] * rng.randrange(1, 20) for _ in range(6)]
    num_copied = 0
    for _ in range(12):
        picked = rng.sample(range(6), 3)
        ids = {}
        for chat in picked:
            tenant = "ab"[chat % 2]
            ids[chat] = world.send(
                list(chats[chat]), max_new_tokens=rng.randrange(1, 8), tenant=tenant
            )
        world.run_dry()
        for chat, id in ids.items():
            chats[chat] += [*world.outputs[id], rng.randrange(4, 9), rng.randrange(4, 9)]
            if len(chats[chat]) > 130:
                chats[chat] = chats[chat][:10]
    for plan in world.plans:
        num_copied += 0 if plan.copies is None else len(plan.copies.targets)
    assert num_copied > 20
    world.check_outputs()
