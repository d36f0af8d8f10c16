"""What counts of a run of sampled tokens, decided on the host: for devices whose results are there
when a step has run, as those of a CPU are.

A plan that begins with a run whose drafts were not compared when it was planned becomes one in
which everything is known, and which leaves out what does not count. This is the specification of
`runs.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.arrays import IntArray
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
        of_token = np.repeat(np.arange(len(plan.rows)), plan.lens)
        ends = np.cumsum(plan.lens)
        place = np.arange(plan.num_tokens) - (ends - plan.lens)[of_token]
        num_drafts = plan.num_sampled - 1
        # | run that counts | lost | drafts |: drafts move forward, over what is lost.
        kept_len = (plan.lens - num_drafts - lost)[of_token]
        is_run = (plan.unsettled > 0)[of_token] & (place < kept_len)
        source = np.arange(plan.num_tokens)
        source = source + np.where(place >= kept_len, lost[of_token], 0)
        tokens = plan.tokens[np.minimum(source, plan.num_tokens - 1)]
        width = self.tokens.shape[1]
        run = self.tokens[plan.rows[of_token], np.minimum(place, width - 1)]
        tokens = np.where(is_run, run, tokens)
        stays = place < (plan.lens - lost)[of_token]
        positions = plan.sampling.positions.copy()
        counts = plan.num_sampled.astype(np.int64)
        begins = (np.cumsum(counts) - counts)[plan.samples]
        positions[begins] -= lost[plan.samples]
        return replace(
            plan,
            lens=plan.lens - lost,
            tokens=tokens[stays].astype(np.int32),
            slots=plan.slots[stays],
            sampling=replace(plan.sampling, positions=positions),
            rotation=None if plan.rotation is None else plan.rotation[:, stays],
            sees_to=None if plan.sees_to is None else plan.sees_to[stays],
            unsettled=None,
        )

    def settle(self, plan: Plan, closed: Plan, sampled: IntArray) -> list[tuple[int, int]]:
        """The step of `plan`, which was run as `closed`, has `sampled` [S]. Returns the rows with
        runs, and the first token of each."""
        found: list[tuple[int, int]] = []
        counts = plan.num_sampled.tolist()
        sampled_end = 0
        token_end = 0
        for i, row in enumerate(plan.rows.tolist()):
            begin = sampled_end
            sampled_end += counts[i]
            token_end += int(closed.lens[i])
            num_drafts = 0 if plan.drafts is None else int(plan.drafts[i])
            unsettled = 0 if plan.unsettled is None else int(plan.unsettled[i])
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
