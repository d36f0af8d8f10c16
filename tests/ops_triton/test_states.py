"""Layers that keep a state, by the Triton kernels: against `TorchStates`, and cut into other
steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.executor.driver import ints
from tests.ops.state_cases import CASES, CPU, LENS, SLOTS, make_pool, random
from weft.arrays import IntArray, LongArray
from weft.executor.gpu.layout import lay_out_states
from weft.executor.gpu.states import TritonStates
from weft.executor.kv_pool import StatePool
from weft.executor.plain.states import TorchStates
from weft.plan.step import NO_STATE, StateSlots

# Of what stands in padding.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

SMALL = (
    "conv of 3",
    "delta of one head",
    "mamba of one head",
    "mamba 1",
    "lightning of one head",
)  # the interpreter is slow
# Variants of cases that are tried in any case.
LARGE = (
    *("lightning", "lightning of many heads", "mamba of many heads", "conv of 2"),
    *("delta of tiled heads",),
)
NOTHING = ints([])
# Copies after several tokens of a request, and after all; tokens fewer and more than taps.
MANY_LENS = ints([5, 2, 18])
MANY_SLOTS = StateSlots(
    reads=ints([1, NO_STATE, 3]),
    writes=ints([1, 2, 4]),
    kept_rows=ints([2, 0, 2, 2]),
    kept_lens=ints([17, 1, 2, 16]),
    kept_slots=ints([5, 6, 7, 8]),
)


def send(arrays: Sequence[IntArray | LongArray]) -> list[Tensor]:
    return [torch.from_numpy(array.copy()) for array in arrays]


def made(name: str) -> tuple[TritonStates, StatePool]:
    config, pool = make_pool(CASES[name])
    return TritonStates(config, pool, send), pool


@pytest.mark.parametrize(
    ("name", "lens", "slots"),
    [
        *((name, LENS, SLOTS) for name in CASES if name not in LARGE),
        *((name, MANY_LENS, MANY_SLOTS) for name in SMALL),
        *(pytest.param(name, LENS, SLOTS, marks=pytest.mark.slow) for name in LARGE),
    ],
)
def test_the_kernels_do_to_states_what_torch_does(
    name: str, lens: IntArray, slots: StateSlots
) -> None:
    case = CASES[name]
    x = random(int(lens.sum()), case.width)
    config, pool = make_pool(case)
    plain = TorchStates(config, pool)
    plain.prepare(lens, slots)
    expected = case.compute(plain, x.clone())
    states, found = made(name)
    states.prepare(lens, slots)
    torch.testing.assert_close(case.compute(states, x), expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(found.tensors, pool.tensors, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_a_request_that_is_cut_into_steps_gets_the_same_bits(name: str) -> None:
    case = CASES[name]
    x = random(10, case.width)
    states, pool = made(name)
    states.prepare(ints([10]), StateSlots(ints([NO_STATE]), ints([0]), NOTHING, NOTHING, NOTHING))
    whole = case.compute(states, x.clone())
    kept = [tensor[0].clone() for tensor in pool.tensors]
    reads = NO_STATE
    parts = []
    for part in x.split([1, 2, 6, 1]):
        slots = StateSlots(ints([reads]), ints([3]), NOTHING, NOTHING, NOTHING)
        states.prepare(ints([len(part)]), slots)
        parts.append(case.compute(states, part.clone()))
        reads = 3
    assert torch.equal(torch.cat(parts), whole)
    for tensor, one in zip(pool.tensors, kept, strict=True):
        assert torch.equal(tensor[3], one)


@pytest.mark.parametrize("name", SMALL)
def test_padding_changes_no_state_and_no_output(name: str) -> None:
    case = CASES[name]
    x = random(int(LENS.sum()) + 4, case.width)
    states, pool = made(name)
    states.prepare(LENS, SLOTS)
    expected = case.compute(states, x[:-4].clone())
    padded, others = made(name)
    padded.begin(send(lay_out_states(LENS, SLOTS, len(LENS) + 3, 30)))
    assert torch.equal(case.compute(padded, x.clone())[:-4], expected)
    for ours, theirs in zip(others.tensors, pool.tensors, strict=True):
        assert torch.equal(ours, theirs)
    before = [tensor.clone() for tensor in others.tensors]
    padded.begin(send(lay_out_states(NOTHING, None, 3, 3)))
    case.compute(padded, x.clone())
    for ours, one in zip(others.tensors, before, strict=True):
        assert torch.equal(ours, one)


def test_numbers_of_bfloat16_are_computed_in_float32() -> None:
    case = CASES["delta"]
    x = random(int(LENS.sum()), case.width).bfloat16()
    config, pool = make_pool(case)
    plain = TorchStates(config, pool)
    plain.prepare(LENS, SLOTS)
    expected = case.compute(plain, x.clone())
    states, _ = made("delta")
    states.prepare(LENS, SLOTS)
    found = case.compute(states, x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_states_stay_where_the_pool_is() -> None:
    states, pool = made("delta of one head")
    assert all(tensor.device == CPU for tensor in pool.tensors)
    with pytest.raises(AssertionError, match="prepare"):
        states.silu_conv(random(1, 16), None, 0)  # type: ignore[arg-type]
