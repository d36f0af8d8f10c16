"""Prompts that are computed for what is to be told of them: without a token, in pieces, each
once."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.engine_world import EngineWorld
from tests.scheduler.scenes import settings
from weft.client.aux_outputs import prompt_logprobs
from weft.messages.control import ContinueGeneration, HealthCheck, HealthCheckReply, PauseGeneration
from weft.messages.replies import PromptLogprobsPiece

PROMPT = list(range(10, 60))


def world(depth: int = 0, **changes: Any) -> EngineWorld:
    return EngineWorld(settings(**changes), depth)


def lens(world: EngineWorld, id: int) -> list[int]:
    """Tokens in each piece that came."""
    return [
        len(piece.tokens) // 4
        for piece in world.given.get(id, [])
        if isinstance(piece, PromptLogprobsPiece)
    ]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("chunk", [-1, 16])
def test_a_request_for_no_token_ends_when_its_prompt_is_computed(depth: int, chunk: int) -> None:
    one = world(depth, chunked_prefill_size=chunk)
    silent = one.send(PROMPT, max_new_tokens=0)
    other = one.send(PROMPT[::-1], max_new_tokens=3, ignore_eos=True)
    one.run_dry()
    one.check_idle()
    one.check_outputs()
    assert one.finished[silent].reason == "length"
    assert one.finished[silent].completion_tokens == 0
    assert one.runner.num_tokens_run == 2 * len(PROMPT) + 2
    again = one.send(PROMPT, max_new_tokens=0)
    one.run_dry()
    assert one.finished[again].cached_tokens == len(PROMPT) - 1
    assert len(one.outputs[other]) == 3


def test_as_many_prompt_tokens_as_fit_need_no_room_for_a_token() -> None:
    one = world(num_pages=50, context_length=50)
    id = one.send(PROMPT, max_new_tokens=0)
    long = one.send(PROMPT, max_new_tokens=1)
    one.run_dry()
    assert one.finished[id].reason == "length"
    assert one.finished[long].status == 400


@pytest.mark.parametrize("depth", [0, 1])
def test_pieces_come_chunk_by_chunk_and_before_the_first_token(depth: int) -> None:
    one = world(depth, chunked_prefill_size=16)
    id = one.send(PROMPT, max_new_tokens=2, prompt_logprobs=0, logprob_token_ids=(1, 2))
    while not one.outputs[id]:
        before = lens(one, id)
        one.step()
    assert lens(one, id) == [
        17,
        16,
        16,
        1,
    ]  # the first token has none, and the last of a chunk tells of the next
    assert before == [17, 16, 16]
    assert all(len(token.of_ids) == 2 for token in prompt_logprobs(one.given[id])[1:])
    one.run_dry()
    one.check_outputs()


@pytest.mark.parametrize(("start", "cached"), [(0, 0), (1, 1), (33, 33), (49, 49)])
def test_no_more_is_computed_again_than_is_asked_for(start: int, cached: int) -> None:
    one = world()
    one.send(PROMPT, max_new_tokens=1)
    one.run_dry()
    before = one.runner.num_tokens_run
    id = one.send(PROMPT, max_new_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
    one.run_dry()
    one.check_outputs()
    assert one.finished[id].cached_tokens == cached
    assert one.runner.num_tokens_run - before == len(PROMPT) - cached
    assert sum(lens(one, id)) == len(PROMPT) - start


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps", [2, 3, 6, 12])
def test_sent_logprobs_are_neither_sent_nor_computed_again_after_a_retraction(
    depth: int, steps: int
) -> None:
    one = world(depth, chunked_prefill_size=16)
    id = one.send(PROMPT, max_new_tokens=20, ignore_eos=True, prompt_logprobs=0)
    one.steps(steps)
    told = sum(lens(one, id))
    one.tell(PauseGeneration(call=1, mode="retract"))
    one.tell(ContinueGeneration(call=2))
    assert one.scheduler.stats().total_retractions == 1
    one.run_dry()
    one.check_outputs()
    assert 0 < told <= len(PROMPT)
    assert sum(lens(one, id)) == len(PROMPT)
    assert (
        one.runner.num_tokens_run <= len(PROMPT) + 20 + 1
    )  # but for the last token, which is not cached


def test_a_health_check_in_between_swallows_nothing() -> None:
    one = world(chunked_prefill_size=16)
    one.tell(HealthCheck(call=1))
    id = one.send(PROMPT, max_new_tokens=0, prompt_logprobs=0)
    one.run_dry()
    one.check_outputs()
    assert sum(lens(one, id)) == len(PROMPT)
    assert one.answers(HealthCheckReply)


def test_requests_without_logprobs_wait_for_a_recomputed_prompt_and_share_it() -> None:
    one = world()
    asks = one.send(PROMPT, max_new_tokens=1, prompt_logprobs=0)
    others = [one.send(PROMPT, max_new_tokens=1) for _ in range(3)]
    one.run_dry()
    one.check_outputs()
    assert one.finished[asks].cached_tokens == 0
    assert [one.finished[id].cached_tokens for id in others] == [len(PROMPT) - 1] * 3


def test_a_wish_without_its_positions_computed_anew_harms_nobody() -> None:
    """As a foreign sender could say it: the log probabilities are wanted, but the cache may be
    used."""
    one = world()
    one.send(PROMPT, max_new_tokens=1)
    one.run_dry()
    request = msgspec.structs.replace(one.sent[0], id=1, recompute_from=None)
    wish = msgspec.structs.replace(request.sampling, prompt_logprobs=0)
    one.expect(msgspec.structs.replace(request, sampling=wish))
    one.take_in(one.sent[1])
    one.run_dry()
    assert one.finished[1].reason == "length"
    assert np.isfinite(
        [token.logprob or 0.0 for token in prompt_logprobs(one.given.get(1, []))]
    ).all()
