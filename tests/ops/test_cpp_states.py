"""Layers that keep a state, by the kernels of every instruction set: against `TorchStates`, token
by token."""

from __future__ import annotations

import pytest
import torch

from tests.executor.driver import ints
from tests.ops.state_cases import CASES, LENS, SLOTS, delta, make_pool, random
from weft.config.decoder import (
    GatedDeltaSpec,
)
from weft.executor.cpu.states import CppStates
from weft.executor.plain.states import TorchStates
from weft.models.layers.states import DeltaWeights
from weft.ops.cpp.abi import StepArgs, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.plan.step import StateSlots


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_do_to_states_what_torch_does(kernels: Library, name: str) -> None:
    case = CASES[name]
    num_tokens = int(LENS.sum())
    config, pool = make_pool(case)
    plain = TorchStates(config, pool)
    plain.prepare(LENS, SLOTS)
    expected = case.compute(plain, random(num_tokens, case.width))
    expected_pool = [tensor.clone() for tensor in pool.tensors]

    config, pool = make_pool(case)
    ops = CppOps(kernels, WeightFormat.F32)
    step = StepArgs(num_tokens=num_tokens, num_requests=len(LENS), lens=LENS.ctypes.data)
    states = CppStates(config, pool, ops, step)
    states.prepare(LENS, SLOTS)
    ops.begin(num_tokens)
    x = ops.recorder.buffer(case.width)
    out = case.compute(states, x)
    program = ops.finish()
    x.copy_(random(num_tokens, case.width))
    program.run(kernels, step)
    torch.testing.assert_close(out[:num_tokens], expected, rtol=1e-4, atol=1e-4)
    for found, wanted in zip(pool.tensors, expected_pool, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_decay_far_beyond_all_numbers_forgets_and_one_near_none_keeps() -> None:
    spec = GatedDeltaSpec(key_heads=1, value_heads=1, key_dim=16, value_dim=16, taps=2)
    case = delta(spec)
    config, pool = make_pool(case)
    plain = TorchStates(config, pool)
    nothing = ints([])
    slots = StateSlots(ints([1]), ints([1]), nothing, nothing, nothing)
    plain.prepare(ints([1]), slots)
    before = pool.of_layer[0][1][1].clone()
    rule = DeltaWeights(torch.tensor([3.0]), torch.tensor([0.0]), torch.ones(16), 1e-6)
    qkv = random(1, spec.channels)
    gate = random(1, 16)
    plain.gated_delta(qkv, gate, torch.tensor([[-40.0, -60.0]]), rule, 0)
    torch.testing.assert_close(pool.of_layer[0][1][1], before)
    plain.gated_delta(qkv, gate, torch.tensor([[-40.0, 60.0]]), rule, 0)
    assert float(pool.of_layer[0][1][1].abs().max()) < 1e-6
