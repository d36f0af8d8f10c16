"""Choosing tokens: the interface (`SamplerOps`), and its specification in torch, on any device.

The order is: temperature · top-k · top-p of what top-k left, renormalised · min-p · a draw. Top-k,
top-p and min-p each keep the tokens above some logit, so together they are one threshold per row;
tokens of equal logit are kept or dropped together. The draw takes the maximum of logit + Gumbel
noise, and the noise depends on seed, position and token id alone (`noise.py`): no row depends on
another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.arrays import FloatArray, IntArray
from weft.ops.noise import gumbel, row_keys

# Logits of the rows that are sampled together, so that they stay in the processor's cache between
# operations.
BLOCK_SIZE = 1 << 19
# Tokens that top-p sorts first. If their mass is too small, it sorts eight times as many.
FIRST_CANDIDATES = 128


class SamplingArrays(Protocol):
    """The sampling parameters of S rows."""

    @property
    def temperature(self) -> FloatArray: ...  # [S], 0: greedy
    @property
    def top_k(self) -> IntArray: ...  # [S], 0: off
    @property
    def top_p(self) -> FloatArray: ...  # [S], 1: off
    @property
    def min_p(self) -> FloatArray: ...  # [S], 0: off
    @property
    def seeds(self) -> NDArray[np.int64]: ...  # [S]
    @property
    def positions(self) -> IntArray: ...  # [S]


class SamplingTensors(NamedTuple):
    """`SamplingArrays` on the device."""

    temperature: Tensor  # [S] float32
    top_k: Tensor  # [S] int32
    top_p: Tensor  # [S] float32
    min_p: Tensor  # [S] float32
    keys: Tensor  # [S, 2] int32, `row_keys` of seeds and positions


@dataclass(frozen=True, slots=True)
class UploadedSampling:
    """`SamplingArrays` twice: on the host, to decide which kernels are launched, and on the device,
    for the kernels."""

    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    seeds: NDArray[np.int64]
    positions: IntArray
    device: SamplingTensors


def cuts_any(draws: SamplingArrays) -> bool:
    """Whether top-k, top-p or min-p of some row may leave tokens out."""
    return bool((draws.top_k > 0).any() or (draws.top_p < 1).any() or (draws.min_p > 0).any())


def sampling_tensors(device: torch.device, draws: SamplingArrays) -> SamplingTensors:
    """`draws` on the device. Copies them unless they are there already."""
    if isinstance(draws, UploadedSampling):
        return draws.device
    keys = row_keys(draws.seeds, draws.positions)
    columns = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, keys)
    return SamplingTensors(*(moved(column, device) for column in columns))


class TokenHistory(Protocol):
    """The prompt and output of P rows, and the penalties of their tokens.

    `history` concatenates the prompt and output of each row. Row `index[i]` has
    `history[offsets[i] : offsets[i + 1]]`, and its output begins at `output_starts[i]` (an index
    into `history`). If `lacks_last[i]`, `history` lacks the last token of the row's output.
    """

    @property
    def index(self) -> IntArray: ...  # [P] rows
    @property
    def frequency(self) -> FloatArray: ...  # [P] 0: off
    @property
    def presence(self) -> FloatArray: ...  # [P] 0: off
    @property
    def repetition(self) -> FloatArray: ...  # [P] 1: off
    @property
    def history(self) -> IntArray: ...  # [H]
    @property
    def offsets(self) -> IntArray: ...  # [P + 1]
    @property
    def output_starts(self) -> IntArray: ...  # [P]
    @property
    def lacks_last(self) -> NDArray[np.bool_]: ...  # [P]


class SampledTokens(NamedTuple):
    tokens: Tensor  # [S] int64
    max_logits: Tensor  # [S] the largest logit of each row; NaN if one is


class TopLogprobTensors(NamedTuple):
    """Log probabilities (natural), before temperature, of L rows."""

    logprob: Tensor  # [L] of the chosen token
    top_ids: Tensor  # [L, K] int32
    top_logprobs: Tensor  # [L, K], in falling order


class SamplerOps(Protocol):
    """Logits are float32 [S, V]; every row is contiguous."""

    def tokens(self, logits: Tensor, draws: SamplingArrays) -> SampledTokens:
        """One token per row; an arbitrary one if the row's largest logit is not finite. Does not
        change the logits."""
        ...

    def mask(
        self,
        logits: Tensor,
        masks: Tensor,
        rows: Tensor,
    ) -> None:
        """Set the logits of tokens whose bit is 0 to -inf: token t of row `rows[i]` has bit t % 32
        of masks[i, t // 32].

        masks [M, W] int32, rows [M] int64. Tokens from 32 * W on have no bit and are forbidden.
        """
        ...

    def penalise(
        self,
        logits: Tensor,
        seen: TokenHistory,
        last_tokens: Tensor,
    ) -> None:
        """Lower the logits of tokens that occurred before. Repetition divides positive logits and
        multiplies negative ones, for tokens of prompt and output; frequency is subtracted once per
        occurrence in the output; presence is subtracted once if the token occurs there.

        Each logit is computed in float64 and rounded once. `last_tokens` [S] (int64) is the last
        token of each row. Sources: CTRL, arXiv:1909.05858, section 4.1; the OpenAI API reference.
        """
        ...

    def logprobs(
        self, logits: Tensor, chosen: SampledTokens, rows: Tensor, num_top: int
    ) -> TopLogprobTensors:
        """Log probabilities of the chosen token and of the `num_top` likeliest tokens of `rows` [L]
        (int64)."""
        ...


class TorchSamplerOps:
    """`SamplerOps` in torch: the specification."""

    def tokens(self, logits: Tensor, draws: SamplingArrays) -> SampledTokens:
        # The first of equal logits. A NaN is the maximum of its row.
        max_logits, tokens = logits.max(dim=-1)
        rows = np.flatnonzero(draws.temperature > 0)
        block_len = max(1, BLOCK_SIZE // logits.shape[1])
        for begin in range(0, len(rows), block_len):
            block = rows[begin : begin + block_len]
            index = on(logits, block)
            tokens[index] = _draw(
                logits[index],
                max_logits[index],
                draws,
                block,
            )
        return SampledTokens(tokens, max_logits)

    def mask(
        self,
        logits: Tensor,
        masks: Tensor,
        rows: Tensor,
    ) -> None:
        shifts = torch.arange(32, device=masks.device)
        bits = (masks[:, :, None] >> shifts) & 1
        forbidden = bits.flatten(1) == 0
        after = (0, logits.shape[1] - forbidden.shape[1])
        # A negative padding removes columns.
        forbidden = torch.nn.functional.pad(forbidden, after, value=True)
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)

    def penalise(
        self,
        logits: Tensor,
        seen: TokenHistory,
        last_tokens: Tensor,
    ) -> None:
        vocab_size = logits.shape[1]
        lens = np.diff(seen.offsets)
        owner = np.repeat(np.arange(len(lens)), lens)
        in_output = np.arange(len(seen.history)) >= seen.output_starts[owner]
        rows = on(logits, seen.index)
        lacking = on(logits, np.flatnonzero(seen.lacks_last))
        # One key per (penalised row, token) that occurred; `counts`: its occurrences in the output.
        known = on(logits, owner * vocab_size + seen.history)
        keys = torch.cat((known, lacking * vocab_size + last_tokens[rows[lacking]]))
        weights = torch.cat(
            (on(logits, in_output), torch.ones_like(lacking, dtype=torch.bool))
        ).double()
        keys, inverse = torch.unique(keys, return_inverse=True)
        counts = torch.zeros(len(keys), dtype=torch.float64, device=logits.device).index_add_(
            0, inverse, weights
        )
        row = keys // vocab_size
        index = (rows[row], keys % vocab_size)
        score = logits[index].double()
        repetition = on(logits, seen.repetition)[row].double()
        score = torch.where(score > 0, score / repetition, score * repetition)
        frequency = on(logits, seen.frequency)[row].double()
        presence = on(logits, seen.presence)[row].double()
        lowered = score - counts * frequency - presence
        logits[index] = torch.where(counts > 0, lowered, score).float()

    def logprobs(
        self, logits: Tensor, chosen: SampledTokens, rows: Tensor, num_top: int
    ) -> TopLogprobTensors:
        wide = logits[rows]
        norm = wide.logsumexp(dim=-1, keepdim=True)
        top = wide.topk(num_top, dim=-1)
        own = wide.gather(1, chosen.tokens[rows, None])
        logprob = (own - norm)[:, 0]
        return TopLogprobTensors(logprob, top.indices.int(), top.values - norm)


def _draw(
    x: Tensor,
    max_logits: Tensor,
    draws: SamplingArrays,
    rows: NDArray[np.int64],
) -> Tensor:
    """Sample one token for each of `rows`, from their logits x [n, V] (overwritten) with the maxima
    `max_logits` [n]."""
    temperature = on(x, draws.temperature[rows])
    # At most 0, however small the temperature.
    x.sub_(max_logits[:, None]).div_(temperature[:, None])
    cut = threshold(
        x,
        draws.top_k[rows],
        draws.top_p[rows],
        draws.min_p[rows],
    )
    if cut is not None:
        x.masked_fill_(x < cut[:, None], -torch.inf)
    # Adding Gumbel noise and taking the maximum draws from the softmax of x.
    if isinstance(draws, UploadedSampling):
        # The positions on the device may be more recent than those on the host.
        keys = draws.device.keys[on(x, rows)]
    else:
        keys = torch.from_numpy(row_keys(draws.seeds[rows], draws.positions[rows])).to(x.device)
    noise = gumbel(keys, x.shape[1])
    return x.add_(noise).argmax(dim=-1)


def threshold(
    x: Tensor,
    top_k: IntArray,
    top_p: FloatArray,
    min_p: FloatArray,
) -> Tensor | None:
    """The smallest logit of each row that top-k, top-p and min-p all keep, [n]; None if they are
    off for all rows.

    x [n, V] are logits after temperature, with maximum 0. top_k 0, top_p 1 and min_p 0 are off.
    """
    with np.errstate(divide="ignore"):
        lowest = np.log(min_p)
    top_k = np.where((top_k > 0) & (top_k < x.shape[1]), top_k, 0)
    cutting = np.flatnonzero((top_k > 0) | (top_p < 1))
    if not len(cutting):
        return on(x, lowest) if min_p.any() else None
    cut = on(x, lowest)
    index = on(x, cutting)
    top_cut = _top_cut(x[index], top_k[cutting], top_p[cutting])
    cut[index] = torch.maximum(cut[index], top_cut)
    return cut


def _top_cut(
    x: Tensor,
    top_k: IntArray,
    top_p: FloatArray,
) -> Tensor:
    """`threshold` without min-p, for rows with top-k or top-p.

    Sorts only the largest logits: top_k of them, and enough to reach the mass top_p.
    """
    vocab_size = x.shape[1]
    num = max(int(top_k.max()), FIRST_CANDIDATES if (top_k == 0).any() else 0)
    limited = on(x, top_k > 0)
    k = on(x, top_k).long()
    p = on(x, top_p)
    while True:
        num = min(num, vocab_size)
        values = x.topk(num, dim=-1).values
        kth = values.gather(1, (k - 1).clamp_(min=0)[:, None]).masked_fill_(
            ~limited[:, None], -torch.inf
        )
        if (top_p >= 1).all():
            return kth[:, 0]
        total = x.exp().masked_fill_(x < kth, 0).sum(dim=-1, keepdim=True)
        mass = values.exp().masked_fill_(values < kth, 0)
        before = mass.cumsum(dim=-1) - mass
        is_inside = before < p[:, None] * total
        inside = is_inside.sum(dim=-1, keepdim=True)
        if num == vocab_size or ((inside[:, 0] < num) | limited | (p >= 1)).all():
            nucleus = values.gather(1, inside.clamp_(min=1) - 1).masked_fill_(
                (p >= 1)[:, None], -torch.inf
            )
            return torch.maximum(kth, nucleus)[:, 0]
        num *= 8


def on(like: Tensor, array: NDArray[np.generic]) -> Tensor:
    """The array on the device of `like`; integers become int64."""
    if array.dtype.kind == "i":
        return moved(array.astype(np.int64), like.device)
    return moved(array.astype(array.dtype), like.device)


def moved(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device. Does not wait for a GPU: torch keeps the pinned copy until the GPU
    has read it."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
