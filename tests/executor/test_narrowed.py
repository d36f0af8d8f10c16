"""Fused steps leave out, behind the last layer that stores something, tokens behind which none is
sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.executor.driver import Driver, Turn, asking, make_driver
from tests.models.many import make_checkpoint
from weft.config.model import ModelConfig
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.ops.cpp import abi
from weft.plan.device import RecordExperts

FIRST = [(7 * number) % 500 + 1 for number in range(90)]
SECOND = [(11 * number) % 500 + 1 for number in range(40)]
NAMES = [
    "llama",
    "stablelm-parallel",  # attention and the feed-forward part read the same norm
    "qwen3-moe",
    "deepseek-v3",  # latents
    "qwen3-next",  # gates between the heads of queries
    "lfm2",  # the last layer keeps a state
    "falcon-h1",  # attention and a state in each layer
    "nemotron-h",  # layers of one part
    "gemma4-small",  # inputs for each layer; the last layers read K and V of earlier ones
    "gemma3n",  # streams
    "gemma4-unified",  # windows
]


def fused_of(driver: Driver) -> CpuFusedSteps:
    steps = driver.runner.steps
    assert isinstance(steps, CpuFusedSteps)
    return steps


def read_by_heads(driver: Driver) -> list[torch.Tensor]:
    """What the head reads in steps of several kinds, [tokens sampled, hidden] of each."""
    found = []
    steps: list[tuple[Turn, ...]] = [
        (Turn(0, FIRST[:70], samples=False), Turn(1, SECOND[:33])),
        (Turn(1, SECOND[33:34]), Turn(0, FIRST[70:]), Turn(2, SECOND[:9], samples=False)),
        (Turn(2, [9]), Turn(1, [8]), Turn(0, [5])),
        (Turn(3, FIRST[:9], samples=False),),
        (Turn(0, [5, 6]), Turn(3, FIRST[9:20])),
    ]
    for turns in steps:
        driver.runner.launch(asking(driver.plan(*turns))).result()
        num_sampled = sum(turn.samples for turn in turns)
        head = fused_of(driver)._head.sized
        assert head is not None
        found.append(head.input[:num_sampled].clone())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sampled_has_the_same_bits_if_other_tokens_are_left_out(
    tmp_path: Path, name: str
) -> None:
    make_checkpoint(name, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    drivers = [make_driver(config, tmp_path, kernels="auto") for _ in range(2)]
    fused_of(drivers[1]).step.computes_all = True
    left_out, computed = map(read_by_heads, drivers)
    assert [len(rows) for rows in left_out] == [1, 2, 3, 0, 2]
    for one, other in zip(left_out, computed, strict=True):
        assert torch.equal(one, other)
    for driver in drivers:
        driver.runner.close()


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("llama", 3),
        ("lfm2", 3),
        ("nemotron-h", 4),
        ("gemma3n", 3),
        ("gemma4-small", 3),
        ("gemma4-unified", 2),
    ],
)
def test_a_program_goes_on_with_fewer_tokens_in_the_last_layer_that_stores(
    tmp_path: Path, name: str, last: int
) -> None:
    make_checkpoint(name, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert config.last_storing_layer == last
    driver = make_driver(config, tmp_path, kernels="auto")
    driver.runner.launch(asking(driver.plan(Turn(0, FIRST)))).result()
    body = fused_of(driver)._body
    assert body is not None
    ends = [layer.end for layer in body.layers]
    kinds = [type(args) for args in body.program.args]
    places = [place for place, kind in enumerate(kinds) if kind is abi.NarrowArgs]
    if ends:  # a model with inputs for each layer is recorded in one piece
        assert ends[last - 1] <= places[0] < ends[last]
    # No operation that stores comes later.
    stores = (abi.ConvArgs, abi.DeltaArgs, abi.ScanArgs)
    for args in body.program.args[places[0] :]:
        assert type(args) not in stores
        if type(args) is abi.RotaryStoreArgs:
            assert abi.KvCache.from_address(args.cache).kv_heads == 0
    driver.runner.close()


def test_experts_are_counted_of_all_tokens(tmp_path: Path) -> None:
    make_checkpoint("qwen3-moe", tmp_path)
    driver = make_driver(ModelConfig.from_folder(tmp_path), tmp_path, kernels="auto")
    assert driver.runner.control(RecordExperts("start")).result().ok
    driver.runner.launch(asking(driver.plan(Turn(0, FIRST)))).result()
    reply = driver.runner.control(RecordExperts("dump")).result()
    counts = torch.frombuffer(bytearray(reply.values), dtype=torch.int64).view(reply.shape)
    of_layers = counts[0].sum(-1)
    assert of_layers.tolist() == [3 * len(FIRST)] * len(of_layers)
    assert not fused_of(driver).step.computes_all
    driver.runner.close()
