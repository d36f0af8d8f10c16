"""Stages that each have some of the layers give what one process gives."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
import torch

from tests.executor.driver import Turn, asking, ints, make_driver
from tests.executor.ranks import EXPERTS_WITH_BIAS, LLAMA, few_steps, same, staged
from weft.config.decoder import DecoderSpec, LayerSpec
from weft.executor.wire.followers import PLAN
from weft.ops.sharding import RankLost
from weft.ops.stages import PpStage
from weft.parallel.stage_pipe import SocketPipe
from weft.plan.device import GetWeight, RecordExperts
from weft.plan.outputs import PromptLogprobs, PromptLogprobsRequest
from weft.plan.step import find

MODELS = {
    "llama": replace(LLAMA, num_layers=5),
    "the embedding is the head": replace(LLAMA, num_layers=4, tie_embeddings=True),
    "experts": replace(
        LLAMA, num_layers=4, decoder=DecoderSpec(layers=(LayerSpec(), EXPERTS_WITH_BIAS))
    ),
}


@pytest.mark.parametrize(("name", "size"), [(name, 2) for name in MODELS] + [("llama", 3)])
def test_stages_give_the_log_probabilities_of_one(name: str, size: int) -> None:
    model = MODELS[name]
    expected = few_steps(make_driver(model))
    with staged(model, size) as driver:
        found = few_steps(driver)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_layers_are_divided_in_order_and_the_last_stage_has_no_more_than_others() -> None:
    ranges = [PpStage(stage, 3).layers(8) for stage in range(3)]
    assert ranges == [range(3), range(3, 6), range(6, 8)]
    assert [PpStage(stage, 2).layers(2) for stage in (0, 1)] == [range(1), range(1, 2)]


def test_a_stage_keeps_kv_and_weights_of_its_own_layers_alone() -> None:
    model = MODELS["llama"]
    whole = make_driver(model).runner.store
    with staged(model, 2) as driver:
        store = driver.runner.store
        lens = [len(tensor) for tensor in store.kv_cache]
    all_lens = [len(tensor) for tensor in whole.kv_cache]  # type: ignore[attr-defined]
    expected = [0 if place % 5 < 3 else length for place, length in enumerate(all_lens)]
    assert lens == expected


def test_a_weight_is_reported_by_the_stage_that_has_it() -> None:
    model = MODELS["llama"]
    one = make_driver(model)
    with staged(model, 2) as driver:
        for name in (
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.4.mlp.down_proj.weight",
            "model.embed_tokens.weight",
            "lm_head.weight",
            "model.norm.weight",
        ):
            theirs = one.runner.control(GetWeight(name, 7)).result()
            ours = driver.runner.control(GetWeight(name, 7)).result()
            assert ours.values == theirs.values


def test_log_probabilities_of_prompts_come_from_the_last_stage() -> None:
    model = MODELS["llama"]
    request = PromptLogprobsRequest(
        index=ints([0]),
        counts=ints([3]),
        num_top=ints([2]),
        ids=ints([]).reshape(1, 0),
        places=ints([0, 1, 2]),
        targets=ints([1, 2, 3]),
    )
    turn = Turn(0, [3, 5, 7, 60])
    one = make_driver(model)
    theirs = one.runner.launch(asking(one.plan(turn), request)).result()
    with staged(model, 2) as driver:
        ours = driver.runner.launch(asking(driver.plan(turn), request)).result()
        counted = driver.runner.control(RecordExperts("start")).result()
    found, expected = (find(one.outputs, PromptLogprobs) for one in (ours, theirs))
    assert found is not None
    assert expected is not None
    same(found.logprobs, expected.logprobs)
    assert "--pp-size" in counted.message


def test_a_stage_that_raises_is_named_and_no_step_runs_afterwards() -> None:
    with staged(MODELS["llama"], 2, may_fail=True) as driver:
        few_steps(driver)
        leader = driver.runner.passes[0]
        leader.sender.followers.tell(PLAN, b"no plan")  # type: ignore[attr-defined]
        with pytest.raises(RankLost, match="rank 1 failed: WireError"):
            driver.run(Turn(3, [1]))


def test_a_pipe_gives_whole_steps_and_notices_a_neighbour_that_is_gone() -> None:
    mine, theirs = socket.socketpair()
    first = SocketPipe(None, mine, 5.0)
    second = SocketPipe(theirs, None, 5.0)
    x = torch.arange(12.0).reshape(3, 4)
    first.give(x)
    first.give(x[:2])
    found = torch.empty(3, 4)
    second.take(found)
    assert torch.equal(found, x)
    with pytest.raises(RankLost, match="another step"):
        second.take(found)
    first.wake()
    with pytest.raises(RankLost):
        first.give(x)
    with pytest.raises(RankLost):
        second.take(torch.empty(1 << 20))
    first.close()
    second.close()
