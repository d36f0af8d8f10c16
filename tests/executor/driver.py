"""The least scheduler that drives a runner: hands out slots at random, never frees one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.arrays import IntArray
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.executor.build import load_runner
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.executor.runner import DecoderSteps, ModelSteps, TorchRunner
from weft.executor.wire.followers import Ranks
from weft.plan.logits import LogitOp, in_order
from weft.plan.outputs import AuxRequest, SampledLogprobs, SampledLogprobsRequest
from weft.plan.step import (
    NO_STATE,
    LayerSpan,
    Plan,
    Result,
    Sampling,
    StateSlots,
    Step,
    TableWrites,
    find,
)
from weft.plan.step import ForwardMode as Mode

KV_TOKENS = 640
MAX_ROWS = 8
CONTEXT = 128
NUM_STATES = 256

# The smallest model for tests that need one but do not care which.
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    name="smallest",
    vocab_size=61,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    max_position=CONTEXT,
    norm_eps=1e-5,
    dtype="float32",
)


class Turn(NamedTuple):
    """What one request does in a step: run `tokens` behind what its row holds, and sample or
    not."""

    row: int
    tokens: list[int]
    samples: bool = True


def ints(values: Iterable[Any]) -> IntArray:
    return np.array(list(values), dtype=np.int32)


def sampling(positions: Iterable[int], **changes: Any) -> Sampling:
    """Greedy for each of the positions, but for the `changes`."""
    where = ints(positions)
    num = len(where)
    values: dict[str, Any] = {
        "temperature": np.zeros(num, np.float32),
        "top_p": np.ones(num, np.float32),
        "top_k": np.zeros(num, np.int32),
        "min_p": np.zeros(num, np.float32),
        "seeds": np.arange(num, dtype=np.int64),
        "positions": where,
    }
    return Sampling(**{**values, **changes})


def asking(plan: Plan, *ops: LogitOp | AuxRequest, **columns: Any) -> Plan:
    """The plan with these operations alone, and greedy but for these columns of its sampling."""
    return replace(
        plan,
        sampling=sampling(plan.sampling.positions, **columns),
        logits=tuple(in_order([op for op in ops if isinstance(op, LogitOp)])),
        outputs=tuple(op for op in ops if isinstance(op, AuxRequest)),
    )


def sampler_plan(positions: Iterable[int], *ops: LogitOp | AuxRequest, **columns: Any) -> Plan:
    """A plan of nothing but sampling, one token for each of the positions."""
    where = ints(positions)
    nothing = ints([])
    plan = Plan(
        step=0,
        mode=Mode.DECODE,
        rows=ints(range(len(where))),
        starts=where,
        lens=np.ones(len(where), np.int32),
        tokens=nothing,
        slots=nothing,
        samples=np.ones(len(where), np.bool_),
        sampling=sampling(where),
    )
    return asking(plan, *ops, **columns)


def piece_of(
    plan: Plan, first: int, last: int, kept: list[int] | None = None, *, num_layers: int = 6
) -> Plan:
    """The piece of a prefill that computes these layers."""
    span = LayerSpan(first, last, num_layers)
    if kept is not None:
        span = replace(span, kept=np.array(kept, dtype=np.int64))
    plan = replace(plan, mode=Mode.SPLIT_PREFILL, layers=span)
    if span.is_last:
        return plan
    nobody = np.zeros(len(plan.rows), np.bool_)
    return replace(plan, samples=nobody, sampling=sampling([]), outputs=())


class ReadyBitmask(NamedTuple):
    """Bitmasks that are there, some of which may mean nothing."""

    words: IntArray
    faults: Mapping[int, str] = MappingProxyType({})


def logprobs_of(result: Result) -> SampledLogprobs:
    found = find(result.outputs, SampledLogprobs)
    assert found is not None
    return found


@dataclass
class Driver:
    runner: TorchRunner
    vocab_size: int
    free: list[int]
    slots: dict[int, list[int]] = field(default_factory=dict)
    free_states: list[int] = field(default_factory=list)  # of a model that keeps states
    state_of: dict[int, int] = field(default_factory=dict)  # by row, the slot with its state
    # What the next plan leaves: (row, after how many of its tokens, slot).
    keeps: list[tuple[int, int, int]] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)  # slots of copies, which stay
    writes: list[tuple[int, int, list[int]]] = field(default_factory=list)

    @property
    def steps(self) -> DecoderSteps:
        """What computes those steps that are not fused."""
        steps: ModelSteps | None = self.runner.steps
        if isinstance(steps, CpuFusedSteps):
            steps = steps._otherwise
        assert isinstance(steps, DecoderSteps)
        return steps

    def share(self, source: int, target: int, num: int) -> None:
        """Let row `target` begin with the first `num` tokens that were computed for row
        `source`."""
        self.slots[target] = self.slots[source][:num]
        self.writes.append((target, 0, self.slots[target]))

    def keep(self, row: int, num: int) -> int:
        """Let the next step leave a copy of the row's state behind `num` of its tokens. Returns its
        slot."""
        slot = self.free_states.pop()
        self.keeps.append((row, num, slot))
        self.kept.add(slot)
        return slot

    def fork(self, source: int, target: int, num: int, state: int) -> None:
        """As `share`; the row's state is the copy in a slot."""
        self.share(source, target, num)
        self.state_of[target] = state

    def _states(self, turns: Sequence[Turn]) -> StateSlots | None:
        """Each row moves to another slot in each step, but for every other row."""
        if not self.free_states:
            return None
        reads = [self.state_of.get(turn.row, NO_STATE) for turn in turns]
        writes = []
        for turn, read in zip(turns, reads, strict=True):
            stays = turn.row % 2 == 0 and read != NO_STATE and read not in self.kept
            writes.append(read if stays else self.free_states.pop())
            self.state_of[turn.row] = writes[-1]
        rows = [turn.row for turn in turns]
        keeps, self.keeps = self.keeps, []
        return StateSlots(
            reads=ints(reads),
            writes=ints(writes),
            kept_rows=ints(rows.index(row) for row, _, _ in keeps),
            kept_lens=ints(num for _, num, _ in keeps),
            kept_slots=ints(slot for _, _, slot in keeps),
        )

    def plan(self, *turns: Turn) -> Plan:
        starts = [len(self.slots.setdefault(turn.row, [])) for turn in turns]
        new = [[self.free.pop() for _ in turn.tokens] for turn in turns]
        for turn, slots in zip(turns, new, strict=True):
            self.slots[turn.row] = self.slots[turn.row] + slots
        ends = [len(self.slots[turn.row]) for turn in turns if turn.samples]
        everything = SampledLogprobsRequest(
            ints(range(len(ends))), ints([self.vocab_size] * len(ends))
        )
        return Plan(
            step=0,
            mode=Mode.DECODE if all(len(turn.tokens) == 1 for turn in turns) else Mode.MIXED,
            rows=ints(turn.row for turn in turns),
            starts=ints(starts),
            lens=ints(len(turn.tokens) for turn in turns),
            tokens=ints(token for turn in turns for token in turn.tokens),
            slots=ints(slot for slots in new for slot in slots),
            samples=np.array([turn.samples for turn in turns], dtype=np.bool_),
            sampling=sampling(ends),
            table=self._table(),
            outputs=(everything,),
            states=self._states(turns),
        )

    def launch(self, *turns: Turn) -> Step:
        return self.runner.launch(self.plan(*turns))

    def run(self, *turns: Turn) -> torch.Tensor:
        """Log probabilities of the requests that sample: [S, vocab]."""
        return full_logprobs(self.launch(*turns).result())

    def _table(self) -> TableWrites | None:
        writes, self.writes = self.writes, []
        if not writes:
            return None
        rows, starts, slots = zip(*writes, strict=True)
        return TableWrites(
            ints(rows), ints(starts), ints(len(s) for s in slots), ints(x for s in slots for x in s)
        )


