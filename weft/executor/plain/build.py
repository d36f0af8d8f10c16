"""Builds runners that compute in plain torch: on a CPU without weft's kernels, and on a GPU for
comparison."""

from __future__ import annotations

from typing import cast

import torch

from weft.executor.assembly import (
    RunnerSpec,
    adapter_passes,
    build_tower,
    copy_passes,
    fill_weights,
    make_adapter_table,
    make_encoded_pool,
    make_expert_recorder,
    make_kv_pool,
    make_pooler,
    make_state_pool,
    make_weight_store,
    media_passes,
    tensors_of,
)
from weft.executor.backend import AttentionBackend
from weft.executor.device import StepDevice
from weft.executor.heads.build import HeadMemory, make_head, make_head_memory
from weft.executor.heads.guessing import GuessPasses, HeadPass
from weft.executor.heads.ranks import head_pass
from weft.executor.heads.states import PlainKept, plain_spread
from weft.executor.heads.steps import HeadSteps
from weft.executor.inputs import DeviceRowTable
from weft.executor.kv_pool import KVPool
from weft.executor.outside.attention import fenced_backend, is_from_outside
from weft.executor.passes.experts import counting
from weft.executor.passes.split import split
from weft.executor.plain.attention import TorchPaged
from weft.executor.plain.encoded import TorchEncoded
from weft.executor.plain.encoder_attention import TorchBidirectional
from weft.executor.plain.states import TorchStates
from weft.executor.plain.step_check import require_same_steps
from weft.executor.plain.tower import TorchTowerBackend
from weft.executor.ranks.build import (
    announcing,
    decoder_steps,
    in_lockstep,
    plain_ops,
    plan_sender,
    rank_passes,
)
from weft.executor.ranks.sender import PlanSender
from weft.executor.runner import EncoderSteps, Pass, TorchRunner
from weft.models.decoder import Decoder
from weft.models.registry import make_encoder, make_model
from weft.ops.encoder import PlainEncoderOps
from weft.ops.lora import TorchAdapters
from weft.ops.sampling import TorchSamplerOps


def build_decoder(
    spec: RunnerSpec,
    device: StepDevice,
    rows: DeviceRowTable,
) -> TorchRunner:
    """A runner on the device of `rows`."""
    on = rows.slots.device
    pool = make_kv_pool(spec, on)
    ops = plain_ops(spec, on)
    attention = _make_attention(spec, pool)
    state_pool = make_state_pool(spec, on)
    states = None if state_pool is None else TorchStates(spec.model, state_pool)
    memory = make_head_memory(spec, on)
    keeper = None if memory is None else PlainKept(memory.states)
    encoded_pool = make_encoded_pool(spec, on)
    encoded = None if encoded_pool is None else TorchEncoded(encoded_pool)
    model = make_model(spec.model, ops, states, encoded, keeper)
    tower = build_tower(spec, lambda: TorchTowerBackend(spec.dtype, on))
    fill_weights(spec, model, on, tower)
    if spec.engine.max_loaded_loras:
        ops.adapters = TorchAdapters(spec.dtype, on)
    adapters = make_adapter_table(spec, model, ops.adapters)
    if spec.model.library_config:
        require_same_steps(spec, model, attention, rows)
    unsplit = decoder_steps(
        spec,
        model=model,
        attention=attention,
        sampler=TorchSamplerOps(),
        rows=rows,
        states=states,
        encoded=encoded,
        pooler=make_pooler(spec, model, on),
        processors=spec.processors,
        kept=keeper,
    )
    experts = make_expert_recorder(spec, ops)
    kept = tensors_of(pool, state_pool, encoded_pool)
    if memory is not None:
        kept = [*kept, *memory.tensors]
    weights = make_weight_store(spec, model, ops.tensors, kept, on, experts, adapters, tower)
    sender = plan_sender(spec, rows)
    passes = [
        *media_passes(spec, rows, tower, encoded),
        *rank_passes(spec, rows, sender),
        *adapter_passes(adapters),
        *copy_passes(spec, pool, [] if memory is None else [memory.states.kept]),
        *split(spec.engine, unsplit, model=model, attention=attention, rows=rows, experts=experts),
        *counting(experts),
    ]
    if memory is not None:
        passes = [_head_pass(memory, cast(Decoder, model), rows, sender), *passes]
    device = announcing(spec, device, sender)
    return in_lockstep(spec, ops, unsplit, weights, device, passes)


def _head_pass(
    memory: HeadMemory, model: Decoder, rows: DeviceRowTable, sender: PlanSender | None
) -> Pass:
    """The pass of the head with this memory, for a model with filled weights."""
    spec = memory.spec
    on = rows.slots.device
    follows = spec.ranks is not None and sender is None
    head = make_head(spec, plain_ops(spec, on), model, plain_spread, on)
    steps = HeadSteps(
        model=head,
        attention=_make_attention(spec, memory.pool),
        sampler=None if follows else TorchSamplerOps(),
        rows=rows.beside(),
        states=memory.states,
        dtype=spec.dtype,
    )
    if spec.ranks is not None:
        return head_pass(sender, steps.first, steps.later)
    return HeadPass(GuessPasses(steps.first, steps.later), memory.states)


def _make_attention(spec: RunnerSpec, pool: KVPool) -> AttentionBackend:
    """Raises SettingsError for a backend from outside that cannot be used."""
    name = spec.engine.attention_backend
    if is_from_outside(name):
        return fenced_backend(name, spec.attended, pool, spec.context_length)
    return TorchPaged(spec.attended, pool)


def build_encoder(
    spec: RunnerSpec,
    device: StepDevice,
    on: torch.device,
) -> TorchRunner:
    ops = PlainEncoderOps(spec.dtype, on, spec.model.quantize)
    model = make_encoder(spec.model, ops)
    fill_weights(spec, model, on)
    steps = EncoderSteps(
        model=model,
        attention=TorchBidirectional(spec.model.num_heads),
        pooler=make_pooler(spec, model, on),
        on_device=on,
    )
    store = make_weight_store(spec, model, ops.tensors, [], on)
    return TorchRunner(steps, store=store, device=device)
