"""Decides on the host how much of a run of sampled tokens counts. It serves devices whose results
are known when a step has run: CPUs and simulated devices.

A plan may begin with a run whose drafts had not been compared when it was planned. This module
turns it into a plan whose tokens are all known and that leaves out the tokens that do not count. It
is the specification of what a GPU does (`executor/overlap/runs.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.arrays import IntArray, LongArray, or_zeros
from weft.plan.step import Plan


def has_runs(plan: Plan) -> bool:
    return plan.drafts is not None or plan.unsettled is not None


class HostRuns:
    """The run that each row sampled last, and how many of its drafts do not count."""

    def __init__(self) -> None:
        self.tokens: IntArray = np.zeros((0, 1), np.int32)  # [rows, longest run]
        self.lost: IntArray = np.zeros(0, np.int32)  # [rows]

    def closed(self, plan: Plan) -> Plan:
        """The plan with the tokens of runs instead of placeholders, without those that do not
        count."""
        if plan.unsettled is None:
            return plan
        self._make_room(plan)
        begins_so = plan.unsettled > 0
        last_lost = self.lost[plan.rows]
        lost: IntArray = np.where(begins_so, last_lost, 0).astype(np.int32)
        lens = plan.lens - lost
        which = np.arange(len(plan.rows))
        of_token: LongArray = np.repeat(which, plan.lens)
        row_ends = np.cumsum(plan.lens)
        row_begins = row_ends - plan.lens
        index: LongArray = np.arange(plan.num_tokens)
        index = index - row_begins[of_token]
        stays = index < lens[of_token]
        num_lost: IntArray = lost[of_token]
        tokens = self._moved(plan, num_lost, of_token, index)
        counts = plan.num_sampled.astype(np.int64)
        sampled_begins = np.cumsum(counts) - counts
        positions = plan.sampling.positions.copy()
        begins = sampled_begins[plan.samples]
        positions[begins] -= lost[plan.samples]
        rotation = plan.rotation
        if rotation is not None:
            rotation = rotation[:, stays]
        sees_to = plan.sees_to
        if sees_to is not None:
            sees_to = sees_to[stays]
        return replace(
            plan,
            lens=lens,
            tokens=tokens[stays],
            slots=plan.slots[stays],
            sampling=replace(
                plan.sampling,
                positions=positions,
            ),
            rotation=rotation,
            sees_to=sees_to,
            unsettled=None,
        )

    def settle(self, plan: Plan, closed: Plan, sampled: IntArray) -> list[tuple[int, int]]:
        """Record the run and the number of lost drafts of each row.

        `sampled` [S] are the tokens of the step of `plan`, which ran as `closed`. Returns the rows
        with runs, and the first token of each run.
        """
        found: list[tuple[int, int]] = []
        counts = plan.num_sampled.tolist()
        drafts_of = or_zeros(plan.drafts, len(plan.rows)).tolist()
        unsettled_of = or_zeros(plan.unsettled, len(plan.rows)).tolist()
        self._make_room(plan)
        sampled_end = 0
        token_end = 0
        for i, row in enumerate(plan.rows.tolist()):
            begin = sampled_end
            sampled_end += counts[i]
            token_end += int(closed.lens[i])
            num_drafts = drafts_of[i]
            unsettled = unsettled_of[i]
            if not num_drafts and not unsettled:
                continue
            drafts = closed.tokens[token_end - num_drafts : token_end]
            num_right = 0
            was_right = not unsettled or self.lost[row] == 0
            while was_right and num_right < num_drafts:
                if sampled[begin + num_right] != drafts[num_right]:
                    break
                num_right += 1
            self.lost[row] = num_drafts - num_right
            self.tokens[row, : counts[i]] = sampled[begin:sampled_end]
            found.append((row, int(sampled[begin])))
        return found

    def _moved(self, plan: Plan, lost: IntArray, of_token: LongArray, index: LongArray) -> IntArray:
        """The tokens of a plan with the tokens of runs instead of placeholders.

        Drafts move to the front by the number of `lost` tokens of the run before them; the tokens
        left at the end have no meaning.

            | run that counts | lost | drafts |  ─▶  | run that counts | drafts | ... |

        All are [T]: `of_token` is the request of each token, `index` its index in that request.
        """
        assert plan.unsettled is not None
        run_lens = plan.lens - plan.num_sampled + 1
        num_kept = run_lens[of_token] - lost
        begins_so = plan.unsettled > 0
        is_kept = index < num_kept
        is_run = begins_so[of_token]
        is_run &= is_kept
        moved = np.where(is_kept, 0, lost)
        last_token = plan.num_tokens - 1
        source = np.arange(plan.num_tokens)
        source += moved
        source = np.minimum(source, last_token)
        last_index = self.tokens.shape[1] - 1
        of_run = np.minimum(index, last_index)
        rows = plan.rows[of_token]
        run = self.tokens[rows, of_run]
        tokens = np.where(is_run, run, plan.tokens[source])
        return tokens.astype(np.int32)

    def _make_room(self, plan: Plan) -> None:
        num_rows, longest = self.tokens.shape
        last_row = int(plan.rows.max(initial=0))
        longest_run = int(plan.num_sampled.max(initial=0))
        more_rows = max(last_row + 1 - num_rows, 0)
        more_tokens = max(longest_run - longest, 0)
        if more_rows or more_tokens:
            pad_rows = (0, more_rows)
            pad_tokens = (0, more_tokens)
            self.tokens = np.pad(self.tokens, (pad_rows, pad_tokens))
            self.lost = np.pad(self.lost, pad_rows)
