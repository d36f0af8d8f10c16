"""The parts of a runner if several ranks share the model; with one rank, the parts are the usual
ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from weft.config.model import UnsupportedModel
from weft.executor.assembly import RunnerSpec
from weft.executor.device import StepDevice
from weft.executor.inputs import DeviceRowTable
from weft.executor.lockstep.steps import LockstepDevice, LockstepPass
from weft.executor.ranks.follower import FollowerSteps, FollowerTables, StageSteps
from weft.executor.ranks.leader import LeaderDrafting, LeaderPass
from weft.executor.ranks.sender import AnnouncingDevice, PlanSender
from weft.executor.runner import DecoderSteps, DeviceStore, ModelSteps, Pass, TorchRunner
from weft.executor.wire.followers import Ranks
from weft.models.layers.states import LayerStates
from weft.models.registry import DecoderModel, LayeredModel, make_model
from weft.models.staged import StagedDecoder
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.expert_parallel import CppExperts, ExpertParallelCppOps
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.sharded import RankLink, ShardedCppOps, by_calls, by_memory
from weft.ops.cpp.staged import CppHandover
from weft.ops.expert_parallel import ExpertParallelPlainOps, PlainExperts
from weft.ops.lora import AdapterOps
from weft.ops.plain import PlainOps
from weft.ops.protocol import Ops
from weft.ops.sharded import ShardedAdapters, ShardedPlainOps
from weft.ops.stages import Handover, Pipe, PlainHandover, PresentAdapters
from weft.parallel.lockstep import Lockstep


def plain_ops(spec: RunnerSpec, on: torch.device) -> PlainOps:
    if spec.experts is not None:
        return ExpertParallelPlainOps(
            spec.experts.place, spec.experts, spec.dtype, on, spec.model.quantize
        )
    if spec.ranks is None or spec.ranks.stage is not None:
        return PlainOps(spec.dtype, on, spec.model.quantize)
    collective = spec.ranks.collective
    if collective is None:
        raise UnsupportedModel(
            "--dist-backend shm needs our CPU kernels, and torch computes here: take tcp"
        )
    return ShardedPlainOps(collective, spec.dtype, on, spec.model.quantize)


def cpp_ops(spec: RunnerSpec, library: Library, format: WeightFormat) -> CppOps:
    keeps_codes = spec.model.keeps_codes
    if spec.experts is not None:
        place = spec.experts.place
        return ExpertParallelCppOps(place, spec.experts, library, format, keeps_codes=keeps_codes)
    if spec.ranks is None or spec.ranks.stage is not None:
        return CppOps(library, format, keeps_codes=keeps_codes)
    link = _rank_link(spec.ranks)
    return ShardedCppOps(link, library, format, keeps_codes=keeps_codes)


def _rank_link(ranks: Ranks) -> RankLink:
    if ranks.memory is not None:
        return by_memory(ranks.place, ranks.memory, ranks.timeout_s)
    assert ranks.collective is not None, "ranks that neither share memory nor are joined"
    return by_calls(ranks.collective, ranks.timeout_s)


def adapters_of(spec: RunnerSpec, adapters: AdapterOps | None) -> AdapterOps | None:
    if spec.ranks is None or adapters is None:
        return adapters
    if spec.ranks.stage is not None:
        return PresentAdapters(adapters)
    return ShardedAdapters(adapters)


def cpp_model(spec: RunnerSpec, ops: CppOps, states: LayerStates | None) -> LayeredModel:
    """The model, or the layers of it that this stage has."""
    if spec.ranks is None or spec.ranks.stage is None:
        return cast(LayeredModel, make_model(spec.model, ops, states))
    return _staged(spec.ranks, spec, ops, states, partial(CppHandover, ops))


def plain_model(spec: RunnerSpec, ops: PlainOps, states: LayerStates | None) -> DecoderModel:
    """The same with torch."""
    if spec.ranks is None or spec.ranks.stage is None:
        return make_model(spec.model, ops, states)

    def handover(pipe: Pipe, timeout_s: float) -> Handover:
        return PlainHandover(ops, pipe, spec.dtype)

    return _staged(spec.ranks, spec, ops, states, handover)


def _staged(
    ranks: Ranks,
    spec: RunnerSpec,
    ops: Ops,
    states: LayerStates | None,
    handover: Callable[[Pipe, float], Handover],
) -> StagedDecoder:
    assert ranks.stage is not None
    assert ranks.pipe is not None, "a stage without neighbours"
    made = handover(ranks.pipe, ranks.timeout_s)
    return StagedDecoder(spec.model, ops, states, place=ranks.stage, handover=made)


def decoder_steps(spec: RunnerSpec, **parts: Any) -> DecoderSteps:
    """The steps of the whole model. `parts` are the arguments of `DecoderSteps`."""
    if spec.ranks is None or spec.ranks.followers is not None:
        return DecoderSteps(**parts)
    if spec.ranks.stage is not None:
        return StageSteps(**parts)
    return FollowerSteps(**parts)


def computing(spec: RunnerSpec, fused: ModelSteps, whole: DecoderSteps) -> ModelSteps:
    """Steps that are one call of the kernels. A stage without a head has none, because it samples
    nothing, and neither have engines that compute experts for each other within a step."""
    is_cut = isinstance(whole, StageSteps) or spec.experts is not None
    return whole if is_cut else fused


def in_lockstep(
    spec: RunnerSpec,
    ops: Ops,
    steps: ModelSteps,
    store: DeviceStore,
    device: StepDevice,
    passes: Sequence[Pass],
) -> TorchRunner:
    """A runner of these parts; if engines share their experts, one that runs its steps together
    with theirs. Called after the weights have been filled."""
    kernels = ops.library if isinstance(ops, CppOps) else None
    group = spec.experts
    if group is None:
        return TorchRunner(steps, store=store, device=device, passes=passes, kernels=kernels)
    if isinstance(ops, ExpertParallelCppOps):
        group.begin(CppExperts(ops, ops.layers.local(group.activations)))
    elif isinstance(ops, ExpertParallelPlainOps):
        group.begin(PlainExperts(ops.layers.local(group.activations), spec.dtype))
    lockstep = Lockstep(group.peers, group.idle)
    return TorchRunner(
        steps,
        store=store,
        device=LockstepDevice(spec.thread, lockstep),
        passes=[LockstepPass(lockstep), *passes],
        kernels=kernels,
    )


def plan_sender(spec: RunnerSpec, rows: DeviceRowTable) -> PlanSender | None:
    """The sender of plans to other ranks, if this is rank 0."""
    if spec.ranks is None or spec.ranks.followers is None:
        return None
    return PlanSender(spec.ranks.followers, rows)


def announcing(spec: RunnerSpec, device: StepDevice, sender: PlanSender | None) -> StepDevice:
    """The device; if stages share the model, one that sends each plan to the earlier stages when it
    is launched."""
    if sender is None or spec.ranks is None or spec.ranks.stage is None:
        return device
    return AnnouncingDevice(device, sender)


def rank_passes(spec: RunnerSpec, rows: DeviceRowTable, sender: PlanSender | None) -> list[Pass]:
    """The pass that involves all ranks, on rank 0; the one that follows drafts, on other ranks."""
    if sender is not None:
        assert spec.ranks is not None
        return [LeaderPass(sender, is_staged=spec.ranks.stage is not None)]
    if spec.ranks is not None and spec.engine.draft_model:
        return [FollowerTables(rows)]
    return []


def drafting_of_ranks(passes: Sequence[Pass]) -> list[Pass]:
    """The pass that lets other ranks know of plans for a draft model, if one of `passes` leads
    them."""
    return [LeaderDrafting(one.sender) for one in passes if isinstance(one, LeaderPass)]