def full_logprobs(result: Result) -> torch.Tensor:
    logprobs = logprobs_of(result)
    ids = logprobs.top_ids
    values = logprobs.top_logprobs
    return torch.zeros(values.shape).scatter_(
        1, torch.from_numpy(ids).long(), torch.from_numpy(values)
    )


def make_driver(
    model: ModelConfig = MODEL,
    folder: Path | None = None,
    ranks: Ranks | None = None,
    **settings: Any,
) -> Driver:
    """A runner with the weights in `folder`, or with random ones; torch computes if `settings` do
    not say otherwise."""
    settings = {"device": "cpu", "kernels": "torch", "threads": 1, **settings}
    runner = load_runner(
        EngineConfig(load_format="auto" if folder else "dummy", **settings),
        model,
        folder=folder or Path(),
        kv_tokens=KV_TOKENS,
        num_state_slots=NUM_STATES if model.state_bytes else 0,
        page_size=1,
        max_rows=MAX_ROWS,
        context_length=CONTEXT,
        ranks=ranks,
    )
    random = np.random.default_rng(0)
    return Driver(
        runner,
        model.vocab_size,
        random.permutation(KV_TOKENS).tolist(),
        free_states=random.permutation(NUM_STATES).tolist() if model.state_bytes else [],
    )
