"""The parts of a runner if several ranks share the model; with one rank, the parts are the usual
ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.config.model import UnsupportedModel
from weft.executor.assembly import RunnerSpec
from weft.executor.device import StepDevice
from weft.executor.inputs import DeviceRowTable
from weft.executor.lockstep.steps import LockstepDevice, LockstepPass
from weft.executor.ranks.follower import FollowerSteps, FollowerTables, PpStageSteps
from weft.executor.ranks.leader import LeaderDrafting, LeaderPass
from weft.executor.ranks.sender import AnnouncingDevice, PlanSender
from weft.executor.runner import DecoderSteps, DeviceStore, ModelSteps, Pass, TorchRunner
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.joint import CppExperts, CppJoint, by_calls, by_memory, by_pipe, fuses
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.expert_parallel import ExpertsApart
from weft.ops.joint import TorchJoint
from weft.ops.placement import UNSPLIT, Placement
from weft.ops.plain import PlainExperts, PlainOps
from weft.ops.sharding import Sharded
from weft.ops.stages import Staged
from weft.parallel.lockstep import Lockstep


def placement_of(spec: RunnerSpec) -> Placement:
    """What this process holds of the model."""
    if spec.experts is not None:
        return ExpertsApart(spec.experts.peer_rank)
    if spec.ranks is None:
        return UNSPLIT
    if spec.ranks.pp_stage is not None:
        return Staged(spec.ranks.pp_stage)
    return Sharded(spec.ranks.group_rank)


def plain_ops(spec: RunnerSpec, on: torch.device) -> PlainOps:
    placement = placement_of(spec)
    ranks = spec.ranks
    joint = TorchJoint(peers=spec.experts)
    if ranks is not None:
        if isinstance(placement, Sharded) and ranks.collective is None:
            raise UnsupportedModel(
                "--dist-backend shm needs our CPU kernels, and torch computes here: take tcp"
            )
        joint = TorchJoint(ranks=ranks.collective, pipe=ranks.pipe)
    return PlainOps(spec.dtype, on, spec.model.quantize, placement, joint)


def cpp_ops(
    spec: RunnerSpec, library: Library, format: WeightFormat, beside: CppOps | None = None
) -> CppOps:
    """The ops of a model; of a head, those of its model stand `beside`: ranks meet in the same
    memory for both."""
    joint = _cpp_joint(spec, library) if beside is None else beside.joint
    return CppOps(
        library,
        format,
        keeps_codes=spec.model.keeps_codes,
        placement=placement_of(spec),
        joint=joint,
    )


def _cpp_joint(spec: RunnerSpec, library: Library) -> CppJoint | None:
    ranks = spec.ranks
    if spec.experts is not None:
        return CppJoint(peers=spec.experts, fuses=fuses(library))
    if ranks is None:
        return None
    if ranks.pipe is not None:
        return CppJoint(pipe_links=by_pipe(ranks.pipe, ranks.timeout_s))
    if ranks.memory is not None:
        return CppJoint(ranks=by_memory(ranks.group_rank, ranks.memory, ranks.timeout_s))
    assert ranks.collective is not None, "ranks that neither share memory nor are joined"
    return CppJoint(ranks=by_calls(ranks.collective, ranks.timeout_s))


def decoder_steps(spec: RunnerSpec, **parts: Any) -> DecoderSteps:
    """The steps of the whole model. `parts` are the arguments of `DecoderSteps`."""
    if spec.ranks is None or spec.ranks.followers is not None:
        return DecoderSteps(**parts)
    if spec.ranks.pp_stage is not None:
        return PpStageSteps(**parts)
    return FollowerSteps(**parts)


def computing(spec: RunnerSpec, fused: ModelSteps, unsplit: DecoderSteps) -> ModelSteps:
    """Steps that are one call of the kernels. A stage without a head has none, because it samples
    nothing, and neither have engines that compute experts for each other within a step."""
    is_cut = isinstance(unsplit, PpStageSteps) or spec.experts is not None
    return unsplit if is_cut else fused


def in_lockstep(
    spec: RunnerSpec,
    ops: PlainOps | CppOps,
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
    assert isinstance(ops.placement, ExpertsApart)
    layers = ops.placement.local(group.activations)
    if isinstance(ops, CppOps):
        group.begin(CppExperts(ops, layers))
    else:
        group.begin(PlainExperts(layers, spec.dtype))
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
    if sender is None or spec.ranks is None or spec.ranks.pp_stage is None:
        return device
    return AnnouncingDevice(device, sender)


def rank_passes(spec: RunnerSpec, rows: DeviceRowTable, sender: PlanSender | None) -> list[Pass]:
    """The pass that involves all ranks, on rank 0; the one that follows drafts, on other ranks."""
    if sender is not None:
        assert spec.ranks is not None
        return [LeaderPass(sender, is_staged=spec.ranks.pp_stage is not None)]
    if spec.ranks is not None and spec.engine.draft_model and spec.draft is None:
        return [FollowerTables(rows)]
    return []


def drafting_of_ranks(passes: Sequence[Pass]) -> list[Pass]:
    """The pass that lets other ranks know of plans for a draft model, if one of `passes` leads
    them."""
    return [LeaderDrafting(one.sender) for one in passes if isinstance(one, LeaderPass)]
