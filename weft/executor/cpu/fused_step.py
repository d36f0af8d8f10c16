"""Steps that are one call of the library of CPU kernels, from the plan's numbers to the tokens.

They serve all steps whose tokens are chosen greedily or drawn from the unchanged output of the
model, or from that output under grammar masks. A mask that a thread is still filling is waited for
first, because the kernels use all cores. Between two large matrices, Python finds its code and data
outside of the caches, and each function of torch or numpy takes some microseconds; so only a few
calls are left here.

`DeviceRowTable.apply` and `sample` are the specification, and compute all other steps. Both use the
same row table and the model's programs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from weft.arrays import BoolArray, IntArray
from weft.executor.cpu.program_model import GrowingProgram, SizedProgram
from weft.executor.cpu.screened_head import HeadCopy, screenable
from weft.executor.device import DeviceOutput, HostResult
from weft.executor.inputs import DeviceRowTable
from weft.executor.runner import ModelSteps, slots_of_states
from weft.ops.cpp import abi
from weft.ops.cpp.library import Library
from weft.ops.cpp.program import Program
from weft.plan.logits import GrammarMask
from weft.plan.step import (
    Drafting,
    Plan,
    Result,
    Sampling,
    StateSlots,
    find,
)


class SamplingBuffers:
    """The fixed memory into which the head of a fused step writes its tokens, and from which it
    draws."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # tokens that one step can sample
        self.chosen = np.empty(capacity, np.int64)
        self.max_logits = np.empty(capacity, np.float32)
        self.tokens = np.empty(capacity, np.int32)
        self.invalid = np.empty(capacity, np.bool_)
        self.draws = Sampling.greedy(capacity)
        self.draw_columns = draw_columns(self.draws)


def draw_columns(draws: Sampling) -> abi.DrawColumns:
    """The addresses of the numbers."""
    names = [name for name, _ in abi.DrawColumns._fields_]
    return abi.DrawColumns(*[getattr(draws, name).ctypes.data for name in names])


class GuessBuffers:
    """The fixed memory into which a chain of fused steps writes its tokens, and its arguments."""

    def __init__(self, capacity: int, num_rows: int) -> None:
        self.capacity = capacity  # tokens that one chain can draw
        self.tokens = np.empty(capacity, np.int32)
        # Counts, and the slots of guesses.
        self._guess_numbers = np.empty(num_rows + capacity, np.int32)
        self._numbers = np.empty(6 * num_rows, np.int32)
        self._draws = Sampling.greedy(capacity)
        self._draw_columns = draw_columns(self._draws)
        self.args = abi.Guesses(
            counts=self._guess_numbers.ctypes.data,
            numbers=self._numbers.ctypes.data,
            tokens=self.tokens.ctypes.data,
        )

    def give(self, counts: IntArray, slots: IntArray) -> None:
        """Set how many tokens are drawn for each request, greedily, and their slots."""
        num_requests = len(counts)
        numbers = self._guess_numbers
        numbers[:num_requests] = counts
        numbers[num_requests : num_requests + len(slots)] = slots
        args = self.args
        args.slots = args.counts + num_requests * numbers.itemsize
        args.all = None
        args.step = None

    def go_on(self, later: Later, num_rows: int) -> None:
        """Let the passes after the first one of `num_rows` requests run another program."""
        body = later.body.for_rows(num_rows)
        args = self.args
        args.later = body.program.address
        args.num_later = len(body.program.args)
        args.later_hidden = body.output.data_ptr()
        args.carried = later.carried.data_ptr()

    def draw(self, sampling: Sampling, of_step: SamplingBuffers) -> None:
        """Draw the tokens like this. The head of each step reads `of_step`."""
        for buffer, column in zip(self._draws, sampling, strict=True):
            buffer[: len(column)] = column
        self.args.all = ctypes.addressof(self._draw_columns)
        self.args.step = ctypes.addressof(of_step.draw_columns)


