"""States of requests in plain torch, token by token: correct on every device, and the specification
of the kernels.

The t-th tokens of all requests in a step are computed together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weft.arrays import IntArray
from weft.config.decoder import GatedDeltaSpec, MambaSpec, ScanNorm
from weft.config.model import ModelConfig
from weft.executor.kv_pool import StatePool
from weft.models.layers.states import (
    ConvWeights,
    DeltaWeights,
    LightningWeights,
    ScanWeights,
    SelectiveWeights,
)
from weft.ops.elementwise import rms_norm
from weft.ops.states import (
    conv_step,
    delta_decay,
    delta_step,
    gate_and_norm,
    lightning_step,
    norm_and_gate,
    scan_step,
    selective_step,
)
from weft.plan.step import NO_STATE, StateSlots

# (state [A, ..], tokens [A]) -> the state after these tokens, [A, ..]
Advance = Callable[[Tensor, Tensor], Tensor]


_SCAN_NORMS = {ScanNorm.GATE_FIRST: gate_and_norm, ScanNorm.NORM_FIRST: norm_and_gate}


class TokenStep(NamedTuple):
    """The t-th tokens of all requests that have one, for some t."""

    rows: Tensor  # [A] indices of the requests in the step
    tokens: Tensor  # [A] indices of their t-th tokens in the step
    kept_rows: Tensor  # indices of the requests whose state after this token is kept
    kept_slots: Tensor  # slots for these states


class TorchStates:
    """The `LayerStates` in torch, on any device."""

    def __init__(self, config: ModelConfig, pool: StatePool) -> None:
        self._config = config
        self._pool = pool
        self._token_steps: list[TokenStep] = []
        self._reads = torch.empty(0, dtype=torch.int64)  # [R]
        self._is_new = torch.empty(0, dtype=torch.bool)  # [R]
        self._writes = torch.empty(0, dtype=torch.int64)  # [R]

    def prepare(self, lens: IntArray, slots: StateSlots) -> None:
        """Begin a step of requests with `lens` [R] tokens each."""
        self._reads, self._is_new, self._writes = self._there(
            np.maximum(slots.reads, 0),
            slots.reads == NO_STATE,
            slots.writes,
        )
        firsts = np.cumsum(lens) - lens
        self._token_steps = []
        for token_index in range(int(lens.max())):
            rows = np.flatnonzero(lens > token_index)
            is_kept = slots.kept_lens == token_index + 1
            arrays = (rows, firsts[rows] + token_index, slots.kept_rows[is_kept])
            self._token_steps.append(TokenStep(*self._there(*arrays, slots.kept_slots[is_kept])))

    def gated_conv(self, x: Tensor, conv: ConvWeights, layer: int) -> Tensor:
        before, after, value = x.float().chunk(3, -1)
        mixed = self._convolve(before * value, conv, layer)
        return (after * mixed).to(x.dtype)

    def silu_conv(self, x: Tensor, conv: ConvWeights, layer: int) -> Tensor:
        return F.silu(self._convolve(x.float(), conv, layer)).to(x.dtype)

    def gated_delta(
        self,
        qkv: Tensor,
        gate: Tensor,
        rates: Tensor,
        weights: DeltaWeights,
        layer: int,
    ) -> Tensor:
        spec = self._config.decoder.layer(layer).state
        assert isinstance(spec, GatedDeltaSpec)
        num = len(qkv)
        key_size = spec.key_heads * spec.key_dim
        q, k, v = qkv.float().split_with_sizes((key_size, key_size, spec.out_size), -1)
        group = spec.value_heads // spec.key_heads
        q = q.view(num, spec.key_heads, -1)
        k = k.view(num, spec.key_heads, -1)
        if spec.is_tiled:
            q = q.repeat(1, group, 1)
            k = k.repeat(1, group, 1)
        else:
            q = q.repeat_interleave(group, 1)
            k = k.repeat_interleave(group, 1)
        v = v.view(num, spec.value_heads, -1)
        of_rate, of_decay = rates.float().chunk(2, -1)
        rate = of_rate.sigmoid()
        decay = delta_decay(of_decay, weights.decay_log, weights.decay_bias)
        out = torch.empty_like(v)

        def advance(state: Tensor, tokens: Tensor) -> Tensor:
            state, answer = delta_step(
                state,
                q[tokens],
                k[tokens],
                v[tokens],
                decay[tokens],
                rate[tokens],
            )
            out[tokens] = answer
            return state

        _, matrices = self._pool.of_layer[layer]
        # [slots, heads, V / lanes, K, lanes] -> [slots, heads, K, V / lanes, lanes]
        self._advance_all(matrices.transpose(2, 3), advance)
        gates = gate.float().view(out.shape)
        gated = norm_and_gate(out, gates, weights.norm, weights.eps)
        return gated.flatten(1).to(qkv.dtype)

    def scan(
        self,
        x: Tensor,
        gate: Tensor,
        steps: Tensor,
        weights: ScanWeights,
        layer: int,
    ) -> Tensor:
        spec = self._config.decoder.layer(layer).state
        assert isinstance(spec, MambaSpec)
        num = len(x)
        shared = spec.groups * spec.state_dim
        values, into, out_of = x.float().split_with_sizes((spec.out_size, shared, shared), -1)
        values = values.view(num, spec.heads, -1)
        in_group = spec.heads // spec.groups
        into = into.view(num, spec.groups, -1).repeat_interleave(in_group, 1)
        out_of = out_of.view(num, spec.groups, -1).repeat_interleave(in_group, 1)
        step = F.softplus(steps.float() + weights.step_bias)
        decay = torch.exp(-torch.exp(weights.decay_log) * step)
        out = torch.empty_like(values)

        def advance(state: Tensor, tokens: Tensor) -> Tensor:
            state, out[tokens] = scan_step(
                state,
                values[tokens],
                into[tokens],
                out_of[tokens],
                decay[tokens],
                step[tokens],
            )
            return state

        _, matrices = self._pool.of_layer[layer]
        # [slots, heads, V / lanes, N, lanes] -> [slots, heads, N, V / lanes, lanes]
        self._advance_all(matrices.transpose(2, 3), advance)
        out += weights.skip[:, None] * values
        by_group = (num, spec.groups, -1)
        out = out.reshape(by_group)
        gates = gate.float().reshape(by_group)
        if weights.norm is None:
            return (out * F.silu(gates)).flatten(1).to(x.dtype)
        norm_weight = weights.norm.view(spec.groups, -1)
        normed = _SCAN_NORMS[spec.norm](out, gates, norm_weight, weights.eps)
        return normed.flatten(1).to(x.dtype)

    def selective(
        self,
        x: Tensor,
        gate: Tensor,
        steps: Tensor,
        shared: Tensor,
        weights: SelectiveWeights,
        layer: int,
    ) -> Tensor:
        values = x.float()
        into, out_of = shared.float().chunk(2, -1)
        step = F.softplus(steps.float())
        out = torch.empty_like(values)

        def advance(state: Tensor, tokens: Tensor) -> Tensor:
            state, out[tokens] = selective_step(
                state,
                values[tokens],
                into[tokens],
                out_of[tokens],
                step[tokens],
                weights.decay_log,
            )
            return state

        _, vectors = self._pool.of_layer[layer]
        # [slots, C / lanes, N, lanes] -> [slots, N, C / lanes, lanes]
        self._advance_all(vectors.transpose(1, 2), advance)
        out += weights.skip * values
        return (out * F.silu(gate.float())).to(x.dtype)

    def lightning(
        self,
        qkv: Tensor,
        gate: Tensor,
        weights: LightningWeights,
        layer: int,
    ) -> Tensor:
        num = len(qkv)
        q, k, v = F.silu(qkv.float()).view(num, 3, len(weights.decay), -1).unbind(1)
        out = torch.empty_like(v)

        def advance(state: Tensor, tokens: Tensor) -> Tensor:
            state, out[tokens] = lightning_step(
                state,
                q[tokens],
                k[tokens],
                v[tokens],
                weights.decay,
            )
            return state

        (matrices,) = self._pool.of_layer[layer]
        # [slots, heads, V / lanes, K, lanes] -> [slots, heads, K, V / lanes, lanes]
        self._advance_all(matrices.transpose(2, 3), advance)
        normed = rms_norm(out.flatten(1), weights.norm, weights.eps)
        return (normed * torch.sigmoid(gate.float())).to(qkv.dtype)

    def _convolve(self, x: Tensor, conv: ConvWeights, layer: int) -> Tensor:
        """x [T, C] float32 -> [T, C]"""
        out = torch.empty_like(x)

        def advance(past: Tensor, tokens: Tensor) -> Tensor:
            past, out[tokens] = conv_step(past, x[tokens], conv.weight, conv.bias)
            return past

        inputs = self._pool.of_layer[layer][0]
        # [slots, C / lanes, taps - 1, lanes] -> [slots, taps - 1, C / lanes, lanes]
        self._advance_all(inputs.transpose(1, 2), advance)
        return out

    def _advance_all(self, slots: Tensor, advance: Advance) -> None:
        """Advance the states of all requests over their tokens in this step. `slots`
        [slots, .., n, lanes] is a view of the pool; `advance` gets states [A, .., n * lanes]."""
        shape = (-1, *slots.shape[1:])
        states = slots[self._reads].flatten(-2)
        states[self._is_new] = 0
        for token_step in self._token_steps:
            states[token_step.rows] = advance(states[token_step.rows], token_step.tokens)
            if len(token_step.kept_rows):
                slots[token_step.kept_slots] = states[token_step.kept_rows].view(shape)
        slots[self._writes] = states.view(shape)

    def _there(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """The arrays on the pool's device, as indexes or conditions."""
        device = self._pool.tensors[0].device
        found = []
        for array in arrays:
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            if tensor.dtype != torch.bool:
                tensor = tensor.long()
            found.append(tensor.to(device))
        return found
