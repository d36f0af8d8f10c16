"""The threshold of top-k and top-p for each row of logits, without sorting the row.

The kernels work on values x <= 0: differences between logits and the row's largest logit. A cheap
lower bound of the threshold, the *floor*, usually leaves a few hundred values:

    logits ─▶ survey ─▶ floor ─▶ collect values >= floor ─▶ threshold
             (blocks)  (rows)   (blocks)                   (rows)

The bits of a value without the sign are its *key*: the smaller the key, the larger the value. The
threshold is the smallest key such that the values with keys up to it are k values, or have the
share p of the weight e^x. Its 32 bits are found four at a time: a pass over the collected values
measures their number, or weight, up to each of 16 pivots,

    low ........ pivot 0 ........ pivot 1 ........ ... ........ pivot 15
                         first to reach the target: low and the next, finer pivots go between these

so eight passes find it exactly, whatever the logits are. The order of the collected values varies,
so weights are added up as integers. `threshold` in `ops/sampling.py` is the specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.sampling import SamplingTensors
from weft.ops.triton.launches import CUT_BLOCK, CUT_GROUP, VOCAB_BLOCK

# Pointers into one packed copy. Triton must not compile a kernel again for each alignment of them.
UNALIGNED = [
    "temperature_ptr",
    "top_k_ptr",
    "top_p_ptr",
    "min_p_ptr",
]
LAST_KEY = tl.constexpr(0x7F800000)  # of -inf
UNITS = tl.constexpr(8589934592.0)  # 2^33: weights are multiples of its inverse


def threshold(logits: Tensor, max_logits: Tensor, draws: SamplingTensors, out: Tensor) -> None:
    """Write to `out` [S] the smallest x = (logit - peak) / temperature that each row keeps; an
    arbitrary number for rows with temperature 0."""
    (num, vocab_size) = logits.shape
    device = logits.device
    num_blocks = triton.cdiv(vocab_size, VOCAB_BLOCK)
    num_groups = num_blocks * VOCAB_BLOCK // CUT_GROUP
    maxima = torch.empty(num, num_groups, device=device)
    weights = torch.empty(num, num_blocks, dtype=torch.int64, device=device)
    found = torch.empty(num, vocab_size, device=device)
    num_found = torch.zeros(num, dtype=torch.int32, device=device)
    filters = (draws.temperature, draws.top_k, draws.top_p)
    survey_kernel[(num, num_blocks)](
        logits, max_logits, *filters, maxima, weights, logits.stride(0),
        VOCAB=vocab_size, BLOCK=VOCAB_BLOCK, GROUP=CUT_GROUP, num_warps=8,
    )  # fmt: skip
    floor_kernel[(num,)](
        *filters, maxima, weights, out,
        VOCAB=vocab_size, GROUPS=num_groups, BLOCKS=num_blocks,
        BLOCKS_PAD=triton.next_power_of_2(num_blocks),
        BLOCK=CUT_BLOCK, num_warps=8,
    )  # fmt: skip
    collect_kernel[(num, num_blocks)](
        logits, max_logits, *filters, out, found, num_found, logits.stride(0),
        VOCAB=vocab_size, BLOCK=VOCAB_BLOCK, num_warps=8,
    )  # fmt: skip
    threshold_kernel[(num,)](
        *filters, draws.min_p, found, num_found, weights, out,
        VOCAB=vocab_size, BLOCKS=num_blocks, BLOCKS_PAD=triton.next_power_of_2(num_blocks),
        BLOCK=CUT_BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def survey_kernel(
    logits_ptr,
    max_logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    maxima_ptr,  # [S, BLOCKS * BLOCK / GROUP] largest value of each group of tokens
    weights_ptr,  # [S, BLOCKS]
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature, top_k, top_p = filters(temperature_ptr, top_k_ptr, top_p_ptr, row)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        x = values(logits_ptr, max_logits_ptr, row, block, stride, temperature, VOCAB, BLOCK)
        groups: tl.constexpr = BLOCK // GROUP
        maxima = tl.max(tl.reshape(x, [groups, GROUP]), 1)
        tl.store(
            maxima_ptr + (row * tl.num_programs(1) + block) * groups + tl.arange(0, groups), maxima
        )
        tl.store(weights_ptr + row * tl.num_programs(1) + block, tl.sum(weight_of(x), 0))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def floor_kernel(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    maxima_ptr,
    weights_ptr,
    out_ptr,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Top-k: k groups of tokens have a value that reaches the floor. Top-p: the values below
    e^x = (1 - p) total / VOCAB have less than 1 - p of the weight together, even if they are nearly
    all tokens."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = filters(temperature_ptr, top_k_ptr, top_p_ptr, row)
    if temperature > 0:
        floor = -float("inf")
        if top_k > 0:
            last = tl.full([], LAST_KEY, tl.uint32)
            key = reached(
                maxima_ptr + row * GROUPS, GROUPS, last, top_k.to(tl.float64), False, BLOCK
            )
            floor = -key.to(tl.float32, bitcast=True)
        elif top_p < 1:
            total = total_of(weights_ptr + row * BLOCKS, BLOCKS, BLOCKS_PAD).to(tl.float32)
            left = (1 - top_p) * total / VOCAB - 1  # rounding errors count as one unit
            if left > 0:
                floor = tl.log(left / UNITS) - 1e-3
        tl.store(out_ptr + row, floor)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def collect_kernel(
    logits_ptr,
    max_logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    floor_ptr,
    found_ptr,  # [S, VOCAB]
    num_found_ptr,  # [S], zero
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature, top_k, top_p = filters(temperature_ptr, top_k_ptr, top_p_ptr, row)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        x = values(logits_ptr, max_logits_ptr, row, block, stride, temperature, VOCAB, BLOCK)
        token = block * BLOCK + tl.arange(0, BLOCK)
        high = ((x >= tl.load(floor_ptr + row)) & (token < VOCAB)).to(tl.int32)
        num = tl.sum(high, 0)
        if num > 0:
            begin = tl.atomic_add(num_found_ptr + row, num)
            tl.store(found_ptr + row * VOCAB + begin + tl.cumsum(high, 0) - 1, x, mask=high > 0)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def threshold_kernel(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    found_ptr,
    num_found_ptr,
    weights_ptr,
    out_ptr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = filters(temperature_ptr, top_k_ptr, top_p_ptr, row)
    if temperature > 0:
        found = found_ptr + row * VOCAB
        num = tl.load(num_found_ptr + row)
        last = tl.full([], LAST_KEY, tl.uint32)
        if top_k > 0:
            last = reached(
                found,
                num,
                last,
                top_k.to(tl.float64),
                False,
                BLOCK,
            )
        if top_p < 1:
            if top_k > 0:
                everywhere = last + tl.zeros([16], tl.uint32)
                total = tl.max(measured(found, num, last, everywhere, True, BLOCK), 0)
            else:
                total = total_of(weights_ptr + row * BLOCKS, BLOCKS, BLOCKS_PAD)
            target = tl.maximum(top_p.to(tl.float64) * total.to(tl.float64), 1.0)
            last = reached(found, num, last, target, True, BLOCK)
        lowest = -float("inf")
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0:
            lowest = tl.log(min_p)
        tl.store(out_ptr + row, tl.maximum(-last.to(tl.float32, bitcast=True), lowest))


@triton.jit
def filters(temperature_ptr, top_k_ptr, top_p_ptr, row):
    return tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)


@triton.jit
def values(
    logits_ptr,
    max_logits_ptr,
    row,
    block,
    stride,
    temperature,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(
        logits_ptr + row * stride + token,
        mask=token < VOCAB,
        other=-float("inf"),
    )
    return tl.div_rn(logit - tl.load(max_logits_ptr + row), temperature)


@triton.jit
def weight_of(x):
    """e^x as an integer, so that sums of up to 2^30 weights are exact, in any order."""
    return (tl.exp(x) * UNITS + 0.5).to(tl.int64)


@triton.jit
def total_of(weights, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr):
    block = tl.arange(0, BLOCKS_PAD)
    return tl.sum(tl.load(weights + block, mask=block < BLOCKS, other=0), 0)


@triton.jit
def reached(
    x_ptr,
    num,
    last,
    target,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest key such that the values with keys up to it reach the target; `last` if no key
    does. Only values with keys up to `last` count, of the first `num`."""
    low = tl.full([], 0, tl.uint32)
    for step in range(8):
        shift = 28 - 4 * step
        pivots = low + ((tl.arange(0, 16).to(tl.uint32) + 1) << shift) - 1
        sums = measured(x_ptr, num, last, pivots, BY_WEIGHT, BLOCK)
        missed = tl.sum((sums.to(tl.float64) < target).to(tl.int32), 0).to(tl.uint32)
        low += tl.minimum(missed, 15) << shift
    return tl.minimum(low, last)


@triton.jit
def measured(
    x_ptr,
    num,
    last,
    pivots,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The number, or weight, of the values up to each pivot [16]. Only values with keys up to
    `last` count, of the first `num`."""
    sums = tl.zeros([16], tl.int64)
    for begin in range(0, num, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(
            x_ptr + at,
            mask=at < num,
            other=-float("inf"),
        )
        key = x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
        weight = tl.full([BLOCK], 1, tl.int64)
        if BY_WEIGHT:
            weight = weight_of(x)
        weight = tl.where((key <= last) & (at < num), weight, 0)
        sums += tl.sum(tl.where(key[:, None] <= pivots[None, :], weight[:, None], 0), 0)
    return sums
