"""Ranks that hold a model together give what one process gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.executor.driver import (
    Turn,
    asking,
    full_logprobs,
    ints,
    make_driver,
)
from tests.executor.ranks import EXPERTS_WITH_BIAS, LLAMA, few_steps, running, same
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    QkNorm,
    RouterSpec,
    TensorNames,
)
from weft.executor.inputs import DeviceRowTable
from weft.executor.ranks.leader import LeaderDrafting
from weft.executor.runner import DecoderOutput
from weft.executor.wire.followers import PLAN
from weft.ops.sharding import RankLost
from weft.plan.device import GetWeight, RecordExperts
from weft.plan.inputs import InputVectors, MediaVectors
from weft.plan.outputs import (
    HiddenStatesRequest,
    PoolingRequest,
    PromptLogprobs,
    PromptLogprobsRequest,
    SampledLogprobsRequest,
)
from weft.plan.step import Drafting, Plan, find

QWEN = DecoderSpec(layers=(LayerSpec(attention=AttentionSpec(qk_norm=QkNorm.HEAD, qkv_bias=True)),))
ONE_TENSOR = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
BY_HEAD = TensorNames(qkv=("query_key_value",), qkv_by_head=True)
PLAIN_MLP = LayerSpec(
    attention=AttentionSpec(qkv_bias=True, out_bias=True, window=8),
    mlp=MlpSpec(is_gated=False, bias=True, activation="gelu"),
)

EXPERTS = MoeSpec(
    router=RouterSpec(num_experts=6, num_chosen=2), size=96, shared_size=64, shared_gate=True
)

MODELS = {
    "llama": LLAMA,
    "one head of keys": replace(LLAMA, num_kv_heads=1, tie_embeddings=True),
    "norms of heads, biases": replace(LLAMA, decoder=QWEN),
    "projections in one tensor": replace(LLAMA, decoder=DecoderSpec(names=ONE_TENSOR)),
    "heads in one tensor": replace(
        LLAMA,
        num_kv_heads=4,
        decoder=DecoderSpec(layers=(PLAIN_MLP,), names=BY_HEAD, head_bias=True),
    ),
    "experts": replace(LLAMA, decoder=DecoderSpec(layers=(LayerSpec(mlp=EXPERTS),))),
    "experts with biases, sinks": replace(LLAMA, decoder=DecoderSpec(layers=(EXPERTS_WITH_BIAS,))),
}


class EncodedAlready:
    """An encoder that has made these vectors."""

    def __init__(self, vectors: np.ndarray[Any, Any]) -> None:
        self._vectors = torch.from_numpy(vectors)

    def take(self, op: MediaVectors) -> torch.Tensor:
        return self._vectors[torch.from_numpy(op.row).long()]


class OwnTable:
    """What rank 0 does with a plan for its draft model, as far as the table of slots goes."""

    def __init__(self, rows: DeviceRowTable) -> None:
        self._rows = rows

    def run(self, plan: Plan) -> DecoderOutput:
        self._rows.apply(plan)
        return DecoderOutput(None, ())


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_the_log_probabilities_of_one(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    expected = few_steps(make_driver(model))
    with running(model, 2, tmp_path) as (driver, comms):
        found = few_steps(driver)
    for ours, theirs in zip(found, expected, strict=True):
        same(ours, theirs)
    assert comms[0].calls == comms[1].calls


@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_four_ranks_repeat_two_heads_of_keys(backend: str, tmp_path: Path) -> None:
    expected = few_steps(make_driver(LLAMA))
    with running(LLAMA, 4, tmp_path, backend=backend) as (driver, _):
        found = few_steps(driver)
    for ours, theirs in zip(found, expected, strict=True):
        same(ours, theirs)


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"quantize": "int8"}, {"quantize": "int4"}]
)
def test_weights_of_fewer_bits_are_divided_and_repeat_bit_for_bit(
    settings: dict[str, str], tmp_path: Path
) -> None:
    runs = []
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        with running(LLAMA, 2, tmp_path / run, **settings) as (driver, _):
            runs.append(few_steps(driver))
    expected = few_steps(make_driver(LLAMA, **settings))
    for first, second, one_rank in zip(*runs, expected, strict=True):
        assert torch.equal(first, second)
        assert float((first - one_rank).abs().mean()) < 0.05


def test_every_output_makes_all_ranks_do_the_same_together(tmp_path: Path) -> None:
    """A rank that gathered once more or less than another would wait for ever."""
    steps = {
        "prompts": PromptLogprobsRequest(
            index=ints([0]),
            counts=ints([4]),
            num_top=ints([2]),
            ids=np.zeros((1, 0), np.int32),
            places=ints([0, 1, 2, 3]),
            targets=ints([1, 2, 3, 60]),
        ),
        "long prompts": PromptLogprobsRequest(
            index=ints([0]),
            counts=ints([300]),
            num_top=ints([1]),
            ids=ints([[60]]).reshape(1, 1),
            places=ints([0, 1, 2] * 100),
            targets=ints([1, 2, 60] * 100),
        ),
        "labels": PoolingRequest(
            index=ints([0]),
            completes=np.ones(1, np.bool_),
            normalize=ints([-1]),
            dimensions=ints([0]),
            labels=ints([[1, 60]]),
        ),
        "states": HiddenStatesRequest(index=ints([0]), counts=ints([2]), places=ints([0, 3])),
        "sampled": SampledLogprobsRequest(ints([0]), ints([5])),
    }
    one = make_driver(LLAMA)
    with running(LLAMA, 2, tmp_path) as (driver, comms):
        for row, request in enumerate(steps.values()):
            turn = Turn(row, [3, 5, 7, 60, 1])
            theirs = one.runner.launch(asking(one.plan(turn), request)).result()
            ours = driver.runner.launch(asking(driver.plan(turn), request)).result()
            assert (ours.tokens == theirs.tokens).all()
            assert comms[0].calls == comms[1].calls
            assert [type(one) for one in ours.outputs] == [type(one) for one in theirs.outputs]
            prompts = find(ours.outputs, PromptLogprobs)
            expected = find(theirs.outputs, PromptLogprobs)
            if prompts is not None and expected is not None:
                same(prompts.logprobs, expected.logprobs)


def test_experts_are_counted_once(tmp_path: Path) -> None:
    """All ranks choose the same ones: rank 0 counts alone."""
    with running(MODELS["experts"], 2, tmp_path) as (driver, _):
        assert driver.runner.control(RecordExperts("start")).result().ok
        driver.run(Turn(0, [3, 5, 7]))
        reply = driver.runner.control(RecordExperts("dump")).result()
    counts = np.frombuffer(reply.values, np.int64)
    assert counts.sum() == 3 * 2 * LLAMA.num_layers


def test_vectors_that_rank_0_has_encoded_go_to_all(tmp_path: Path) -> None:
    vectors = np.arange(2 * LLAMA.hidden_size, dtype=np.float32).reshape(2, -1) / 50
    request = HiddenStatesRequest(index=ints([0]), counts=ints([2]), places=ints([1, 3]))
    one = make_driver(LLAMA)
    plan = one.plan(Turn(0, [3, 5, 7, 11]))
    given = replace(plan, inputs=(InputVectors(ints([1, 2]), vectors),))
    expected = one.runner.launch(asking(given, request)).result()
    with running(LLAMA, 2, tmp_path) as (driver, _):
        rows = driver.runner.passes[0].sender.rows  # type: ignore[attr-defined]
        rows.media = EncodedAlready(vectors)
        plan = driver.plan(Turn(0, [3, 5, 7, 11]))
        taken = MediaVectors(False, (), (), (b"x",), ints([1, 2]), ints([0, 0]), ints([0, 1]))
        found = driver.runner.launch(replace(asking(plan, request), inputs=(taken,))).result()
    same(found.outputs[0].states, expected.outputs[0].states)


def test_followers_hear_what_steps_of_a_draft_model_say_of_slots(tmp_path: Path) -> None:
    """No later plan says it again."""
    one = make_driver(LLAMA)
    one.run(Turn(0, [3, 5, 7, 11]))
    expected = one.run(Turn(0, [13]))
    with running(LLAMA, 2, tmp_path, draft_model="beside") as (driver, _):
        driver.run(Turn(0, [3, 5, 7, 11]))
        driver.share(0, 1, 4)
        plan = driver.plan(Turn(1, [13]))
        assert plan.table is not None
        leader = driver.runner.passes[0]
        sender = leader.sender  # type: ignore[attr-defined]
        own = OwnTable(sender.rows)
        drafting = replace(plan, drafting=Drafting(counts=ints([1]), slots=ints([])))
        LeaderDrafting(sender).run(drafting, own.run)
        found = full_logprobs(driver.runner.launch(replace(plan, table=None)).result())
    same(found, expected)


def test_a_weight_is_told_whole_whichever_ranks_have_it(tmp_path: Path) -> None:
    one = make_driver(LLAMA)
    names = [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ]
    with running(LLAMA, 2, tmp_path) as (driver, _):
        for name in names:
            theirs = one.runner.control(GetWeight(name, 7)).result()
            ours = driver.runner.control(GetWeight(name, 7)).result()
            assert ours.values == theirs.values
            assert ours.shape == theirs.shape


def test_a_follower_that_raises_is_named_and_no_step_runs_afterwards(tmp_path: Path) -> None:
    with running(LLAMA, 2, tmp_path, may_fail=True) as (driver, _):
        few_steps(driver)
        followers = driver.runner.passes[0].sender.followers  # type: ignore[attr-defined]
        followers.tell(PLAN, b"no plan")
        with pytest.raises(RankLost, match="rank 1 failed: WireError"):
            driver.run(Turn(3, [1]))
        with pytest.raises(RankLost, match="rank 1 failed: WireError"):
            driver.run(Turn(4, [1]))
