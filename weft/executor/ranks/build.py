"""What a runner is put together from where several ranks hold the model; with one rank, it is what
it would be without any of this."""

from __future__ import annotations

from typing import Any

import torch

from weft.executor.assembly import RunnerSpec
from weft.executor.inputs import DeviceRowTable
from weft.executor.ranks.follower import FollowerSteps
from weft.executor.ranks.leader import LeaderSteps, LeaderStore
from weft.executor.runner import DecoderSteps, DeviceStore, ModelSteps
from weft.ops.lora import AdapterOps
from weft.ops.plain import PlainOps
from weft.ops.sharded import ShardedAdapters, ShardedPlainOps


def plain_ops(spec: RunnerSpec, on: torch.device) -> PlainOps:
    if spec.ranks is None:
        return PlainOps(spec.dtype, on, spec.model.quantize)
    return ShardedPlainOps(spec.ranks.collective, spec.dtype, on, spec.model.quantize)


def adapters_of(spec: RunnerSpec, adapters: AdapterOps | None) -> AdapterOps | None:
    if spec.ranks is None or adapters is None:
        return adapters
    return ShardedAdapters(adapters)


def decoder_steps(spec: RunnerSpec, **parts: Any) -> DecoderSteps:
    """The steps of the whole model. `parts` are those of `DecoderSteps`."""
    if spec.ranks is None or spec.ranks.collective.rank == 0:
        return DecoderSteps(**parts)
    return FollowerSteps(**parts)


def with_ranks(
    spec: RunnerSpec, steps: ModelSteps, store: DeviceStore, rows: DeviceRowTable
) -> tuple[ModelSteps, DeviceStore]:
    """The steps and the store, done by all ranks if this one decides."""
    if spec.ranks is None or spec.ranks.followers is None:
        return steps, store
    followers = spec.ranks.followers
    return LeaderSteps(steps, followers, rows.last_tokens), LeaderStore(store, followers)
