"""Log probabilities of tokens that are there already: for each, of the logits at the token before
it.

The places are taken in blocks, so that the memory for logits does not grow with the length of a
prompt.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.models.registry import DecoderModel
from weft.ops.sampling import SampledTokens, SamplerOps, on
from weft.plan.outputs import PromptLogprobs, PromptLogprobsRequest

BLOCK_LEN = 128  # rows of logits that are held at a time


def prompt_logprobs(
    model: DecoderModel, sampler: SamplerOps, hidden: Tensor, request: PromptLogprobsRequest
) -> PromptLogprobs:
    """`hidden` [T, H] are those of the step."""
    num_top = int(request.num_top.max(initial=0))
    places = on(hidden, request.places)
    targets = on(hidden, request.targets)
    ids = on(hidden, np.repeat(request.ids, request.counts, axis=0))
    blocks = []
    for begin in range(0, len(places), BLOCK_LEN):
        block = slice(begin, begin + BLOCK_LEN)
        blocks.append(
            _of_block(
                sampler, model.logits(hidden[places[block]]), targets[block], ids[block], num_top
            )
        )
    if not blocks:
        return _none(num_top, ids.shape[1])
    return PromptLogprobs(
        logprobs=np.concatenate([block.logprobs for block in blocks]),
        ranks=np.concatenate([block.ranks for block in blocks]),
        top_ids=np.concatenate([block.top_ids for block in blocks]),
        top_logprobs=np.concatenate([block.top_logprobs for block in blocks]),
        id_logprobs=np.concatenate([block.id_logprobs for block in blocks]),
    )


def _of_block(
    sampler: SamplerOps, logits: Tensor, targets: Tensor, ids: Tensor, num_top: int
) -> PromptLogprobs:
    """Of logits [n, V], targets [n] and ids [n, M]. A row that is not finite harms no other."""
    rows = torch.arange(len(logits), device=logits.device)
    found = sampler.logprobs(
        logits, SampledTokens(targets, logits.amax(dim=-1)), rows, min(num_top, logits.shape[1])
    )
    own = logits.gather(1, targets[:, None])
    ranks = (logits > own).sum(dim=-1) + 1
    return PromptLogprobs(
        logprobs=found.logprob.numpy(force=True),
        ranks=ranks.numpy(force=True).astype(np.int32),
        top_ids=found.top_ids.numpy(force=True),
        top_logprobs=found.top_logprobs.numpy(force=True),
        id_logprobs=id_logprobs(logits, ids, own[:, 0], found.logprob).numpy(force=True),
    )


def id_logprobs(logits: Tensor, ids: Tensor, own: Tensor, logprob: Tensor) -> Tensor:
    """Log probabilities [n, M] of the tokens `ids` [n, M], given logit and log probability [n] of
    one token a row.
    """
    return logits.gather(1, ids) - (own - logprob)[:, None]


def _none(num_top: int, num_ids: int) -> PromptLogprobs:
    return PromptLogprobs(
        logprobs=np.empty(0, np.float32),
        ranks=np.empty(0, np.int32),
        top_ids=np.empty((0, num_top), np.int32),
        top_logprobs=np.empty((0, num_top), np.float32),
        id_logprobs=np.empty((0, num_ids), np.float32),
    )
