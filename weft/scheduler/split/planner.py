"""Plans prefills in pieces of layers. One prefill is open at a time: all prompts, or chunks of
prompts, that the last pass chose.

    extend        | layers 0 .. 7                                              |
    in pieces     | layers 0 1 | decode | layers 2 3 | decode | 4 5 | decode | 6 7 |

The first piece allocates all slots and adds the inputs of the prompts' tokens; the last piece
computes logits, and features take part in it. In between nothing is shared with the cache, because
K and V of a token are complete only after the last layer. If a request leaves in between, the slots
that the open prefill allocated for it are freed. The planner chooses no request.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray, LongArray
from weft.plan.inputs import MediaVectors
from weft.plan.step import ForwardMode, LayerSpan
from weft.scheduler.batch import NO_ROWS, Batch, RunningBatch
from weft.scheduler.feature import FeatureHooks
from weft.scheduler.kv import KvMemory
from weft.scheduler.pace.pace import Pace, Waiting
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.planner import Planner, StepTokens, prepare_for_extend
from weft.scheduler.request import Request
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.waiting.queue import WaitingQueue

NO_STEP = -1


class SplitPrompt(NamedTuple):
    """A prompt, or a chunk of one, of which some layers are computed."""

    request: Request
    start: int  # position of the first token of the piece of the prompt
    length: int


class PieceSize(NamedTuple):
    """The number of layers of the next piece, and the reason for it."""

    num_layers: int
    bound: str  # the limit that applies; "" if the piece computes all remaining layers


class SplitPlanner(Planner):
    """`pace` says how long a step may take."""

    least_tokens = 16  # in all layers: the least work that is worth a piece

    def __init__(
        self,
        kv: KvMemory,
        hooks: FeatureHooks,
        *,
        settings: SchedulerSettings,
        running: RunningBatch,
        queue: WaitingQueue,
        pace: Pace,
    ) -> None:
        super().__init__(kv, hooks, pace)
        self._max_layers = settings.split_prefill_layers
        self._num_layers = settings.num_layers
        self._running = running
        self._queue = queue
        self.open: list[SplitPrompt] = []  # in the order of their tokens
        self._next_layer = 0
        self._left: set[int] = set()  # ids of requests that have left since the last piece
        self._last_piece = NO_STEP  # its step
        self.why = ""  # why the open prefill is split

    @property
    def decode_is_due(self) -> bool:
        """Whether running requests wait, and a piece was planned since their last step."""
        return self._last_piece == self.num_steps - 1 and len(self._decoding()) > 0

    def make_batch(self, prefills: list[Request], decode_rows: IntArray = NO_ROWS) -> Batch:
        """Like `Planner.make_batch`, but prefills are split if running requests would wait for
        them."""
        if not prefills:
            return super().make_batch(prefills, decode_rows)
        assert not self.open, "a prefill is open"
        starts = np.array([request.kv_len for request in prefills], dtype=np.int32)
        lens = np.array([request.extend_len for request in prefills], dtype=np.int32)
        load = StepLoad.of_tokens(starts, lens)
        piece = self._piece(load, self._num_layers)
        self._pace.takes_layers(load, piece.num_layers)
        if piece.num_layers == self._num_layers:
            self._last_piece = self.num_steps
            return super().make_batch(prefills, decode_rows)
        self.open = [SplitPrompt(one, one.kv_len, one.extend_len) for one in prefills]
        self._next_layer = 0
        self.why = ""
        return self._make_piece(prepare_for_extend(self._kv, prefills), piece, None)

    def make_piece(self) -> Batch:
        """The next layers of the open prefill."""
        kept = self._forget_left()
        lens = np.array([one.length for one in self.open], dtype=np.int32)
        starts = np.array([one.start for one in self.open], dtype=np.int32)
        rows = np.array([one.request.row for one in self.open], dtype=np.int32)
        tokens: list[IntArray] = []
        slots: list[IntArray] = []
        samples: list[bool] = []
        for request, start, length in self.open:
            tokens.append(self._columns.tokens[request.row, start : start + length])
            slots.append(self._kv.slots_again(request, start))
            samples.append(request.wants_tokens and request.completes)
        work = StepTokens(
            rows=rows,
            starts=starts,
            lens=lens,
            tokens=np.concatenate(tokens),
            slots=np.concatenate(slots),
            samples=np.array(samples, dtype=np.bool_),
        )
        piece = self._piece(StepLoad.of_tokens(starts, lens), self._num_layers - self._next_layer)
        return self._make_piece(work, piece, kept)

    def leave(self, request: Request) -> None:
        """The request releases its row: free the slots that the open prefill allocated for it."""
        for one in self.open:
            if one.request is request and request.id not in self._left:
                self._kv.withdraw(request, one.start)
                self._left.add(request.id)
        if len(self._left) == len(self.open):
            self.reset()

    def reset(self) -> None:
        """Close the open prefill."""
        self.open = []
        self._left = set()

    def ids_of(self, batch: Batch) -> list[int]:
        """The ids of the requests of a batch that has just been planned."""
        ids: list[int] = self._columns.ids[batch.rows].tolist()
        return ids

    def open_prompts(self) -> list[Request]:
        """The requests of the open prefill."""
        return [one.request for one in self.open if one.request.id not in self._left]

    # Inside

    def _decoding(self) -> IntArray:
        """The rows that wait for their next token."""
        return self._columns.unfinished(self._running.rows)

    def _piece(self, load: StepLoad, num_left: int) -> PieceSize:
        """The number of layers of the next piece, of `num_left` that are left. `load` is the load
        of all layers."""
        if not len(self._decoding()):
            return PieceSize(num_left, "")
        num_layers = self._max_layers
        bound = "--split-prefill-layers"
        in_time = self._pace.layers_in_time(load, self._waiting())
        if in_time < num_layers:
            num_layers = int(in_time)
            bound = "the time of a step"
        # A smaller piece is not worth a step.
        least = math.ceil(self.least_tokens * self._num_layers / load.tokens)
        num_layers = max(num_layers, least)
        if num_layers >= num_left:
            return PieceSize(num_left, "")
        return PieceSize(num_layers, bound)

    def _waiting(self) -> Waiting:
        """The requests whose prompts wait to be computed, including those of the open prefill."""
        orders = [one.request.spec.num_before for one in self.open]
        line = self._queue.next_line or self._queue.online
        oldest = line.oldest(self._queue.end)
        if oldest is not None:
            orders.append(oldest.spec.num_before)
        num = len(line) + len(self.open)
        return Waiting(num, min(orders, default=0))

    def _make_piece(self, work: StepTokens, piece: PieceSize, kept: LongArray | None) -> Batch:
        """The step that computes the next layers for all tokens of the open prefill."""
        first = self._next_layer
        layers = LayerSpan(first, first + piece.num_layers, self._num_layers, kept)
        self.why = piece.bound or self.why
        requests = self.open_prompts()
        if not layers.is_last:
            work = work._replace(samples=np.zeros(len(work.rows), dtype=np.bool_))
        mode = ForwardMode.SPLIT_PREFILL
        batch = self._batch(mode, requests if layers.is_last else [], work)
        if layers.is_last:
            inputs = self._hooks.prepare(batch, self._columns)
            # All other inputs were needed for the first piece only.
            inputs.inputs = [op for op in inputs.inputs if isinstance(op, MediaVectors)]
        else:
            all_layers = self._batch(mode, requests, work)
            inputs = self._hooks.prepare_piece(all_layers, self._columns, is_first=layers.is_first)
        self._add_plan(batch, work, inputs, layers)
        self._next_layer = layers.last
        self._last_piece = batch.plan.step
        if layers.is_last:
            self.reset()
        return batch

    def _forget_left(self) -> LongArray | None:
        """Remove the requests that have left since the last piece. Returns the indices of the
        remaining tokens in that piece; None if no request has left."""
        if not self._left:
            return None
        lens = [one.length for one in self.open]
        stays = np.array([one.request.id not in self._left for one in self.open], dtype=np.bool_)
        self.open = [one for one in self.open if one.request.id not in self._left]
        self._left = set()
        return np.flatnonzero(np.repeat(stays, lens))
