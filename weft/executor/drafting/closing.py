"""What counts of a run of sampled tokens, decided on the host: for devices whose results are there
when a step has run, as those of a CPU are.

A plan that begins with a run whose drafts were not compared when it was planned becomes one in
which everything is known, and which leaves out what does not count. This is the specification of
`runs.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.arrays import IntArray, or_zeros
from weft.executor.device import DeviceOutput
from weft.executor.inputs import DeviceRowTable
from weft.executor.overlap.runs import has_runs
from weft.executor.runner import ModelSteps, TorchRunner
from weft.plan.step import Plan


class HostRuns:
    """The run that each row sampled last, and how many of its drafts were wrong."""

    def __init__(self, max_rows: int, max_drafts: int) -> None:
        self.tokens: IntArray = np.zeros((max_rows, 1 + max_drafts), np.int32)
        self.lost: IntArray = np.zeros(max_rows, np.int32)

    def closed(self, plan: Plan) -> Plan:
        """The plan with runs in place of their numbers, without what does not count of them."""
        if plan.unsettled is None:
            return plan
        lost = np.where(plan.unsettled > 0, self.lost[plan.rows], 0).astype(np.int32)
        which = np.arange(len(plan.rows))
        of_token = np.repeat(which, plan.lens)
        ends = np.cumsum(plan.lens)
        row_begins = ends - plan.lens
        places = np.arange(plan.num_tokens)
        place = places - row_begins[of_token]
        num_drafts = plan.num_sampled - 1
        # | run that counts | lost | drafts |: drafts move forward, over what is lost.
        run_lens = plan.lens - num_drafts - lost
        kept_len = run_lens[of_token]
        begins_so = plan.unsettled > 0
        is_run = begins_so[of_token]
        is_run &= place < kept_len
        is_behind = place >= kept_len
        moved = np.where(is_behind, lost[of_token], 0)
        source = places + moved
        source = np.minimum(source, plan.num_tokens - 1)
        tokens = plan.tokens[source]
        last_place = self.tokens.shape[1] - 1
        of_run = np.minimum(place, last_place)
        run = self.tokens[plan.rows[of_token], of_run]
        tokens = np.where(is_run, run, tokens)
        lens = plan.lens - lost
        stays = place < lens[of_token]
        positions = plan.sampling.positions.copy()
        counts = plan.num_sampled.astype(np.int64)
        sampled_begins = np.cumsum(counts) - counts
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
            tokens=tokens[stays].astype(np.int32),
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
        """The step of `plan`, which was run as `closed`, has `sampled` [S]. Returns the rows with
        runs, and the first token of each."""
        found: list[tuple[int, int]] = []
        counts = plan.num_sampled.tolist()
        drafts_of = or_zeros(plan.drafts, len(plan.rows)).tolist()
        unsettled_of = or_zeros(plan.unsettled, len(plan.rows)).tolist()
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
            was_whole = not unsettled or self.lost[row] == 0
            while was_whole and num_right < num_drafts:
                if sampled[begin + num_right] != drafts[num_right]:
                    break
                num_right += 1
            self.lost[row] = num_drafts - num_right
            self.tokens[row, : counts[i]] = sampled[begin:sampled_end]
            found.append((row, int(sampled[begin])))
        return found


class ClosingSteps:
    """The `ModelSteps` of a CPU on which steps are planned before the drafts of the last one are
    compared."""

    def __init__(self, otherwise: ModelSteps, rows: DeviceRowTable, max_drafts: int) -> None:
        self._otherwise = otherwise
        self._rows = rows
        self._runs = HostRuns(len(rows.slots), max_drafts)

    def run(self, plan: Plan) -> DeviceOutput:
        if not has_runs(plan):
            return self._otherwise.run(plan)
        closed = self._runs.closed(plan)
        output = self._otherwise.run(closed)
        sampled = output.result().tokens
        for row, token in self._runs.settle(plan, closed, sampled):
            self._rows.last_tokens[row] = token
        return output


def closing(runner: TorchRunner, rows: DeviceRowTable, max_drafts: int) -> TorchRunner:
    """The runner, for such plans."""
    steps, store, device = runner.parts
    return TorchRunner(
        ClosingSteps(steps, rows, max_drafts),
        store=store,
        device=device,
        kernels=runner.kernels,
    )