class FusedHead:
    """The programs of a model's head for one size: they choose the likeliest tokens, or draw, under
    grammar masks if there are some."""

    def __init__(self) -> None:
        self.sized: SizedProgram | None = None  # None: the next step must choose
        self.greedy = Program([], [])
        self.drawing = self.greedy
        self.likeliest = self.greedy  # as `greedy`, for steps without masks
        self.mask = abi.MaskArgs()
        # The arrays that `mask` points to.
        self._masked_rows = np.empty(0)
        self._words = np.empty(0)

    def forbid(self, mask: GrammarMask) -> None:
        """Let the head forbid the tokens that the mask does not allow."""
        args = self.mask
        self._words = np.ascontiguousarray(mask.bitmask.words)
        self._masked_rows = mask.index.astype(np.int64)
        num_masks = len(mask.index)
        args.num_masks = num_masks
        args.mask_stride = self._words.size // num_masks
        args.masks = self._words.ctypes.data
        args.rows = self._masked_rows.ctypes.data

    def use(self, head: SizedProgram, buffers: SamplingBuffers, copy: HeadCopy | None) -> None:
        """Write the logits of `head` and the tokens into these buffers. `copy`: of its matrix, by
        which steps that take the likeliest tokens leave out most products."""
        self.sized = head
        max_logits = buffers.max_logits.ctypes.data
        chosen = buffers.chosen.ctypes.data
        logits = head.output.data_ptr()
        vocab_size = head.output.shape[1]
        stride = head.output.stride(0)
        self.mask.logits = logits
        self.mask.vocab_size = vocab_size
        self.mask.stride = stride
        of_draws = buffers.draw_columns
        draws = [getattr(of_draws, name) for name, _ in of_draws._fields_]
        argmax = abi.ArgmaxArgs(
            logits,
            vocab_size,
            stride,
            chosen,
            max_logits,
        )
        draw = abi.DrawArgs(
            logits,
            vocab_size,
            stride,
            max_logits,
            *draws,
            chosen,
        )
        self.greedy = head.program.then(self.mask, argmax)
        self.drawing = self.greedy.then(draw)
        self.likeliest = self.greedy
        exact = screenable(head.program)
        if copy is not None and copy.is_sound and exact is not None:
            self.likeliest = copy.program(exact, argmax)


class Later(NamedTuple):
    """What the passes of a chain after the first one run, if that is not the same."""

    body: GrowingProgram
    carried: Tensor  # [rows, hidden] what each pass leaves of a row's last token for the next


class FusedPrograms(Protocol):
    """The programs of a model."""

    @property
    def body(self) -> GrowingProgram: ...

    @property
    def head(self) -> GrowingProgram: ...


