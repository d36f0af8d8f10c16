"""Runs plans on one device: rows and slots in, tokens out. It knows nothing of requests.

    TorchRunner.launch ─▶ StepDevice.launch ─▶ Pass ─▶ Pass ─▶ ModelSteps.compute ─▶ DeviceOutput
                          which thread         what surrounds    the computation
                                               the computation
    TorchRunner.control ─▶ StepDevice ───────▶ Pass ─▶ Pass ─▶ DeviceStore.do ─────▶ DeviceReply

`DecoderSteps` computes the steps of a model that generates, `EncoderSteps` those of a model without
KV; a CPU has a faster computation of its own (`cpu/fused_step.py`). Ranks, lockstep, drafts,
pictures, adapters and pieces of layers are passes in one list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray, consecutive
from weft.executor.backend import AttentionBackend, AttentionBatch
from weft.executor.device import DeviceOutput, StepDevice, worker_thread
from weft.executor.inputs import DeviceRowTable, Inputs
from weft.executor.logit_processors.processors import Processors
from weft.executor.outputs.aux_outputs import ComputedStep, compute_aux_outputs
from weft.executor.outputs.pooling import Pooler
from weft.executor.outputs.sampler import SamplerOutput, sample
from weft.models.layers.cross import EncodedKv
from weft.models.layers.encoder import BidirectionalAttention
from weft.models.layers.kept import KeepStates
from weft.models.layers.states import LayerStates
from weft.models.registry import DecoderModel, EncoderModel
from weft.ops.cpp.library import Library
from weft.ops.sampling import SamplerOps, on
from weft.plan.device import DeviceReply, DeviceRequest, Pending, ReadAdapter
from weft.plan.outputs import AuxOutput, PooledVectors, PoolingRequest
from weft.plan.step import Plan, Result, StateSlots, Step, find

T = TypeVar("T")
Run: TypeAlias = Callable[[Plan], DeviceOutput]
Do: TypeAlias = Callable[[DeviceRequest], DeviceReply]


class ModelSteps(Protocol):
    """Computes the steps of one model, one after the other."""

    def compute(self, plan: Plan) -> DeviceOutput: ...


class DeviceStore(Protocol):
    """Carries out requests to the device that are not steps, one at a time."""

    def do(self, request: DeviceRequest) -> DeviceReply:
        """Carry out a request. Raises nothing: the reply has the error."""
        ...


class Pass:
    """What happens around the computation of each step, and around each request to the device.

    A pass overrides the hooks that it needs; a hook that is not overridden costs nothing. `then` is
    the next pass of the list, and after the last one the computation, or the store.
    """

    name = ""  # as `GET /server_info` lists it

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        """Take part in a step."""
        return then(plan)

    def do(self, request: DeviceRequest, then: Do) -> DeviceReply:
        """Take part in a request to the device. Raises nothing: the reply has the error."""
        return then(request)


class TorchRunner:
    """The `Runner` of every model: plans in, results out, in the order of launches. `passes`: the
    outermost first.

    The arrays of a plan are read when the step runs: they must not change before its result is
    known.
    """

    def __init__(
        self,
        steps: ModelSteps,
        *,
        store: DeviceStore,
        device: StepDevice,
        passes: Sequence[Pass] = (),
        kernels: Library | None = None,
    ) -> None:
        self.kernels = kernels  # the CPU kernels, if they are used
        # Called after each launch, if a profiler counts steps. A profiler that wrapped the runner
        # would slow down every step.
        self.on_launch: Callable[[], None] | None = None
        self.steps = steps  # the computation
        self.store = store
        self.passes = tuple(passes)
        self._device = device
        self._run: Run = steps.compute
        self._do: Do = store.do
        for one in reversed(self.passes):
            if type(one).run is not Pass.run:
                self._run = partial(one.run, then=self._run)
            if type(one).do is not Pass.do:
                self._do = partial(one.do, then=self._do)
        # Torch uses one thread there, so that steps keep theirs. The thread starts at its first
        # use.
        self._reader = worker_thread(1)

    def within(self, *passes: Pass) -> TorchRunner:
        """A runner of the same parts with more passes around them, the outermost first. This one
        is not used any more."""
        return TorchRunner(
            self.steps,
            store=self.store,
            device=self._device,
            passes=[*passes, *self.passes],
            kernels=self.kernels,
        )

    def run(self, plan: Plan) -> DeviceOutput:
        """Compute a step here and now, on the calling thread: for a runner inside of another."""
        return self._run(plan)

    def do(self, request: DeviceRequest) -> DeviceReply:
        """Carry out a request here and now, on the calling thread."""
        return self._do(request)

    def launch(self, plan: Plan) -> Step:
        step = self._device.launch(self._run, plan)
        if self.on_launch is not None:
            self.on_launch()
        return step

    def control(self, request: DeviceRequest) -> Pending:
        if isinstance(request, ReadAdapter):
            return self._reader.submit(self._do, request)
        return self._device.run_exclusive(partial(self._do, request))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the thread that runs steps, after the launched steps and before any
        other."""
        return self._device.submit(work)

    def close(self) -> None:
        """Finish the launched steps and end the threads."""
        self._reader.shutdown()
        self._device.close()


