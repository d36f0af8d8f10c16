"""What counts of a run of sampled tokens is decided alike on the device, where nobody waits, and on
the host."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.executor.driver import ints
from tests.seeds import seeds
from weft.arrays import IntArray
from weft.executor.overlap.runs import DeviceRuns, StepRuns, run_columns
from weft.ops.noise import row_keys
from weft.ops.sampling import UploadedSampling, sampling_tensors
from weft.plan.runs import HostRuns
from weft.plan.step import ForwardMode, Plan, Sampling

CPU = torch.device("cpu")
NUM_ROWS = 6
MAX_DRAFTS = 5
VOCAB = 2  # so few that guesses are often right


class Device:
    """The rule of the device, in torch."""

    def __init__(self) -> None:
        self.runs = DeviceRuns(NUM_ROWS, MAX_DRAFTS, CPU)
        self.last_tokens = torch.zeros(NUM_ROWS, dtype=torch.int64)

    def step(self, plan: Plan, sampled: IntArray) -> tuple[list[int], list[int], torch.Tensor]:
        """Returns the tokens of a step, where they are sampled from, and the keys of the noise."""
        columns = [torch.from_numpy(np.asarray(one, np.int64)) for one in run_columns(plan)]
        runs = StepRuns(*columns)
        of_row = torch.from_numpy(np.repeat(plan.rows, plan.lens).astype(np.int64))
        given = torch.from_numpy(plan.tokens.astype(np.int64))
        tokens = torch.where(given == -1, self.last_tokens.take(of_row), given)
        tokens = self.runs.tokens(tokens, of_row)
        counts = plan.num_sampled
        ends = np.cumsum(plan.lens)
        places: list[int] = []
        for end, count in zip(ends.tolist(), counts.tolist(), strict=True):
            places += range(end - count, end)
        draws = plan.sampling
        staged = UploadedSampling(
            **{name: getattr(draws, name) for name in ("temperature", "top_k", "top_p", "min_p")},
            seeds=draws.seeds,
            positions=draws.positions,
            device=sampling_tensors(CPU, draws),
        )
        last, better = self.runs.begin(runs, torch.tensor(places), staged)
        assert better is not None
        self.runs.settle(runs, tokens, torch.from_numpy(sampled.astype(np.int64)), self.last_tokens)
        return tokens.tolist(), last.tolist(), better.device.keys


def a_plan(rng: random.Random, before: Plan | None) -> Plan:
    """A step of some rows, which may begin with what they sampled in the one before."""
    rows = rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS))
    drafts = [rng.choice([0, 0, 1, 2, MAX_DRAFTS]) for _ in rows]
    unsettled = [0 for _ in rows]
    if before is not None and before.drafts is not None:
        were = dict(zip(before.rows.tolist(), before.drafts.tolist(), strict=True))
        unsettled = [were.get(row, 0) for row in rows]
    tokens: list[int] = []
    for num_open, num_drafts in zip(unsettled, drafts, strict=True):
        tokens += [-1 - i for i in range(num_open + 1)]
        tokens += [rng.randrange(VOCAB) for _ in range(num_drafts)]
    lens = ints(num_open + 1 + num for num_open, num in zip(unsettled, drafts, strict=True))
    starts = ints(rng.randrange(20, 90) for _ in rows)
    counts = ints(drafts) + 1
    total = int(counts.sum())
    begins = np.cumsum(counts) - counts
    within = np.arange(total) - np.repeat(begins, counts)
    firsts = starts + lens - ints(drafts)
    sampling = Sampling(
        temperature=np.ones(total, np.float32),
        top_p=np.ones(total, np.float32),
        top_k=np.zeros(total, np.int32),
        min_p=np.zeros(total, np.float32),
        seeds=np.repeat(np.array(rows, np.int64) * 7 + 1, counts),
        positions=(np.repeat(firsts, counts) + within).astype(np.int32),
    )
    return Plan(
        step=0,
        mode=ForwardMode.MIXED,
        rows=ints(rows),
        starts=starts,
        lens=lens,
        tokens=ints(tokens),
        slots=np.arange(len(tokens), dtype=np.int32),
        samples=np.ones(len(rows), np.bool_),
        sampling=sampling,
        drafts=ints(drafts),
        unsettled=ints(unsettled) if any(unsettled) else None,
    )


@pytest.mark.parametrize("seed", seeds(6, 12))
def test_device_and_host_keep_the_same_of_every_run(seed: int) -> None:
    rng = random.Random(seed)
    device = Device()
    host = HostRuns()
    host_last = np.zeros(NUM_ROWS, np.int64)
    before: Plan | None = None
    num_cut = 0
    for _ in range(60):
        plan = a_plan(rng, before)
        sampled = ints(rng.randrange(VOCAB) for _ in range(int(plan.num_sampled.sum())))
        closed = host.closed(plan)
        tokens, last, keys = device.step(plan, sampled)
        wanted = row_keys(closed.sampling.seeds, closed.sampling.positions)
        begin = closed_begin = place = 0
        for i, row in enumerate(plan.rows.tolist()):
            num_open = 0 if plan.unsettled is None else int(plan.unsettled[i])
            num_lost = int(plan.lens[i] - closed.lens[i])
            num_cut += num_lost
            run_len = num_open + 1 - num_lost
            theirs = closed.tokens[closed_begin : closed_begin + run_len].tolist()
            theirs = [int(host_last[row]) if token == -1 else token for token in theirs]
            assert tokens[begin : begin + run_len] == theirs
            # Behind what counts, and with the noise of the token that follows it.
            assert last[place] == begin + run_len - 1
            assert keys[place].tolist() == wanted[place].tolist()
            begin += int(plan.lens[i])
            closed_begin += int(closed.lens[i])
            place += int(plan.num_sampled[i])
        for row, token in host.settle(plan, closed, sampled):
            host_last[row] = token
        plain = np.flatnonzero((plan.num_sampled == 1) & (plan.lens == 1))
        sampled_begins = np.cumsum(plan.num_sampled) - plan.num_sampled
        for i in plain.tolist():
            host_last[plan.rows[i]] = sampled[sampled_begins[i]]
            device.last_tokens[plan.rows[i]] = int(sampled[sampled_begins[i]])
        host_lost = [*host.lost.tolist(), *[0] * NUM_ROWS][:NUM_ROWS]
        assert device.runs.lost.tolist() == host_lost
        assert device.last_tokens.tolist() == host_last.tolist()
        before = plan
    assert num_cut > 20


def test_a_plan_without_runs_stays_as_it_is() -> None:
    plan = replace(a_plan(random.Random(1), None), unsettled=None)
    assert HostRuns().closed(plan) is plan
