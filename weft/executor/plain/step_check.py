"""Checks that a model of the transformers library gives the same result if a prompt is computed in
several steps.

It does not if the model keeps more than K and V from token to token, or depends on other tokens
than those that attention shows it. The model's code need not declare this. The check costs a few
small steps before the first request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.config.model import UnsupportedModel
from weft.executor.assembly import RunnerSpec
from weft.executor.backend import AttentionBackend
from weft.executor.inputs import DeviceRowTable
from weft.models.registry import DecoderModel
from weft.plan.step import ForwardMode, Plan, Sampling

NUM_TOKENS = 24
CUTS = (15, 23)  # the prompt is computed in one step, and again in steps of 15, 8 and 1 tokens
NUM_NEIGHBOURS = 6  # tokens of another row in the same step
# The largest difference between logits, as a fraction of their standard deviation. Rounding causes
# a millionth in float32 and some hundredths in sixteen bits; a lost state causes more than half.
MOST_DIFFERENCE = {torch.float32: 0.01}
IN_SIXTEEN_BITS = 0.2


class Piece(NamedTuple):
    """Some tokens of a row."""

    row: int
    start: int
    tokens: list[int]
    first_slot: int


@torch.inference_mode()
def require_same_steps(
    spec: RunnerSpec, model: DecoderModel, attention: AttentionBackend, rows: DeviceRowTable
) -> None:
    """Raise `UnsupportedModel` unless the last logits of a prompt are the same in one step and in
    several. Writes to slots from 0 on."""
    num_tokens = min(NUM_TOKENS, spec.context_length, spec.kv_tokens // 3)
    num_rows = spec.max_rows
    tokens = _tokens(spec.model.vocab_size, num_tokens)

    hidden_dtype = torch.float32

    def run(*pieces: Piece) -> Tensor:
        """Compute the pieces in one step. Returns the logits after the first piece."""
        nonlocal hidden_dtype
        inputs = rows.apply(_plan(pieces))
        attention.prepare(inputs.batch)
        hidden = model.forward(inputs.tokens, inputs.positions, attention, inputs.vectors)
        hidden_dtype = hidden.dtype
        return model.logits(hidden[len(pieces[0].tokens) - 1][None]).clone()

    unsplit = run(Piece(0, 0, tokens, 0))
    split = unsplit
    begin = 0
    for end in (*(cut for cut in CUTS if cut < num_tokens), num_tokens):
        pieces = [Piece(0, begin, tokens[begin:end], num_tokens + begin)]
        if num_rows > 1 and begin == 0:
            pieces.append(Piece(1, 0, tokens[3 : 3 + NUM_NEIGHBOURS], 2 * num_tokens))
        split = run(*pieces)
        begin = end
    spread = unsplit.float().std().clamp(min=1e-30)
    gap = (unsplit - split).float().std()
    difference = float(gap / spread)
    most = MOST_DIFFERENCE.get(hidden_dtype, IN_SIXTEEN_BITS)
    # `not <`, because the difference is NaN if a logit is NaN.
    if not difference < most:
        raise UnsupportedModel(
            f"{spec.model.architecture} computes something else when its tokens come in several "
            f"steps (logits differ by {difference:.2f} of their deviation): it keeps a state, "
            "which pages of K and V cannot hold"
        )


def _tokens(vocab_size: int, num: int) -> list[int]:
    """`num` tokens, all different if the vocabulary is large enough."""
    return [1 + 7 * index % max(vocab_size - 1, 1) for index in range(num)]


def _plan(pieces: tuple[Piece, ...]) -> Plan:
    tokens: list[int] = []
    slots: list[int] = []
    for piece in pieces:
        tokens += piece.tokens
        slots += range(piece.first_slot, piece.first_slot + len(piece.tokens))
    num = len(pieces)
    return Plan(
        step=0,
        mode=ForwardMode.EXTEND,
        rows=_ints([piece.row for piece in pieces]),
        starts=_ints([piece.start for piece in pieces]),
        lens=_ints([len(piece.tokens) for piece in pieces]),
        tokens=_ints(tokens),
        slots=_ints(slots),
        samples=np.zeros(num, np.bool_),
        sampling=Sampling.greedy(),
    )


def _ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32)
