"""What a runner is put together from where several ranks hold the model; with one rank, it is what
it would be without any of this."""

from __future__ import annotations

from typing import Any

import torch

from weft.config.model import UnsupportedModel
from weft.executor.assembly import RunnerSpec
from weft.executor.inputs import DeviceRowTable
from weft.executor.ranks.follower import FollowerSteps, FollowerTables
from weft.executor.ranks.leader import LeaderDrafting, LeaderSteps, LeaderStore
from weft.executor.runner import DecoderSteps, DeviceStore, ModelSteps
from weft.executor.wire.followers import Ranks
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.sharded import RankLink, ShardedCppOps, by_calls, by_memory
from weft.ops.lora import AdapterOps
from weft.ops.plain import PlainOps
from weft.ops.sharded import ShardedAdapters, ShardedPlainOps


def plain_ops(spec: RunnerSpec, on: torch.device) -> PlainOps:
    if spec.ranks is None:
        return PlainOps(spec.dtype, on, spec.model.quantize)
    collective = spec.ranks.collective
    if collective is None:
        raise UnsupportedModel(
            "--dist-backend shm needs our CPU kernels, and torch computes here: take gloo"
        )
    return ShardedPlainOps(collective, spec.dtype, on, spec.model.quantize)


def cpp_ops(spec: RunnerSpec, library: Library, format: WeightFormat) -> CppOps:
    keeps_codes = spec.model.keeps_codes
    if spec.ranks is None:
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
    return ShardedAdapters(adapters)


def decoder_steps(spec: RunnerSpec, **parts: Any) -> DecoderSteps:
    """The steps of the whole model. `parts` are those of `DecoderSteps`."""
    if spec.ranks is None or spec.ranks.place.rank == 0:
        return DecoderSteps(**parts)
    return FollowerSteps(**parts)


def with_ranks(
    spec: RunnerSpec, steps: ModelSteps, store: DeviceStore, rows: DeviceRowTable
) -> tuple[ModelSteps, DeviceStore]:
    """The steps and the store, done by all ranks if this one decides."""
    if spec.ranks is None:
        return steps, store
    followers = spec.ranks.followers
    if followers is not None:
        return LeaderSteps(steps, followers, rows), LeaderStore(store, followers)
    if spec.engine.draft_model:
        return FollowerTables(steps, rows), store
    return steps, store


def with_drafting(spec: RunnerSpec, steps: ModelSteps, rows: DeviceRowTable) -> ModelSteps:
    """The steps of a model and of its draft model, of which all ranks hear if this one decides."""
    if spec.ranks is None or spec.ranks.followers is None:
        return steps
    return LeaderDrafting(steps, spec.ranks.followers, rows)
