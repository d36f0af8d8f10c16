"""Requests for vectors, without a model: how they end, what is refused, and what a replay makes of
them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.world import World
from weft.journal.replay import Replay
from weft.messages.requests import GenerateRequest, PoolingParams
from weft.messages.sampling import SamplingParams
from weft.plan.outputs import PooledVectors, PoolingRequest
from weft.plan.step import Plan, Result, find
from weft.scheduler.features.pooling import NOT_FINITE, PoolingFeature
from weft.scheduler.settings import PoolingLimits, SchedulerSettings

NOTHING = SamplingParams(max_new_tokens=0)
VECTORS = PoolingLimits(size=8, num_token_types=2)


def world(limits: PoolingLimits | None, depth: int = 0) -> World:
    settings = SchedulerSettings(
        num_pages=64,
        page_size=4,
        max_running_requests=4,
        context_length=64,
        vocab_size=300,
        pooling=limits,
        mixed_chunk=False,
        aging_s=0.0,
    )
    return World(settings, depth, features=(PoolingFeature(),))


def send(
    world: World,
    length: int,
    pooling: PoolingParams | None,
    sampling: SamplingParams = NOTHING,
    **fields: object,
) -> int:
    id = len(world.sent)
    ids = np.arange(length, dtype=np.int32).tobytes()
    request = GenerateRequest(
        id=id, rid=f"r{id}", input_ids=ids, sampling=sampling, pooling=pooling, **fields
    )  # type: ignore[arg-type]
    world.sent[id], world.prompts[id], world.outputs[id] = request, list(range(length)), []
    world.take_in(request)
    return id


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_ends_with_its_prompt_and_gets_no_token(depth: int) -> None:
    here = world(VECTORS, depth)
    for length in (1, 20, 64):
        send(here, length, PoolingParams())
    here.run_dry()
    assert all(
        finish.reason == "length" and not finish.completion_tokens
        for finish in here.finished.values()
    )
    assert not any(here.outputs.values())
    here.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_replay_knows_which_vectors_were_not_finite(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = RecordedWorld(world(VECTORS).settings, depth)
    execute = here.runner.execute

    def vectors(plan: Plan) -> Result:
        """Of a prompt of five tokens not a number, of others their length."""
        asked = find(plan.outputs, PoolingRequest)
        assert asked is not None
        lens = plan.lens[asked.index].astype(np.float32)
        pooled = np.repeat(np.where(lens == 5, np.nan, lens)[:, None], 8, axis=1)
        return replace(execute(plan), outputs=(PooledVectors(pooled),))

    monkeypatch.setattr(here.runner, "execute", vectors)
    ids = [send(here, length, PoolingParams(dimensions=4)) for length in (3, 5, 7, 5, 4, 6)]
    here.run_dry()
    assert [here.finished[id].reason for id in ids] == [
        "length",
        "error",
        "length",
        "error",
        "length",
        "length",
    ]
    assert here.finished[ids[1]].message == NOT_FINITE
    replay = Replay(here.records)
    assert replay.run(), replay.difference
    assert replay.engine.scheduler.stats() == here.scheduler.stats()


@pytest.mark.parametrize(
    ("limits", "pooling", "fields", "message"),
    [
        (
            VECTORS,
            None,
            {"sampling": SamplingParams(max_new_tokens=1)},
            "generates no tokens; it makes vectors",
        ),
        (VECTORS, PoolingParams(dimensions=9), {}, "dimensions is 9; 1 to 8"),
        (VECTORS, PoolingParams(dimensions=-1), {}, "dimensions is -1; 1 to 8"),
        (
            VECTORS,
            PoolingParams(token_type_ids=bytes([0, 2, 0])),
            {},
            "token_type_ids has 2; 0 to 1",
        ),
        (
            VECTORS,
            PoolingParams(token_type_ids=bytes(2)),
            {},
            "token_type_ids has the length 2; 3 is expected",
        ),
        (VECTORS, PoolingParams(label_ids=(1,)), {}, "label tokens are for a model that generates"),
        (
            VECTORS,
            None,
            {"sampling": SamplingParams(max_new_tokens=0, prompt_logprobs=1)},
            "log probabilities",
        ),
        (
            PoolingLimits(size=3, is_embedding=False),
            PoolingParams(dimensions=1),
            {},
            "makes no vectors",
        ),
        (
            PoolingLimits(size=3),
            PoolingParams(token_type_ids=bytes(3)),
            {},
            "knows no kinds of segments",
        ),
        (None, PoolingParams(), {}, "--task embed"),
        (None, PoolingParams(label_ids=(300,)), {}, "token id 300; 0 to 299"),
        (None, PoolingParams(label_ids=(1,) * 1025), {}, "1,025 ids; at most 1,024"),
        (
            None,
            PoolingParams(label_ids=(1,)),
            {"sampling": SamplingParams(max_new_tokens=2)},
            "must be 0",
        ),
    ],
)
def test_what_a_model_cannot_give_is_refused(
    limits: PoolingLimits | None,
    pooling: PoolingParams | None,
    fields: dict[str, SamplingParams],
    message: str,
) -> None:
    here = world(limits)
    bad = send(here, 3, pooling, **fields)
    good = send(here, 3, PoolingParams() if limits else None)
    here.run_dry()
    assert here.finished[bad].status == 400
    assert message in here.finished[bad].message
    assert here.finished[good].reason == "length"


@pytest.mark.parametrize("dimensions", [-1, 1, 2, 7, 8, 9])
def test_vectors_have_one_to_all_dimensions(dimensions: int) -> None:
    here = world(VECTORS)
    id = send(here, 3, PoolingParams(dimensions=dimensions))
    here.run_dry()
    assert here.finished[id].status == (200 if 1 <= dimensions <= VECTORS.size else 400)


@pytest.mark.parametrize(("wish", "told"), [(None, -1), (False, 0), (True, 1)])
def test_a_plan_says_whether_a_request_wants_its_vector_scaled(
    wish: bool | None, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(VECTORS)
    plans: list[Plan] = []
    launch = here.runner.launch

    def noted(plan: Plan) -> object:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(here.runner, "launch", noted)
    send(here, 3, PoolingParams(normalize=wish))
    send(here, 3, PoolingParams(normalize=True))
    here.run_dry()
    asked = [find(plan.outputs, PoolingRequest) for plan in plans]
    assert [one for request in asked if request for one in request.normalize.tolist()] == [told, 1]