class DecoderOutput(NamedTuple):
    """The `DeviceOutput` of a model that generates."""

    sampled: SamplerOutput | None  # None: no request samples
    outputs: tuple[AuxOutput, ...]

    def moved(self, move: Callable[[Tensor], Tensor]) -> DecoderOutput:
        if self.sampled is None:
            return self
        return self._replace(sampled=self.sampled.moved(move))

    def result(self) -> Result:
        if self.sampled is None:
            return Result(tokens=np.empty(0, np.int32), outputs=self.outputs)
        return self.sampled.result(self.outputs)


class CapturedStep(Protocol):
    """The launches of a step up to some size, recorded to be replayed."""

    def replay(self, plan: Plan) -> tuple[Inputs, Tensor]:
        """Replay them for a step. Returns its inputs and hidden states."""
        ...


class CapturedSteps(Protocol):
    def fitting(self, plan: Plan) -> CapturedStep | None:
        """The captured step that is large enough for this step; None if there is none."""
        ...


class StepStates(LayerStates, Protocol):
    """The states of the requests of a step, in the layers that keep a state."""

    def prepare(self, lens: IntArray, slots: StateSlots) -> None:
        """Begin a step of requests with `lens` [R] tokens. Later calls belong to this step, until
        the next call of `prepare`."""
        ...


class StepKept(KeepStates, Protocol):
    """What is kept of the hidden states of a step for a head."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Begin a step. Later calls belong to it, until the next call of `prepare`."""
        ...


class StepEncoded(EncodedKv, Protocol):
    """What the encoder has read for the requests of a step."""

    def prepare(self, rows: IntArray, lens: IntArray) -> None:
        """Begin a step of requests with these `rows` [R] and `lens` [R] tokens."""
        ...

    def weights(self, row: int, places: slice, heads: Sequence[tuple[int, int]]) -> Tensor:
        """The weights of single heads (layer, head) for the tokens at `places` of the last step,
        which are those of `row`: [heads, n, num_positions]"""
        ...


def slots_of_states(plan: Plan) -> StateSlots:
    """The slots for states of a plan; for a model with states."""
    assert plan.states is not None, "the model keeps states, and the plan has no slots for them"
    assert len(plan.states.reads) == len(plan.states.writes) == len(plan.rows)
    return plan.states


