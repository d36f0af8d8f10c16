"""States of requests: short convolutions, the gated delta rule, Mamba 1 and 2, and lightning
attention.
`executor/plain/states.py` is the specification in torch.

A program takes some channels or values of one request, through all its tokens of the step in order:
what a token gets does not depend on how a request is cut into steps. All kernels compute in
float32.

    step of 3 requests      request 0: t0 t1 t2    request 1: t3    request 2: t4 t5
                            program reads its state, t0, t1, t2, writes its state

States lie in the pool in blocks of `LANES` neighbouring channels or values (`config/decoder.py`):

    inputs of a convolution   [slots, C / LANES, taps - 1, LANES], the oldest first
    matrices                  [slots, heads, V / LANES, K, LANES]
    vectors of Mamba 1        [slots, C / LANES, N, LANES]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.launches import STATE_COLUMNS, STATE_TOKENS, STATE_WARPS, power_of_two


class StateStep(NamedTuple):
    """One step on the device: R requests, which keep K copies of states; every tensor int32.

    Copies of one request are adjacent and ascend by length. A request without tokens is padding.
    """

    indptr: Tensor  # [R + 1] tokens of request r are at indptr[r] : indptr[r + 1]
    reads: Tensor  # [R] slot of the state before these tokens; negative: all zeros
    writes: Tensor  # [R] slot of the state after them
    kept_indptr: Tensor  # [R + 1] copies of request r are at kept_indptr[r] : kept_indptr[r + 1]
    kept_lens: Tensor  # [K] after how many tokens of this step, from 1 on
    kept_slots: Tensor  # [K] and into which slot

    @property
    def num_requests(self) -> int:
        return len(self.reads)


def convolve(
    x: Tensor,
    states: Tensor,
    step: StateStep,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
) -> Tensor:
    """x [T, C] -> silu(conv(x)); or, if `gated`, x [T, 3 C], parts b, c and x -> c · conv(b · x).

    states [slots, C / lanes, taps - 1, lanes] are advanced; weight [taps, C] and bias [C] float32.
    Returns [T, C].
    """
    assert x.stride(1) == 1
    taps, channels = weight.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    grid = (step.num_requests, triton.cdiv(channels, STATE_COLUMNS))
    conv_kernel[grid](
        x,
        out,
        weight,
        weight if bias is None else bias,
        states,
        *step,
        x.stride(0),
        states.stride(0),
        C=channels,
        TAPS=taps,
        TAPS_PAD=triton.next_power_of_2(taps),
        LANES=states.shape[-1],
        GATED=gated,
        BIAS=bias is not None,
        TOKENS=STATE_TOKENS,
        COLUMNS=STATE_COLUMNS,
        num_warps=4,
    )
    return out


def gated_delta(
    qkv: Tensor,
    rates: Tensor,
    states: Tensor,
    step: StateStep,
    decay_log: Tensor,
    decay_bias: Tensor,
    key_heads: int,
    *,
    is_tiled: bool,
) -> Tensor:
    """The gated delta rule, as `LayerStates.gated_delta` without norm and gate.

    qkv [T, q | k | v]; rates [T, 2 heads]; states [slots, heads, V / lanes, K, lanes] are advanced;
    decay_log and decay_bias [heads] float32. `is_tiled`: value head h has key head h % key_heads,
    not one for each group of neighbours. Returns [T, heads, V] float32.
    """
    assert qkv.stride(1) == rates.stride(1) == 1
    _, heads, blocks, key_dim, lanes = states.shape
    out = torch.empty(len(qkv), heads, blocks * lanes, device=qkv.device)
    delta_kernel[(step.num_requests, heads, blocks)](
        qkv,
        rates,
        out,
        decay_log,
        decay_bias,
        states,
        *step,
        qkv.stride(0),
        rates.stride(0),
        states.stride(0),
        KEY_HEADS=key_heads,
        HEADS=heads,
        BLOCKS=blocks,
        K=key_dim,
        K_PAD=power_of_two(key_dim),
        LANES=lanes,
        TILED=is_tiled,
        num_warps=STATE_WARPS,
    )
    return out


def scan(
    x: Tensor,
    steps: Tensor,
    states: Tensor,
    step: StateStep,
    decay_log: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    groups: int,
) -> Tensor:
    """Mamba 2, as `LayerStates.scan` without norm and gate.

    x [T, x | b | c]; steps [T, heads]; states [slots, heads, V / lanes, N, lanes] are advanced;
    decay_log, step_bias and skip [heads] float32. Returns [T, heads, V] float32.
    """
    assert x.stride(1) == steps.stride(1) == 1
    _, heads, blocks, state_dim, lanes = states.shape
    out = torch.empty(len(x), heads, blocks * lanes, device=x.device)
    scan_kernel[(step.num_requests, heads, blocks)](
        x,
        steps,
        out,
        decay_log,
        step_bias,
        skip,
        states,
        *step,
        x.stride(0),
        steps.stride(0),
        states.stride(0),
        GROUPS=groups,
        HEADS=heads,
        BLOCKS=blocks,
        N=state_dim,
        N_PAD=power_of_two(state_dim),
        LANES=lanes,
        num_warps=STATE_WARPS,
    )
    return out


def selective(
    x: Tensor,
    gate: Tensor,
    steps: Tensor,
    shared: Tensor,
    states: Tensor,
    step: StateStep,
    decay_log: Tensor,
    skip: Tensor,
) -> Tensor:
    """Mamba 1, as `LayerStates.selective`.

    x, gate and steps [T, C]; shared [T, b | c]; states [slots, C / lanes, N, lanes] are advanced;
    decay_log [N, C] and skip [C] float32. Returns [T, C].
    """
    assert x.stride(1) == gate.stride(1) == steps.stride(1) == shared.stride(1) == 1
    state_dim, channels = decay_log.shape
    _, blocks, _, lanes = states.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    selective_kernel[(step.num_requests, blocks)](
        x,
        gate,
        steps,
        shared,
        out,
        decay_log,
        skip,
        states,
        *step,
        x.stride(0),
        gate.stride(0),
        steps.stride(0),
        shared.stride(0),
        states.stride(0),
        C=channels,
        N=state_dim,
        N_PAD=power_of_two(state_dim),
        LANES=lanes,
        num_warps=STATE_WARPS,
    )
    return out


def lightning(qkv: Tensor, states: Tensor, step: StateStep, decay: Tensor) -> Tensor:
    """Lightning attention, as `LayerStates.lightning` without norm and gate.

    qkv [T, q | k | v]; states [slots, heads, V / lanes, K, lanes] are advanced; decay [heads]
    float32. Returns [T, heads, V] float32.
    """
    assert qkv.stride(1) == 1
    _, heads, blocks, head_dim, lanes = states.shape
    out = torch.empty(len(qkv), heads, blocks * lanes, device=qkv.device)
    lightning_kernel[(step.num_requests, heads, blocks)](
        qkv,
        out,
        decay,
        states,
        *step,
        qkv.stride(0),
        states.stride(0),
        HEADS=heads,
        BLOCKS=blocks,
        K=head_dim,
        K_PAD=power_of_two(head_dim),
        LANES=lanes,
        num_warps=STATE_WARPS,
    )
    return out


def norm_and_gate(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    gates_first: bool,
    by_sigmoid: bool = False,
) -> Tensor:
    """Of each part of a row: x / rms(x) · weight · silu(gate); or, if `gates_first`, y / rms(y) ·
    weight with y = x · silu(gate). Without a weight there is no norm. `by_sigmoid`: sigmoid(gate)
    in place of silu(gate).

    x [T, parts, size] float32; gate [T, parts * size]; weight float32, [size] for all parts or
    [parts * size]. Returns [T, parts * size] in the type of `gate`.
    """
    assert gate.stride(1) == 1
    num, parts, size = x.shape
    out = torch.empty(num, parts * size, dtype=gate.dtype, device=x.device)
    norm_and_gate_kernel[(num, parts)](
        x,
        gate,
        x if weight is None else weight,
        out,
        gate.stride(0),
        eps,
        PARTS=parts,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        SHARED=weight is not None and len(weight) == size,
        NORMED=weight is not None,
        GATES_FIRST=gates_first,
        BY_SIGMOID=by_sigmoid,
        num_warps=1 if size <= 256 else 4,
    )
    return out


@triton.jit
def softplus(x):
    # A sum with 1 would lose small values of the exponential.
    exact = tl.log(1 + tl.exp(tl.minimum(x, 20.0)))
    return tl.where(x > 20, x, tl.where(x < -12, tl.exp(x), exact))


@triton.jit
def conv_inputs(
    x_ptr,
    old_ptr,
    read,
    index,
    num,
    x_stride,
    column,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    LANES: tl.constexpr,
    GATED: tl.constexpr,
):
    """What tokens `index` [N] of a request give to the convolution, [N, COLUMNS]: those before its
    first token are in the state."""
    is_column = (column < C)[None, :]
    is_here = ((index >= 0) & (index < num))[:, None] & is_column
    at = x_ptr + index.to(tl.int64)[:, None] * x_stride + column[None, :]
    if GATED:
        value = tl.load(at + 2 * C, mask=is_here, other=0.0).to(tl.float32)
        value *= tl.load(at, mask=is_here, other=0.0).to(tl.float32)
    else:
        value = tl.load(at, mask=is_here, other=0.0).to(tl.float32)
    block = column // LANES * ((TAPS - 1) * LANES) + column % LANES
    is_old = ((index < 0) & (index >= 1 - TAPS))[:, None] & is_column
    tap = index + (TAPS - 1)
    old = tl.load(old_ptr + tap[:, None] * LANES + block[None, :], mask=is_old, other=0.0)
    return value + tl.where(read >= 0, old, 0.0)


@triton.jit(do_not_specialize=["x_stride"])
def conv_kernel(
    x_ptr,
    out_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    indptr_ptr,
    reads_ptr,
    writes_ptr,
    kept_indptr_ptr,
    kept_lens_ptr,
    kept_slots_ptr,
    x_stride,
    state_stride,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_PAD: tl.constexpr,
    LANES: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < C
    begin = tl.load(indptr_ptr + request)
    num = tl.load(indptr_ptr + request + 1) - begin
    read = tl.load(reads_ptr + request)
    old_ptr = states_ptr + tl.maximum(read, 0).to(tl.int64) * state_stride
    x_ptr += begin.to(tl.int64) * x_stride
    out_ptr += begin.to(tl.int64) * C
    for first in range(0, num, TOKENS):
        token = first + tl.arange(0, TOKENS)
        sums = tl.zeros((TOKENS, COLUMNS), tl.float32)
        for tap in tl.static_range(TAPS):
            seen = conv_inputs(
                x_ptr,
                old_ptr,
                read,
                token - (TAPS - 1 - tap),
                num,
                x_stride,
                column,
                C,
                TAPS,
                LANES,
                GATED,
            )
            sums += seen * tl.load(weight_ptr + tap * C + column, mask=is_column, other=0.0)
        if BIAS:
            sums += tl.load(bias_ptr + column, mask=is_column, other=0.0)
        is_there = (token < num)[:, None] & is_column[None, :]
        if GATED:
            at = x_ptr + token.to(tl.int64)[:, None] * x_stride + (C + column)[None, :]
            sums *= tl.load(at, mask=is_there, other=0.0).to(tl.float32)
        else:
            sums *= tl.sigmoid(sums)
        out = sums.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token.to(tl.int64)[:, None] * C + column[None, :], out, mask=is_there)
    if num > 0:
        tap = tl.arange(0, TAPS_PAD)
        block = column // LANES * ((TAPS - 1) * LANES) + column % LANES
        offset = tap[:, None] * LANES + block[None, :]
        is_kept = (tap < TAPS - 1)[:, None] & is_column[None, :]
        for i in range(tl.load(kept_indptr_ptr + request), tl.load(kept_indptr_ptr + request + 1)):
            length = tl.load(kept_lens_ptr + i)
            slot = tl.load(kept_slots_ptr + i).to(tl.int64)
            kept = conv_inputs(
                x_ptr,
                old_ptr,
                read,
                length - (TAPS - 1) + tap,
                length,
                x_stride,
                column,
                C,
                TAPS,
                LANES,
                GATED,
            )
            tl.store(states_ptr + slot * state_stride + offset, kept, mask=is_kept)
        write = tl.load(writes_ptr + request).to(tl.int64)
        last = conv_inputs(
            x_ptr,
            old_ptr,
            read,
            num - (TAPS - 1) + tap,
            num,
            x_stride,
            column,
            C,
            TAPS,
            LANES,
            GATED,
        )
        # The slot may be that of the old state, of which other threads still want values.
        tl.debug_barrier()
        tl.store(states_ptr + write * state_stride + offset, last, mask=is_kept)


@triton.jit
def read_matrix(states_ptr, slot, offset, is_inside, state_stride):
    """The values at `offset` of the state in a slot; zeros if the slot is negative."""
    state_ptr = states_ptr + tl.maximum(slot, 0).to(tl.int64) * state_stride
    return tl.where(slot >= 0, tl.load(state_ptr + offset, mask=is_inside, other=0.0), 0.0)


@triton.jit
def write_matrix(states_ptr, slots_ptr, index, matrix, offset, is_inside, state_stride):
    """Write the values at `offset` of the state in the slot `index` of an array."""
    slot = tl.load(slots_ptr + index).to(tl.int64)
    tl.store(states_ptr + slot * state_stride + offset, matrix, mask=is_inside)


@triton.jit(do_not_specialize=["qkv_stride", "rates_stride"])
def delta_kernel(
    qkv_ptr,
    rates_ptr,
    out_ptr,
    decay_log_ptr,
    decay_bias_ptr,
    states_ptr,
    indptr_ptr,
    reads_ptr,
    writes_ptr,
    kept_indptr_ptr,
    kept_lens_ptr,
    kept_slots_ptr,
    qkv_stride,
    rates_stride,
    state_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    LANES: tl.constexpr,
    TILED: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    block = tl.program_id(2)
    key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
    begin = tl.load(indptr_ptr + request)
    num = tl.load(indptr_ptr + request + 1) - begin
    dim = tl.arange(0, K_PAD)
    is_dim = dim < K
    lane = tl.arange(0, LANES)
    offset = (head * BLOCKS + block) * (K * LANES) + dim[:, None] * LANES + lane[None, :]
    is_inside = (dim < K)[:, None] & (lane < LANES)[None, :]
    read = tl.load(reads_ptr + request)
    state = read_matrix(states_ptr, read, offset, is_inside, state_stride)
    decay_rate = tl.exp(tl.load(decay_log_ptr + head))
    decay_bias = tl.load(decay_bias_ptr + head)
    kept = tl.load(kept_indptr_ptr + request)
    kept_end = tl.load(kept_indptr_ptr + request + 1)
    next_kept = tl.load(kept_lens_ptr + kept, mask=kept < kept_end, other=-1)
    qkv_ptr += begin.to(tl.int64) * qkv_stride
    rates_ptr += begin.to(tl.int64) * rates_stride
    out_ptr += (begin.to(tl.int64) * HEADS + head) * (BLOCKS * LANES) + block * LANES
    for token in range(num):
        q = tl.load(qkv_ptr + key_head * K + dim, mask=is_dim, other=0.0).to(tl.float32)
        key = tl.load(qkv_ptr + (KEY_HEADS + key_head) * K + dim, mask=is_dim, other=0.0)
        key = key.to(tl.float32)
        value_ptr = qkv_ptr + 2 * KEY_HEADS * K + (head * BLOCKS + block) * LANES
        value = tl.load(value_ptr + lane).to(tl.float32)
        rate = tl.sigmoid(tl.load(rates_ptr + head).to(tl.float32))
        of_decay = tl.load(rates_ptr + HEADS + head).to(tl.float32)
        decay = tl.exp(-decay_rate * softplus(of_decay + decay_bias))
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (1 / tl.sqrt(1.0 * K))
        state *= decay
        change = rate * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * change[None, :]
        tl.store(out_ptr + lane, tl.sum(state * q[:, None], 0))
        if token + 1 == next_kept:
            write_matrix(states_ptr, kept_slots_ptr, kept, state, offset, is_inside, state_stride)
            kept += 1
            next_kept = tl.load(kept_lens_ptr + kept, mask=kept < kept_end, other=-1)
        qkv_ptr += qkv_stride
        rates_ptr += rates_stride
        out_ptr += HEADS * BLOCKS * LANES
    if num > 0:
        write_matrix(states_ptr, writes_ptr, request, state, offset, is_inside, state_stride)


@triton.jit(do_not_specialize=["x_stride", "steps_stride"])
def scan_kernel(
    x_ptr,
    steps_ptr,
    out_ptr,
    decay_log_ptr,
    step_bias_ptr,
    skip_ptr,
    states_ptr,
    indptr_ptr,
    reads_ptr,
    writes_ptr,
    kept_indptr_ptr,
    kept_lens_ptr,
    kept_slots_ptr,
    x_stride,
    steps_stride,
    state_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    block = tl.program_id(2)
    group = head // (HEADS // GROUPS)
    begin = tl.load(indptr_ptr + request)
    num = tl.load(indptr_ptr + request + 1) - begin
    dim = tl.arange(0, N_PAD)
    is_dim = dim < N
    lane = tl.arange(0, LANES)
    offset = (head * BLOCKS + block) * (N * LANES) + dim[:, None] * LANES + lane[None, :]
    is_inside = (dim < N)[:, None] & (lane < LANES)[None, :]
    read = tl.load(reads_ptr + request)
    state = read_matrix(states_ptr, read, offset, is_inside, state_stride)
    decay_rate = tl.exp(tl.load(decay_log_ptr + head))
    step_bias = tl.load(step_bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    kept = tl.load(kept_indptr_ptr + request)
    kept_end = tl.load(kept_indptr_ptr + request + 1)
    next_kept = tl.load(kept_lens_ptr + kept, mask=kept < kept_end, other=-1)
    x_ptr += begin.to(tl.int64) * x_stride
    steps_ptr += begin.to(tl.int64) * steps_stride
    out_ptr += (begin.to(tl.int64) * HEADS + head) * (BLOCKS * LANES) + block * LANES
    for token in range(num):
        value = tl.load(x_ptr + (head * BLOCKS + block) * LANES + lane).to(tl.float32)
        shared_ptr = x_ptr + HEADS * BLOCKS * LANES + group * N + dim
        into = tl.load(shared_ptr, mask=is_dim, other=0.0).to(tl.float32)
        out_of = tl.load(shared_ptr + GROUPS * N, mask=is_dim, other=0.0).to(tl.float32)
        step = softplus(tl.load(steps_ptr + head).to(tl.float32) + step_bias)
        state = state * tl.exp(-decay_rate * step) + into[:, None] * (step * value)[None, :]
        tl.store(out_ptr + lane, tl.sum(state * out_of[:, None], 0) + skip * value)
        if token + 1 == next_kept:
            write_matrix(states_ptr, kept_slots_ptr, kept, state, offset, is_inside, state_stride)
            kept += 1
            next_kept = tl.load(kept_lens_ptr + kept, mask=kept < kept_end, other=-1)
        x_ptr += x_stride
        steps_ptr += steps_stride
        out_ptr += HEADS * BLOCKS * LANES
    if num > 0:
        write_matrix(states_ptr, writes_ptr, request, state, offset, is_inside, state_stride)


@triton.jit(do_not_specialize=["x_stride", "gate_stride", "steps_stride", "shared_stride"])
def selective_kernel(
    x_ptr,
    gate_ptr,
    steps_ptr,
    shared_ptr,
    out_ptr,
    decay_log_ptr,
    skip_ptr,
    states_ptr,
    indptr_ptr,
    reads_ptr,
    writes_ptr,
    kept_indptr_ptr,
    kept_lens_ptr,
    kept_slots_ptr,
    x_stride,
    gate_stride,
    steps_stride,
    shared_stride,
    state_stride,
    C: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    block = tl.program_id(1)
    begin = tl.load(indptr_ptr + request)
    num = tl.load(indptr_ptr + request + 1) - begin
    dim = tl.arange(0, N_PAD)
    is_dim = dim < N
    lane = tl.arange(0, LANES)
    channel = block * LANES + lane
    offset = block * (N * LANES) + dim[:, None] * LANES + lane[None, :]
    is_inside = (dim < N)[:, None] & (lane < LANES)[None, :]
    read = tl.load(reads_ptr + request)
    state = read_matrix(states_ptr, read, offset, is_inside, state_stride)
    at_decay = dim[:, None] * C + channel[None, :]
    rate = tl.exp(tl.load(decay_log_ptr + at_decay, mask=is_inside, other=0.0))
    skip = tl.load(skip_ptr + channel)
    kept = tl.load(kept_indptr_ptr + request)
    kept_end = tl.load(kept_indptr_ptr + request + 1)
    next_kept = tl.load(kept_lens_ptr + kept, mask=kept < kept_end, other=-1)
    x_ptr += begin.to(tl.int64) * x_stride
    gate_ptr += begin.to(tl.int64) * gate_stride
    steps_ptr += begin.to(tl.int64) * steps_stride
    shared_ptr += begin.to(tl.int64) * shared_stride
    out_ptr += begin.to(tl.int64) * C
    for token in range(num):
        value = tl.load(x_ptr + channel).to(tl.float32)
        gate = tl.load(gate_ptr + channel).to(tl.float32)
        step = softplus(tl.load(steps_ptr + channel).to(tl.float32))
        into = tl.load(shared_ptr + dim, mask=is_dim, other=0.0).to(tl.float32)
        out_of = tl.load(shared_ptr + N + dim, mask=is_dim, other=0.0).to(tl.float32)
        decay = tl.exp(-rate * step[None, :])
        state = state * decay + into[:, None] * (step * value)[None, :]
        y = tl.sum(state * out_of[:, None], 0) + skip * value
        y *= gate * tl.sigmoid(gate)
        tl.store(out_ptr + channel, y.to(out_ptr.dtype.element_ty))
        if token + 1 == next_kept:
            write_matrix(states_ptr, kept_slots_ptr, kept, state, offset, is_inside, state_stride)
            kept += 1
            next_kept = tl.load(kept_lens_ptr + kept, mask=kept < kept_end, other=-1)
        x_ptr += x_stride
        gate_ptr += gate_stride
        steps_ptr += steps_stride
        shared_ptr += shared_stride
        out_ptr += C
    if num > 0:
        write_matrix(states_ptr, writes_ptr, request, state, offset, is_inside, state_stride)


@triton.jit(do_not_specialize=["qkv_stride"])
def lightning_kernel(
    qkv_ptr,
    out_ptr,
    decay_ptr,
    states_ptr,
    indptr_ptr,
    reads_ptr,
    writes_ptr,
    kept_indptr_ptr,
    kept_lens_ptr,
    kept_slots_ptr,
    qkv_stride,
    state_stride,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    block = tl.program_id(2)
    begin = tl.load(indptr_ptr + request)
    num = tl.load(indptr_ptr + request + 1) - begin
    dim = tl.arange(0, K_PAD)
    is_dim = dim < K
    lane = tl.arange(0, LANES)
    offset = (head * BLOCKS + block) * (K * LANES) + dim[:, None] * LANES + lane[None, :]
    is_inside = (dim < K)[:, None] & (lane < LANES)[None, :]
    read = tl.load(reads_ptr + request)
    state = read_matrix(states_ptr, read, offset, is_inside, state_stride)
    decay = tl.load(decay_ptr + head)
    kept = tl.load(kept_indptr_ptr + request)
    kept_end = tl.load(kept_indptr_ptr + request + 1)
    next_kept = tl.load(kept_lens_ptr + kept, mask=kept < kept_end, other=-1)
    qkv_ptr += begin.to(tl.int64) * qkv_stride + head * K
    out_ptr += (begin.to(tl.int64) * HEADS + head) * (BLOCKS * LANES) + block * LANES
    for token in range(num):
        q = tl.load(qkv_ptr + dim, mask=is_dim, other=0.0).to(tl.float32)
        key = tl.load(qkv_ptr + HEADS * K + dim, mask=is_dim, other=0.0).to(tl.float32)
        value = tl.load(qkv_ptr + 2 * HEADS * K + block * LANES + lane).to(tl.float32)
        q *= tl.sigmoid(q)
        key *= tl.sigmoid(key)
        value *= tl.sigmoid(value)
        state = state * decay + key[:, None] * value[None, :]
        tl.store(out_ptr + lane, tl.sum(state * q[:, None], 0))
        if token + 1 == next_kept:
            write_matrix(states_ptr, kept_slots_ptr, kept, state, offset, is_inside, state_stride)
            kept += 1
            next_kept = tl.load(kept_lens_ptr + kept, mask=kept < kept_end, other=-1)
        qkv_ptr += qkv_stride
        out_ptr += HEADS * BLOCKS * LANES
    if num > 0:
        write_matrix(states_ptr, writes_ptr, request, state, offset, is_inside, state_stride)


@triton.jit(do_not_specialize=["gate_stride"])
def norm_and_gate_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    gate_stride,
    eps,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    NORMED: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BY_SIGMOID: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    at = part * SIZE + column
    x = tl.load(x_ptr + row * (PARTS * SIZE) + at, mask=is_column, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=is_column, other=0.0).to(tl.float32)
    if BY_SIGMOID:
        gate = tl.sigmoid(gate)
    else:
        gate *= tl.sigmoid(gate)
    if GATES_FIRST:
        x *= gate
    if NORMED:
        weight = tl.load(weight_ptr + (column if SHARED else at), mask=is_column, other=0.0)
        x *= (1 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)) * weight
    if not GATES_FIRST:
        x *= gate
    out = x.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * (PARTS * SIZE) + at, out, mask=is_column)
