"""Runs of states that the kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tests.executor.driver import MODEL, ints
from weft.config.decoder import (
    DecoderSpec,
    GatedDeltaSpec,
    LayerSpec,
    LightningSpec,
    Mamba1Spec,
    MambaSpec,
    ScanNorm,
    ShortConvSpec,
    StateSpec,
)
from weft.config.model import ModelConfig
from weft.executor.kv_pool import StatePool
from weft.models.layers.states import (
    ConvWeights,
    DeltaWeights,
    LayerStates,
    LightningWeights,
    ScanWeights,
    SelectiveWeights,
)
from weft.plan.step import NO_STATE, StateSlots

NUM_SLOTS = 9
CPU = torch.device("cpu")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Case(NamedTuple):
    spec: StateSpec
    width: int  # of a token's input
    compute: Callable[[LayerStates, Tensor], Tensor]


def short_conv(taps: int, channels: int, bias: bool) -> Case:
    conv = ConvWeights(random(taps, channels), random(channels) if bias else None)

    def compute(states: LayerStates, x: Tensor) -> Tensor:
        return states.gated_conv(x, conv, 0)

    return Case(ShortConvSpec(channels=channels, taps=taps), 3 * channels, compute)


def delta(spec: GatedDeltaSpec) -> Case:
    """The convolution, and the rule behind it."""
    conv = ConvWeights(random(spec.taps, spec.channels), None)
    rule = DeltaWeights(
        random(spec.value_heads),
        random(1 + spec.value_heads)[1:],
        1 + 0.2 * random(spec.value_dim),
        1e-6,
    )
    gates = slice(spec.channels, spec.channels + spec.out_size)

    def compute(states: LayerStates, x: Tensor) -> Tensor:
        qkv = states.silu_conv(x[:, : spec.channels], conv, 0)
        return states.gated_delta(qkv, x[:, gates], x[:, gates.stop :], rule, 0)

    return Case(spec, spec.in_size, compute)


def mamba1(spec: Mamba1Spec) -> Case:
    """The convolution, and what is behind it; steps, B and C come with the input."""
    conv = ConvWeights(random(spec.taps, spec.channels), None)
    weights = SelectiveWeights(random(spec.state_dim, spec.channels), random(spec.channels))
    sizes = (spec.channels, spec.channels, spec.channels, 2 * spec.state_dim)

    def compute(states: LayerStates, x: Tensor) -> Tensor:
        inner, gate, steps, shared = x.split_with_sizes(sizes, -1)
        convolved = states.silu_conv(inner, conv, 0)
        return states.selective(convolved, gate, steps, shared, weights, 0)

    return Case(spec, sum(sizes), compute)


def mamba(spec: MambaSpec) -> Case:
    """The convolution, and what is behind it."""
    conv = ConvWeights(random(spec.taps, spec.channels), random(spec.channels))
    scan = ScanWeights(
        random(spec.heads),
        random(1 + spec.heads)[1:],
        random(2 + spec.heads)[2:],
        None if spec.norm is ScanNorm.NONE else 1 + 0.2 * random(spec.out_size),
        1e-6,
    )
    sizes = (spec.out_size, spec.channels, spec.heads)

    def compute(states: LayerStates, x: Tensor) -> Tensor:
        gate, inner, steps = x.split_with_sizes(sizes, -1)
        return states.scan(states.silu_conv(inner, conv, 0), gate, steps, scan, 0)

    return Case(spec, spec.in_size, compute)


def lightning(spec: LightningSpec) -> Case:
    """Without a convolution: products with queries, keys, values and gates come with the input."""
    weights = LightningWeights(torch.tensor(spec.decays), 1 + 0.2 * random(spec.out_size), 1e-6)
    end = 3 * spec.out_size

    def compute(states: LayerStates, x: Tensor) -> Tensor:
        return states.lightning(x[:, :end], x[:, end:], weights, 0)

    return Case(spec, spec.in_size, compute)


CASES = {
    "lightning": lightning(LightningSpec(heads=6, head_dim=32, slope=0.7)),
    "lightning of one head": lightning(LightningSpec(heads=1, head_dim=48, slope=1.0)),
    "lightning of many heads": lightning(LightningSpec(heads=16, head_dim=16, slope=0.1)),
    "mamba": mamba(MambaSpec(heads=6, groups=2, head_dim=32, state_dim=16, taps=4)),
    "mamba of one head": mamba(MambaSpec(heads=1, groups=1, head_dim=16, state_dim=48, taps=2)),
    "mamba of many heads": mamba(MambaSpec(heads=16, groups=1, head_dim=16, state_dim=32, taps=4)),
    "mamba without a norm": mamba(
        MambaSpec(heads=2, groups=2, head_dim=16, state_dim=16, taps=2, norm=ScanNorm.NONE),
    ),
    "mamba with its norm first": mamba(
        MambaSpec(heads=2, groups=1, head_dim=16, state_dim=16, taps=2, norm=ScanNorm.NORM_FIRST),
    ),
    "mamba 1": mamba1(Mamba1Spec(channels=32, state_dim=16, step_rank=4, taps=4)),
    "mamba 1 of long states": mamba1(Mamba1Spec(channels=16, state_dim=48, step_rank=4, taps=2)),
    "conv of 3": short_conv(3, 80, False),
    "conv of 4 with bias": short_conv(4, 16, True),
    "conv of 2": short_conv(2, 64, False),
    "delta": delta(
        GatedDeltaSpec(key_heads=2, value_heads=4, key_dim=32, value_dim=48, taps=4),
    ),
    "delta of tiled heads": delta(
        GatedDeltaSpec(key_heads=2, value_heads=6, key_dim=16, value_dim=16, taps=3, is_tiled=True),
    ),
    "delta of one head": delta(
        GatedDeltaSpec(key_heads=1, value_heads=1, key_dim=16, value_dim=16, taps=2),
    ),
}
# Five requests: one that begins, one that stays, one that moves, and two that go on from one state.
LENS = ints([6, 1, 3, 1, 9])
SLOTS = StateSlots(
    reads=ints([NO_STATE, 1, 2, 3, 3]),
    writes=ints([0, 1, 4, 5, 6]),
    kept_rows=ints([4, 0]),
    kept_lens=ints([4, 6]),
    kept_slots=ints([7, 8]),
)


def make_pool(case: Case) -> tuple[ModelConfig, StatePool]:
    decoder = DecoderSpec(layers=(LayerSpec(state=case.spec), LayerSpec()))
    config = replace(MODEL, decoder=decoder)
    pool = StatePool(config, NUM_SLOTS, CPU)
    for tensor in pool.tensors:
        tensor.copy_(random(*tensor.shape))
    return config, pool