class DecoderSteps:
    """The `ModelSteps` of a model that generates.

    It computes with torch, or with programs and kernels that implement the same protocols. If a
    step raises, its tokens have no K and V; later steps are not affected.
    """

    def __init__(
        self,
        *,
        model: DecoderModel,
        attention: AttentionBackend,
        sampler: SamplerOps,
        rows: DeviceRowTable,
        states: StepStates | None = None,
        encoded: StepEncoded | None = None,
        graphs: CapturedSteps | None = None,
        pooler: Pooler | None = None,
        processors: Processors | None = None,
        kept: StepKept | None = None,
    ) -> None:
        self._kept = kept
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._rows = rows
        self._states = states
        self._encoded = encoded
        self._graphs = graphs
        self._pooler = pooler
        self._processors = processors

    @torch.inference_mode()
    def compute(self, plan: Plan) -> DecoderOutput:
        graph = None
        if self._graphs is not None:
            graph = self._graphs.fitting(plan)
        if graph is not None:
            inputs, hidden = graph.replay(plan)
        else:
            inputs = self._rows.apply(plan)
            if plan.num_tokens:
                self._attention.prepare(inputs.batch)
                if self._kept is not None:
                    self._kept.prepare(inputs.batch)
                if self._states is not None:
                    self._states.prepare(plan.lens, slots_of_states(plan))
                if self._encoded is not None:
                    self._encoded.prepare(plan.rows, plan.lens)
                hidden = self._model.forward(
                    inputs.tokens, inputs.positions, self._attention, inputs.vectors
                )
        return self.finish(plan, inputs, hidden)

    def finish(self, plan: Plan, inputs: Inputs, hidden: Tensor) -> DecoderOutput:
        """The output of a step, from the output of the last layer for its tokens, `hidden` [T,
        hidden]."""
        outputs: tuple[AuxOutput, ...] = ()
        if plan.outputs:
            step = ComputedStep(
                plan, hidden, self._model, self._sampler, self._pooler, self._encoded
            )
            outputs = compute_aux_outputs(step)
        if not len(inputs.last):
            return DecoderOutput(None, outputs)
        # Logits only for sampled tokens, because the head is the widest matrix of a model.
        logits = self._model.logits(hidden, inputs.last)
        sampled = sample(
            self._sampler,
            logits,
            plan,
            inputs.last_tokens,
            self._processors,
            inputs.draws,
        )
        self._rows.keep_sampled(inputs, sampled.tokens)
        return DecoderOutput(sampled, outputs)


class EncoderOutput(NamedTuple):
    """The `DeviceOutput` of a model without KV."""

    outputs: tuple[AuxOutput, ...]

    def moved(self, move: Callable[[Tensor], Tensor]) -> EncoderOutput:
        return self

    def result(self) -> Result:
        return Result(tokens=np.empty(0, np.int32), outputs=self.outputs)


class EncoderAttention(BidirectionalAttention, Protocol):
    """`BidirectionalAttention` that is prepared once for all layers of a step."""

    def prepare(self, lens: IntArray, device: torch.device) -> None:
        """Prepare for prompts of `lens` [R] tokens, one after another."""
        ...


class EncoderSteps:
    """The `ModelSteps` of a model without KV: whole prompts in, one vector for each out.

    No request samples. Nothing stays on the device between steps; slots and rows exist only in the
    accounts of the scheduler.
    """

    def __init__(
        self,
        *,
        model: EncoderModel,
        attention: EncoderAttention,
        pooler: Pooler,
        on_device: torch.device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._pooler = pooler
        self._like = torch.empty(0, device=on_device)

    @torch.inference_mode()
    def compute(self, plan: Plan) -> EncoderOutput:
        assert not plan.starts.any(), "an encoder gets whole prompts"
        assert not plan.samples.any(), "an encoder generates nothing"
        asked = find(plan.outputs, PoolingRequest)
        # Positions begin at 0 in each prompt.
        starts = np.zeros(len(plan.lens), np.int64)
        positions = consecutive(starts, plan.lens)
        types = np.zeros(plan.num_tokens, np.int32)
        if asked is not None and asked.types is not None:
            types = asked.types
        self._attention.prepare(plan.lens, self._like.device)
        hidden = self._model.forward(
            on(self._like, plan.tokens),
            on(self._like, positions),
            on(self._like, types),
            self._attention,
        )
        if asked is None:
            return EncoderOutput(())
        vectors = self._pooler(plan, asked, hidden)
        return EncoderOutput((PooledVectors(vectors, self._pooler.sizes(plan, asked)),))
