"""What goes between ranks comes back as it was, and nothing else can be made of bytes."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from tests.executor.driver import Turn, make_driver
from weft.executor.ranks.sender import without_sampling
from weft.executor.wire.pack import NAMED, WireError, pack, unpack, unpack_request
from weft.plan.device import DeviceReply, GetWeight, JoinGroup, ReadAdapter, ReceiveWeights
from weft.plan.inputs import InputVectors
from weft.plan.outputs import PromptLogprobsRequest, SampledLogprobsRequest
from weft.plan.step import LAST_SAMPLED, LayerSpan, Plan, TableWrites, WindowSlots


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def make_plan() -> Plan:
    plan = make_driver().plan(Turn(0, [3, LAST_SAMPLED]), Turn(2, [LAST_SAMPLED], samples=False))
    prompts = PromptLogprobsRequest(
        ints(0), ints(1), ints(2), np.zeros((1, 0), np.int32), ints(0), ints(7)
    )
    return replace(
        plan,
        table=TableWrites(ints(0), ints(0), ints(1), ints(9)),
        window=WindowSlots(ints(1, 2, 3)),
        layers=LayerSpan(0, 1, 2, kept=np.array([1, 0], np.int64)),
        inputs=(InputVectors(ints(1), np.ones((1, 4), np.float32)),),
        outputs=(*plan.outputs, prompts),
        adapters=ints(-1, 4),
    )


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) in NAMED.values() and type(one) is type(other):
        names = [field.name for field in fields(one)]  # type: ignore[arg-type]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    return one == other


def test_a_plan_comes_back_with_arrays_that_may_be_written_to() -> None:
    plan = make_plan()
    found = unpack(pack(plan), Plan)
    assert same(found, plan)
    found.tokens[0] = 1


def test_followers_get_known_tokens_and_no_sampling() -> None:
    import torch

    plan = make_plan()
    sent = without_sampling(plan, torch.tensor([40, 41, 42]))
    assert sent.tokens.tolist() == [3, 40, 42]
    assert sent.sampling.is_greedy
    assert not any(isinstance(one, SampledLogprobsRequest) for one in sent.outputs)


@pytest.mark.parametrize(
    "value",
    [
        GetWeight("w", 3),
        ReadAdapter("a", "0" * 32),
        JoinGroup("g", "h", 1, 2, 3, "gloo", 1.5),
        ReceiveWeights("g", ("a", "b"), ("bfloat16",) * 2, ((1, 2), (3,))),
    ],
)
def test_requests_to_the_device_come_back(value: GetWeight) -> None:
    assert unpack_request(pack(value)) == value


def test_bytes_that_are_no_plan_are_refused() -> None:
    """Every cut of a plan, and every change of a byte: a plan, or an error with a name."""
    data = pack(make_plan())
    rng = np.random.default_rng(0)
    for length in range(0, len(data), 7):
        with pytest.raises(WireError):
            unpack(data[:length], Plan)
    for _ in range(2_000):
        spoilt = bytearray(data)
        for place in rng.integers(0, len(data), 3):
            spoilt[place] = rng.integers(0, 256)
        try:
            unpack(bytes(spoilt), Plan)
        except WireError:
            continue
    for noise in (rng.bytes(40) for _ in range(500)):
        with pytest.raises(WireError):
            unpack(noise, Plan)


def test_a_name_stands_for_the_classes_that_are_sent_and_no_other() -> None:
    with pytest.raises(WireError, match="unknown name"):
        unpack(b"\x92\xa6system\xa2ls", Plan)
    with pytest.raises(WireError, match="instead of a Plan"):
        unpack(pack(DeviceReply(ok=True)), Plan)
    with pytest.raises(WireError, match="request to the device"):
        unpack_request(pack(DeviceReply(ok=True)))
    with pytest.raises(WireError, match="cannot be sent"):
        pack(object())
