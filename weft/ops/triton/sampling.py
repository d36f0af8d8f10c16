"""Choosing tokens on a GPU: kernels for `SamplerOps` (ops/sampling.py, whose `TorchSamplerOps` is
the specification).

Rows are divided into blocks, one program each, so that few rows keep a whole GPU busy, and one
program per row combines the blocks. The noise depends only on seed, position and token id, so the
blocks do not affect the drawn token:

    logits ─▶ best of each block ─▶ peak, greedy token ─▶ (threshold)
           ─▶ best of each block with noise ─▶ token

The host waits for no value. It decides by its own arrays which kernels it launches: whether all
rows are greedy, and whether a row has top-k, top-p or min-p.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.sampling import (
    SampledTokens,
    SamplingArrays,
    TokenHistory,
    TopLogprobTensors,
    cuts_any,
    on,
    sampling_tensors,
)
from weft.ops.triton.cut import threshold
from weft.ops.triton.launches import VOCAB_BLOCK
from weft.ops.triton.noise import gumbel


class TritonSamplerOps:
    """`SamplerOps` with Triton kernels."""

    def tokens(self, logits: Tensor, draws: SamplingArrays) -> SampledTokens:
        chosen, scores, ids = _best(logits)
        if not draws.temperature.any():
            return chosen
        device = sampling_tensors(logits.device, draws)
        num, vocab_size = logits.shape
        cut = cuts_any(draws)
        bounds = torch.empty(num, device=logits.device)
        if cut:
            threshold(logits, chosen.max_logits, device, bounds)
        num_blocks = scores.shape[1]
        draw_kernel[(num, num_blocks)](
            logits, chosen.max_logits, device.temperature, device.keys, bounds, scores, ids,
            logits.stride(0),
            VOCAB=vocab_size, BLOCK=VOCAB_BLOCK, CUT=cut, num_warps=8,
        )  # fmt: skip
        best_of_row_kernel[(num,)](
            scores, ids, device.temperature, chosen.tokens, chosen.max_logits,
            BLOCKS=num_blocks, BLOCKS_PAD=triton.next_power_of_2(num_blocks), DRAWN=True,
            num_warps=1,
        )  # fmt: skip
        return chosen

    def mask(self, logits: Tensor, masks: Tensor, rows: Tensor) -> None:
        num, num_words = masks.shape
        assert masks.is_contiguous()
        mask_kernel[(num, triton.cdiv(logits.shape[1], VOCAB_BLOCK))](
            logits,
            masks,
            rows,
            logits.stride(0),
            num_words,
            VOCAB=logits.shape[1],
            BLOCK=VOCAB_BLOCK,
            num_warps=8,
        )

    def penalise(self, logits: Tensor, seen: TokenHistory, last_tokens: Tensor) -> None:
        """`SamplerOps.penalise` in torch, without `unique`, because the host would have to wait for
        the size of its result. Equal tokens are sorted into runs, and every element of a run writes
        the same logit."""
        vocab_size = logits.shape[1]
        lens = np.diff(seen.offsets)
        owner = np.repeat(np.arange(len(lens)), lens)
        in_output = np.arange(len(seen.history)) >= seen.output_starts[owner]
        rows = on(logits, seen.index)
        lacking = on(logits, np.flatnonzero(seen.lacks_last))
        keys = torch.cat(
            (
                on(logits, owner * vocab_size + seen.history),
                lacking * vocab_size + last_tokens[rows[lacking]],
            )
        )
        weights = torch.cat(
            (on(logits, in_output), torch.ones_like(lacking, dtype=torch.bool))
        ).double()
        keys, order = keys.sort()
        run = torch.ones_like(keys)
        run[1:] = keys[1:] != keys[:-1]
        run = run.cumsum(0) - 1
        counts = torch.zeros_like(weights).index_add_(0, run, weights[order])[run]
        owner_of = keys // vocab_size
        token = keys % vocab_size
        index = (rows[owner_of], token)
        score = logits[index].double()
        repetition = on(logits, seen.repetition)[owner_of].double()
        score = torch.where(score > 0, score / repetition, score * repetition)
        score -= counts * on(logits, seen.frequency)[owner_of].double()
        score -= (counts > 0) * on(logits, seen.presence)[owner_of].double()
        logits[index] = score.float()

    def logprobs(
        self, logits: Tensor, chosen: SampledTokens, rows: Tensor, num_top: int
    ) -> TopLogprobTensors:
        num = len(rows)
        found = torch.empty(num, device=logits.device)
        norm = torch.empty(num, device=logits.device)
        logprob_kernel[(num,)](
            logits, chosen.tokens, chosen.max_logits, rows, found, norm, logits.stride(0),
            VOCAB=logits.shape[1], BLOCK=VOCAB_BLOCK, num_warps=8,
        )  # fmt: skip
        if not num_top:
            return TopLogprobTensors(
                found, rows.new_empty(num, 0, dtype=torch.int32), found.new_empty(num, 0)
            )
        top = logits[rows].topk(num_top, dim=-1)
        return TopLogprobTensors(found, top.indices.int(), top.values - norm[:, None])


def _best(logits: Tensor) -> tuple[SampledTokens, Tensor, Tensor]:
    """The peak and the greedy token (the first of equal ones) of each row; and memory for scores
    and tokens of blocks, [S, blocks]."""
    num, vocab_size = logits.shape
    assert logits.stride(1) == 1, "a row of logits is in one piece"
    num_blocks = triton.cdiv(vocab_size, VOCAB_BLOCK)
    scores = torch.empty(num, num_blocks, device=logits.device)
    ids = torch.empty(num, num_blocks, dtype=torch.int32, device=logits.device)
    chosen = SampledTokens(
        torch.empty(num, dtype=torch.int64, device=logits.device),
        torch.empty(num, device=logits.device),
    )
    best_of_block_kernel[(num, num_blocks)](
        logits, scores, ids, logits.stride(0), VOCAB=vocab_size, BLOCK=VOCAB_BLOCK, num_warps=8
    )
    best_of_row_kernel[(num,)](
        scores, ids, ids, chosen.tokens, chosen.max_logits,
        BLOCKS=num_blocks, BLOCKS_PAD=triton.next_power_of_2(num_blocks), DRAWN=False, num_warps=1,
    )  # fmt: skip
    return chosen, scores, ids


@triton.jit
def peak_of(x):
    """The largest of [n]; NaN if a value is NaN."""
    strange = tl.max((x != x).to(tl.int32), 0)
    return tl.where(strange > 0, float("nan"), tl.max(tl.where(x != x, -float("inf"), x), 0))


@triton.jit
def best_of_block_kernel(
    logits_ptr, scores_ptr, ids_ptr, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        logits_ptr + row * stride + token,
        mask=token < VOCAB,
        other=-float("inf"),
    )
    offset = row * tl.num_programs(1) + block
    tl.store(scores_ptr + offset, peak_of(x))
    tl.store(ids_ptr + offset, block * BLOCK + tl.argmax(x, 0))


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr"])
def best_of_row_kernel(
    scores_ptr,
    ids_ptr,
    temperature_ptr,
    tokens_ptr,
    max_logits_ptr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    DRAWN: tl.constexpr,
):
    """The best token of each row, from its blocks. DRAWN: rows with temperature 0 keep their token,
    and all rows keep their peak."""
    row = tl.program_id(0)
    wanted = True
    if DRAWN:
        wanted = tl.load(temperature_ptr + row) > 0
    if wanted:
        block = tl.arange(0, BLOCKS_PAD)
        offset = row.to(tl.int64) * BLOCKS
        scores = tl.load(
            scores_ptr + offset + block,
            mask=block < BLOCKS,
            other=-float("inf"),
        )
        best = tl.argmax(scores, 0)  # the first of equal blocks, which has the smaller token ids
        tl.store(tokens_ptr + row, tl.load(ids_ptr + offset + best).to(tl.int64))
        if not DRAWN:
            tl.store(max_logits_ptr + row, peak_of(scores))


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "keys_ptr"])
def draw_kernel(
    logits_ptr,
    max_logits_ptr,
    temperature_ptr,
    keys_ptr,
    bounds_ptr,
    scores_ptr,
    ids_ptr,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        key = tl.load(keys_ptr + 2 * row)
        other_key = tl.load(keys_ptr + 2 * row + 1)
        token = block * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(
            logits_ptr + row.to(tl.int64) * stride + token, mask=token < VOCAB, other=-float("inf")
        )
        x = tl.div_rn(logit - tl.load(max_logits_ptr + row), temperature)
        score = x + gumbel(token, key, other_key)
        if CUT:
            score = tl.where(x >= tl.load(bounds_ptr + row), score, -float("inf"))
        offset = row.to(tl.int64) * tl.num_programs(1) + block
        tl.store(scores_ptr + offset, tl.max(score, 0))
        tl.store(ids_ptr + offset, block * BLOCK + tl.argmax(score, 0))


@triton.jit(do_not_specialize=["num_words"])
def mask_kernel(
    logits_ptr, masks_ptr, rows_ptr, stride, num_words, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(
        masks_ptr + index * num_words + token // 32, mask=token // 32 < num_words, other=0
    )
    forbidden = ((word >> (token % 32)) & 1) == 0
    at = logits_ptr + row * stride + token
    tl.store(at, tl.full([BLOCK], -float("inf"), tl.float32), mask=forbidden & (token < VOCAB))


@triton.jit
def logprob_kernel(
    logits_ptr,
    tokens_ptr,
    max_logits_ptr,
    rows_ptr,
    out_ptr,
    norm_ptr,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The logarithm of the sum of e^logit, and the log probability of the chosen token: its logit
    minus that logarithm."""
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    peak = tl.load(max_logits_ptr + row)
    mass = 0.0
    for begin in range(0, VOCAB, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = tl.load(
            logits_ptr + row * stride + token,
            mask=token < VOCAB,
            other=-float("inf"),
        )
        mass += tl.sum(tl.exp(x - peak), 0)
    norm = peak + tl.log(mass)
    chosen = tl.load(logits_ptr + row * stride + tl.load(tokens_ptr + row))
    tl.store(out_ptr + index, chosen - norm)
    tl.store(norm_ptr + index, norm)
