"""Log probabilities of known tokens, each from the logits at the token before it.

Tokens are processed in blocks, so that the memory for logits does not grow with the length of a
prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.models.registry import DecoderModel
from weft.ops.sampling import SampledTokens, SamplerOps, on
from weft.plan.outputs import PromptLogprobs, PromptLogprobsRequest

BLOCK_LEN = 128  # rows of logits per block


def prompt_logprobs(
    model: DecoderModel,
    sampler: SamplerOps,
    hidden: Tensor,
    request: PromptLogprobsRequest,
) -> PromptLogprobs:
    """`hidden` [T, H] are the states of the step."""
    num_top = int(request.num_top.max(initial=0))
    places = on(hidden, request.places)
    targets = on(hidden, request.targets)
    # Each token gets the ids of its request.
    all_ids = np.repeat(request.ids, request.counts, axis=0)
    ids = on(hidden, all_ids)
    blocks = []
    for begin in range(0, len(places), BLOCK_LEN):
        block = slice(begin, begin + BLOCK_LEN)
        logits = model.logits(hidden, places[block])
        found = _of_block(
            sampler,
            logits,
            targets[block],
            ids[block],
            num_top,
        )
        blocks.append(found)
    if not blocks:
        return _none(num_top, ids.shape[1])
    return _joined(blocks)


def _of_block(
    sampler: SamplerOps,
    logits: Tensor,
    targets: Tensor,
    ids: Tensor,
    num_top: int,
) -> PromptLogprobs:
    """Of logits [n, V], targets [n] and ids [n, M]. A row that is not finite affects no other."""
    rows = torch.arange(len(logits), device=logits.device)
    chosen = SampledTokens(targets, logits.amax(dim=-1))
    vocab_size = logits.shape[1]
    found = sampler.logprobs(
        logits,
        chosen,
        rows,
        min(num_top, vocab_size),
    )
    own = logits.gather(1, targets[:, None])
    # The most likely token has rank 1.
    ranks = (logits > own).sum(dim=-1) + 1
    of_ids = id_logprobs(
        logits,
        ids,
        own[:, 0],
        found.logprob,
    )
    return PromptLogprobs(
        logprobs=found.logprob.numpy(force=True),
        ranks=ranks.numpy(force=True).astype(np.int32),
        top_ids=found.top_ids.numpy(force=True),
        top_logprobs=found.top_logprobs.numpy(force=True),
        id_logprobs=of_ids.numpy(force=True),
    )


def id_logprobs(
    logits: Tensor,
    ids: Tensor,
    own: Tensor,
    logprob: Tensor,
) -> Tensor:
    """Log probabilities [n, M] of the tokens `ids` [n, M], given logit and log probability [n] of
    one token a row.
    """
    # log p(id) = logit(id) - log Z, and log Z is the same for all tokens of a row.
    log_z = own - logprob
    return logits.gather(1, ids) - log_z[:, None]


def _joined(blocks: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Concatenate the blocks, field by field."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(PromptLogprobs):
        columns = [getattr(block, field.name) for block in blocks]
        fields[field.name] = np.concatenate(columns)
    return PromptLogprobs(**fields)


def _none(num_top: int, num_ids: int) -> PromptLogprobs:
    """The output for no tokens."""
    return PromptLogprobs(
        logprobs=np.empty(0, np.float32),
        ranks=np.empty(0, np.int32),
        top_ids=np.empty((0, num_top), np.int32),
        top_logprobs=np.empty((0, num_top), np.float32),
        id_logprobs=np.empty((0, num_ids), np.float32),
    )