class CpuFusedSteps:
    """The `ModelSteps` of a model whose programs these kernels run."""

    def __init__(
        self,
        model: FusedPrograms,
        rows: DeviceRowTable,
        library: Library,
        otherwise: ModelSteps | None,
        *,
        num_state_slots: int = 0,
        narrows: bool = True,
        later: Later | None = None,
    ) -> None:
        """`otherwise` computes the steps that these kernels cannot compute; None: there are none.
        `num_state_slots` of layers that keep a state; 0: there are none. `narrows`: tokens that
        nothing reads any more are left out (`PagedAttention.narrow`)."""
        self._later = later
        self._otherwise = otherwise
        self._model = model
        self._rows = rows
        self._library = library
        num_rows, context_length = rows.slots.shape
        self._buffers = SamplingBuffers(num_rows)
        self._numbers = np.empty(0)
        self._columns = np.empty(0)
        self._rotation: IntArray = np.empty((3, 0), np.int32)  # `step` points to it
        self._body: SizedProgram | None = None
        self._head = FusedHead()
        self._guesses: GuessBuffers | None = None  # of a draft model
        self._copy: HeadCopy | None = None
        # The arguments of the library. The adapters of tokens are set by `executor/lora`.
        self.step = abi.FusedStep(
            table=rows.slots.data_ptr(),
            num_rows=num_rows,
            table_stride=context_length,
            last_tokens=rows.last_tokens.data_ptr(),
        )
        # Numbers per token: its id, and its slot in each pool.
        self._num_of_token = 2
        if rows.window_slots is not None:
            self._num_of_token = 3
            self.step.window_table = rows.window_slots.data_ptr()
        self.step.num_state_slots = num_state_slots
        self.step.computes_all = not narrows

    def copy_head(self, fill: Callable[[HeadCopy], None] = HeadCopy.fill) -> None:
        """Let steps that take the likeliest tokens leave out most of the head's products. Called
        when the weights have been filled, and whenever they have changed. `fill` gives the copy its
        content."""
        head = self._model.head.for_rows(1)
        exact = screenable(head.program)
        if exact is None:
            return
        if self._copy is None:
            self._copy = HeadCopy(self._library, exact)
        fill(self._copy)
        self._head.sized = None  # the next step chooses its programs anew

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Weights that are kept besides those of the model."""
        return [] if self._copy is None else self._copy.tensors

    def takes(self, plan: Plan) -> bool:
        """Whether one call of the kernels can compute the step."""
        if plan.outputs or plan.inputs or not plan.num_tokens or plan.sees_to is not None:
            return False
        if not plan.logits:
            return True
        return all(type(op) is GrammarMask for op in plan.logits)

    def compute_all(self, plan: Plan) -> DeviceOutput:
        """`compute` with all tokens in all layers, for what looks at each of them."""
        usual = self.step.computes_all
        self.step.computes_all = True
        try:
            return self.compute(plan)
        finally:
            self.step.computes_all = usual

    def compute(self, plan: Plan) -> DeviceOutput:
        """Compute a step. Raises MemoryError."""
        if not self.takes(plan):
            assert self._otherwise is not None, "these steps are computed by the kernels alone"
            return self._otherwise.compute(plan)
        num_sampling = len(plan.sampling.positions)
        self._lay_out(plan, num_sampling)
        step = self.step
        self._head.mask.num_masks = 0
        mask = find(plan.logits, GrammarMask)
        head = self._head.likeliest
        if mask is not None:
            self._head.forbid(mask)
            head = self._head.greedy
        if not plan.sampling.is_greedy:
            for name in Sampling.__slots__:
                getattr(self._buffers.draws, name)[:num_sampling] = getattr(plan.sampling, name)
            head = self._head.drawing
        step.head = head.address
        step.num_head = len(head.args)
        self._library.run_fused(step)
        # Copies, because the next step writes to the same memory and may be launched before this
        # result is read.
        invalid = self._buffers.invalid[:num_sampling].copy() if step.num_invalid else None
        result = Result(self._buffers.tokens[:num_sampling].copy(), invalid=invalid)
        if mask is not None:
            result = _with_faults(result, mask)
        return HostResult(result)

    def guess(self, plan: Plan, drafting: Drafting) -> IntArray:
        """The tokens that a plan with a `drafting` asks for, all of them in one call of the
        library. `GuessPasses` says the same step by step. Raises MemoryError."""
        counts = drafting.counts
        num_guesses = len(plan.sampling.positions)
        self._head.mask.num_masks = 0
        self._lay_out(plan, int(np.count_nonzero(plan.samples)))
        if self._guesses is None or num_guesses > self._guesses.capacity:
            num_rows = len(self._rows.slots)
            self._guesses = GuessBuffers(2 * num_guesses, num_rows)
        guesses = self._guesses
        guesses.give(counts, drafting.slots)
        if self._later is not None:
            guesses.go_on(self._later, len(plan.rows))
        head = self._head.likeliest
        if not plan.sampling.is_greedy:
            guesses.draw(plan.sampling, self._buffers)
            head = self._head.drawing
        step = self.step
        step.head = head.address
        step.num_head = len(head.args)
        self._library.run_guesses(
            step,
            guesses.args,
            num_steps=max(int(counts.max(initial=0)), 1),
        )
        return guesses.tokens[:num_guesses].copy()

    def _lay_out(self, plan: Plan, num_sampling: int) -> None:
        """Set what the library needs to know of the plan, except for what it samples by."""
        if plan.table is not None or plan.window is not None:
            self._rows.write(plan)
        step = self.step
        num_requests = len(plan.rows)
        step.num_tokens = plan.num_tokens
        step.num_requests = num_requests
        step.num_sampling = num_sampling
        self._make_room(plan.num_tokens, num_sampling)
        # One array for the library: a pointer to each column would cost a ctypes attribute each.
        columns: tuple[IntArray | BoolArray, ...] = (
            plan.rows,
            plan.starts,
            plan.lens,
            plan.samples if plan.drafts is None else plan.num_sampled,
            plan.tokens,
            plan.slots,
        )
        if plan.window is not None:
            columns = (*columns, plan.window.slots)
        num_numbers = 4 * num_requests + self._num_of_token * plan.num_tokens
        if step.num_state_slots:
            states = slots_of_states(plan)
            step.num_kept = len(states.kept_rows)
            columns = (*columns, *state_columns(states))
            num_numbers += 2 * num_requests + 3 * step.num_kept
        np.concatenate(columns, out=self._numbers[:num_numbers])
        step.rotation = None
        if plan.rotation is not None:
            self._rotation = np.ascontiguousarray(plan.rotation, np.int32)
            step.rotation = self._rotation.ctypes.data

    def _make_room(self, num_tokens: int, num_sampling: int) -> None:
        """Have programs, and memory for their numbers, that are large enough."""
        body = self._model.body.for_rows(num_tokens)
        # Programs grow when a step is larger than all before it: their addresses change then.
        if body is not self._body:
            self._body = body
            self._use_body(body)
        if num_sampling > self._buffers.capacity:
            self._buffers = SamplingBuffers(2 * num_sampling)
            self._head.sized = None
        head = self._model.head.for_rows(num_sampling)
        if head is not self._head.sized:
            self._use_head(head)

    def _use_body(self, body: SizedProgram) -> None:
        num_rows = len(self._rows.slots)
        num_numbers = 4 * num_rows + self._num_of_token * body.capacity
        if self.step.num_state_slots:
            num_numbers += 2 * num_rows + 3 * body.capacity  # at most one copy after each token
        self._numbers = np.empty(num_numbers, np.int32)
        self._columns = np.empty(abi.FUSED_COLUMNS * body.capacity, np.int64)
        step = self.step
        step.numbers = self._numbers.ctypes.data
        step.columns = self._columns.ctypes.data
        step.body = body.program.address
        step.num_body = len(body.program.args)
        step.hidden = body.output.data_ptr()
        step.hidden_size = body.output.shape[1]

    def _use_head(self, head: SizedProgram) -> None:
        step = self.step
        buffers = self._buffers
        step.max_logits = buffers.max_logits.ctypes.data
        step.chosen = buffers.chosen.ctypes.data
        step.tokens = buffers.tokens.ctypes.data
        step.invalid = buffers.invalid.ctypes.data
        step.last = head.input.data_ptr()
        self._head.use(head, buffers, self._copy)


def state_columns(states: StateSlots) -> tuple[IntArray, ...]:
    """In the order in which the kernels read them."""
    kept = (states.kept_rows, states.kept_lens, states.kept_slots)
    return (states.reads, states.writes, *kept)


def _with_faults(result: Result, mask: GrammarMask) -> Result:
    """Rows whose masks could not be filled are invalid."""
    if not mask.bitmask.faults:
        return result
    # `faults` is by mask, the result by row.
    of_masks = mask.bitmask.faults.items()
    faults = tuple((int(mask.index[entry]), fault) for entry, fault in of_masks)
    invalid = result.invalid
    if invalid is None:
        invalid = np.zeros(len(result.tokens), np.bool_)
    for row, _ in faults:
        invalid[row] = True
    tokens = np.where(invalid, np.int32(0), result.tokens)
    return replace(result, tokens=tokens, invalid=invalid, faults=faults)
