"""Decides on the device how much of a run of sampled tokens counts: the next step continues after
that part, and is launched before the host has read the run.

    step n      tokens  | t | d1 | d2 | d3 |        sampled | s1 | s2 | s3 | s4 |
    settle      d1 = s1, d2 is not s2: s1 and s2 count, two drafts are lost
    step n+1    tokens  | s1 | s2 | s3 | s4 |       at fixed positions, however much counts
    begin       samples after s2, with the noise of the token that follows it

So no step waits for the host, which makes the layout, slots and positions of step n+1 before it
knows how much of step n counts. `plan/runs.py` is the specification.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray, LongArray, or_zeros
from weft.ops.noise import row_keys
from weft.ops.sampling import UploadedSampling
from weft.plan.step import LAST_SAMPLED, Plan


class StepRuns(NamedTuple):
    """The requests of a step that have drafts, or whose last drafts are not compared yet: D of the
    R, on the device, int64."""

    rows: Tensor  # [D]
    begins: Tensor  # [D] index of each one's first sampled token, 0..S-1
    # [D] index in the step of the token after which it samples if the whole run counts
    last: Tensor
    drafts: Tensor  # [D]
    unsettled: Tensor  # [D]
    key_begins: Tensor  # [D] begin of each one's part of `keys`
    keys: Tensor  # [2K] keys of the first token if nothing is lost, if one draft is lost, ...


def run_columns(plan: Plan) -> tuple[IntArray | LongArray, ...]:
    """The fields of `StepRuns` for a plan with runs."""
    drafts = or_zeros(plan.drafts, len(plan.rows))
    unsettled = or_zeros(plan.unsettled, len(plan.rows))
    has_run = drafts > 0
    has_run |= unsettled > 0
    which = np.flatnonzero(has_run)
    counts = plan.num_sampled.astype(np.int64)
    sampled_begins = np.cumsum(counts) - counts
    begins = sampled_begins[which]
    all_ends = np.cumsum(plan.lens, dtype=np.int64)
    ends = all_ends[which]
    num_keys = unsettled[which].astype(np.int64)
    num_keys += 1
    key_begins = np.cumsum(num_keys) - num_keys
    of_key = np.repeat(begins, num_keys)
    num_lost = np.arange(len(of_key))
    num_lost -= np.repeat(key_begins, num_keys)
    sampling = plan.sampling
    positions = (sampling.positions[of_key] - num_lost).astype(np.int32)
    keys = row_keys(sampling.seeds[of_key], positions)
    return (
        plan.rows[which],
        begins,
        ends - 1 - drafts[which],
        drafts[which],
        unsettled[which],
        key_begins,
        keys.ravel(),
    )


class DeviceRuns:
    """The run that each row sampled last, and how many of its drafts were wrong."""

    def __init__(self, max_rows: int, max_drafts: int, device: torch.device) -> None:
        self.after_last = torch.zeros(
            (max_rows, max_drafts),
            dtype=torch.int64,
            device=device,
        )  # the first one is among `DeviceRowTable.last_tokens`
        self.lost = torch.zeros(
            max_rows,
            dtype=torch.int64,
            device=device,
        )

    def tokens(self, planned: Tensor, of_row: Tensor) -> Tensor:
        """The tokens [T] of a step, whose rows are `of_row` [T], with the placeholders in `planned`
        replaced by the tokens that the last runs sampled after their first one."""
        width = self.after_last.shape[1]
        position = (LAST_SAMPLED - 1 - planned).clamp(0, width - 1)
        sampled = self.after_last.view(-1).take(of_row * width + position)
        return torch.where(planned < LAST_SAMPLED, sampled, planned)

    def begin(
        self, runs: StepRuns, last: Tensor, draws: UploadedSampling | None
    ) -> tuple[Tensor, UploadedSampling | None]:
        """`last` [S], the tokens after which one is sampled, and `draws`, the way of sampling. Both
        are corrected by the number of wrong drafts of the previous runs."""
        lost = self._lost(runs)
        last = last.index_add(0, runs.begins, -lost)
        if draws is None:
            return last, None
        keys = runs.keys.view(-1, 2).index_select(0, runs.key_begins + lost)
        there = draws.device
        # The keys may be a view of memory that a captured step reads: a new tensor.
        moved = there.keys.index_copy(0, runs.begins, keys.to(there.keys.dtype))
        return last, replace(draws, device=there._replace(keys=moved))

    def settle(self, runs: StepRuns, tokens: Tensor, sampled: Tensor, last_tokens: Tensor) -> None:
        """A step of `tokens` [T] has `sampled` [S]: keep the runs, and how many of their drafts
        were wrong. `last_tokens` [rows] get the first token of each run."""
        width = self.after_last.shape[1]
        places = torch.arange(width, device=sampled.device)
        of_sampled = runs.begins[:, None] + places
        of_draft = runs.last[:, None] + 1 + places
        last_sampled = len(sampled) - 1
        last_token = len(tokens) - 1
        said = sampled.take(of_sampled.clamp(max=last_sampled))
        guessed = tokens.take(of_draft.clamp(max=last_token))
        is_draft = places < runs.drafts[:, None]
        is_right = said == guessed
        is_right &= is_draft
        right_so_far = is_right.long().cumprod(1)
        num_right = right_so_far.sum(1)
        # If the run before has wrong drafts, the drafts after it were guessed for another text.
        num_right = num_right.masked_fill(self._lost(runs) > 0, 0)
        of_next = of_sampled + 1
        after = sampled.take(of_next.clamp(max=last_sampled))
        self.after_last.index_copy_(0, runs.rows, after)
        self.lost.index_copy_(0, runs.rows, runs.drafts - num_right)
        last_tokens.index_copy_(0, runs.rows, sampled.take(runs.begins))

    def _lost(self, runs: StepRuns) -> Tensor:
        return self.lost.take(runs.rows).masked_fill(runs.unsettled == 0, 0)
