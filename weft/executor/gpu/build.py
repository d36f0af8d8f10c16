"""Builds runners on a GPU: with weft's Triton kernels and the attention backend of the settings; or
with torch alone (`--attention-backend torch`), which launches more kernels, captures no graphs and
waits for its copies, and is there for comparison."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from weft.config.engine import GPU_ATTENTION_BACKENDS, EngineConfig
from weft.config.gpu import graph_sizes, prompt_graph_sizes
from weft.config.model import ModelConfig, ModelError, UnsupportedModel
from weft.executor.assembly import (
    RunnerSpec,
    adapter_passes,
    build_tower,
    copy_passes,
    fill_weights,
    make_adapter_table,
    make_expert_recorder,
    make_kv_pool,
    make_pooler,
    make_state_pool,
    make_weight_store,
    media_passes,
    tensors_of,
)
from weft.executor.gpu.device import GpuDevice
from weft.executor.gpu.gpu import Gpu
from weft.executor.gpu.graphs import AdapterGraphs, GraphParts, StepGraphs
from weft.executor.gpu.layout import GpuAttentionBackend
from weft.executor.gpu.staging import GpuUploader, H2DBuffer
from weft.executor.gpu.staging import split as split_numbers
from weft.executor.inputs import DeviceRowTable
from weft.executor.kv_pool import KVPool, StatePool
from weft.executor.outside.attention import METHODS, own_backend
from weft.executor.overlap.runs import DeviceRuns
from weft.executor.passes.experts import counting
from weft.executor.passes.split import split
from weft.executor.plain import build as plain
from weft.executor.plain.step_check import require_same_steps
from weft.executor.plain.tower import TorchTowerBackend
from weft.executor.runner import CapturedSteps, DecoderSteps, TorchRunner
from weft.models.registry import make_model
from weft.ops.protocol import Ops
from weft.ops.sampling import SamplerOps

if TYPE_CHECKING:
    from weft.executor.gpu.states import TritonStates
    from weft.ops.triton.lora import TritonAdapters

DEFAULT_BACKEND = "triton"


class NoGpu(ModelError):
    """The driver reports a GPU, but torch cannot use it."""


class NoTriton(ModelError):
    """The kernels for GPUs are not available."""


class GpuKernels(NamedTuple):
    """The functions that compute a step on a GPU."""

    ops: Ops
    attention: GpuAttentionBackend
    sampler: SamplerOps


def find_gpu() -> Gpu:
    """The GPU to compute on. Raises NoGpu."""
    from weft.executor.gpu.cuda import Cuda

    try:
        return Cuda()
    except RuntimeError as exc:
        reason = str(exc).partition("\n")[0]
        raise NoGpu(
            f"torch cannot use the GPU that the driver shows ({reason}); "
            "--device cpu can do without"
        ) from exc


def build_decoder(spec: RunnerSpec, gpu: Gpu) -> TorchRunner:
    """A runner whose decode steps and short prompts are captured as graphs. Raises
    UnsupportedModel for what our kernels do not compute."""
    by_torch = spec.engine.attention_backend == "torch"
    without_kernels = _without_kernels(spec.model)
    if without_kernels and not by_torch:
        raise UnsupportedModel(
            f"{spec.model.name} {without_kernels}, for which a GPU has no kernels as yet: "
            "--attention-backend torch, or --device cpu"
        )
    device = GpuDevice(gpu, spec.thread)
    buffer = H2DBuffer(gpu)
    # All tensors are made on our stream, so that the first step need not wait for another one.
    with gpu.stream():
        if by_torch:
            uploader = GpuUploader(buffer, None)
            rows = _make_rows(spec, gpu, uploader)
            return plain.build_decoder(spec, device, rows)
        pool = make_kv_pool(spec, gpu.device)
        kernels = gpu_kernels(
            spec.engine,
            spec.model,
            pool,
            spec.context_length,
        )
        uploader = GpuUploader(buffer, kernels.attention.tiling)
        state_pool = make_state_pool(spec, gpu.device)
        states = _make_states(spec.model, state_pool, uploader)
        model = make_model(spec.model, kernels.ops, states)
        rows = _make_rows(spec, gpu, uploader)
        tower = build_tower(spec, lambda: TorchTowerBackend(spec.dtype, gpu.device))
        fill_weights(spec, model, gpu.device, tower)
        pooler = make_pooler(spec, model, gpu.device)
        adapter_ops = _make_adapters(spec, kernels, gpu, buffer)
        adapters = make_adapter_table(spec, model, adapter_ops)
    # Graphs come after the weights: a capture runs the step and keeps the addresses of all tensors.
    graphs: CapturedSteps | None = None
    if spec.model.library_config:
        # Its Python code may read values from the device, which a capture does not allow.
        require_same_steps(spec, model, kernels.attention, rows)
    elif spec.engine.cuda_graph and not spec.model.has_experts:
        # Only the chosen experts run, one after another, so the host must know which were chosen.
        parts = GraphParts(model, kernels.attention, rows, uploader, states)
        make = partial(
            StepGraphs,
            gpu,
            parts,
            decodes=graph_sizes(spec.engine),
            prompts=prompt_graph_sizes(spec.engine),
        )
        plain_graphs = make()
        plain_graphs.capture()
        graphs = plain_graphs
        if adapter_ops is not None:
            with adapter_ops.captured():
                with_all = make()
                with_all.capture()
            graphs = AdapterGraphs(plain_graphs, with_all)
    steps_with = partial(
        DecoderSteps,
        model=model,
        attention=kernels.attention,
        sampler=kernels.sampler,
        rows=rows,
        states=states,
        pooler=pooler,
        processors=spec.processors,
    )
    experts = make_expert_recorder(spec, kernels.ops)
    eager = steps_with(graphs=None)
    tensors = kernels.ops.tensors
    kept = tensors_of(pool, state_pool)
    weights = make_weight_store(spec, model, tensors, kept, gpu.device, experts, adapters, tower)
    passes = [
        *media_passes(spec, rows, tower),
        *adapter_passes(adapters),
        *copy_passes(spec, pool),
        *split(
            spec.engine, eager, model=model, attention=kernels.attention, rows=rows, experts=experts
        ),
        *counting(experts, eager.compute),
    ]
    return TorchRunner(steps_with(graphs=graphs), store=weights, device=device, passes=passes)


def _without_kernels(model: ModelConfig) -> str:
    """What a model does that our kernels for GPUs do not compute, as a part of a sentence; "" for
    nothing."""
    if model.latent is not None:
        return "attends by latents"
    if model.norms_rotated:
        return "norms rotated heads"
    if model.decoder.cross is not None:
        return "attends to an encoder's vectors"
    if not model.has_one_kv_shape:
        return "keeps K and V of other sizes in some layers"
    for layer in model.decoder.layers:
        attention = layer.attention
        if model.library_config:
            continue  # its code does this itself
        if attention.alibi:
            return "changes scores by distance"
        if attention.kv_of is not None or attention.values_are_keys or attention.norms_values:
            return "norms values, or takes them from keys or from other layers"
    return ""


def _make_states(
    model: ModelConfig, pool: StatePool | None, uploader: GpuUploader
) -> TritonStates | None:
    """The states of the layers that keep one, if there are any."""
    if pool is None:
        return None
    from weft.executor.gpu.states import TritonStates

    return TritonStates(model, pool, uploader.as_they_are)


def _make_rows(spec: RunnerSpec, gpu: Gpu, uploader: GpuUploader) -> DeviceRowTable:
    # Steps of graphs are padded with a row that no request has.
    num_rows = spec.max_rows + 1
    rows = DeviceRowTable(
        num_rows,
        spec.context_length,
        gpu.device,
        uploader,
        has_windows=spec.window_tokens > 0,
    )
    if spec.engine.keeps_runs:
        rows.runs = DeviceRuns(num_rows, spec.engine.max_draft, gpu.device)
    return rows


def build_encoder(spec: RunnerSpec, gpu: Gpu) -> TorchRunner:
    with gpu.stream():
        return plain.build_encoder(spec, GpuDevice(gpu, spec.thread), gpu.device)


def _make_adapters(
    spec: RunnerSpec, kernels: GpuKernels, gpu: Gpu, buffer: H2DBuffer
) -> TritonAdapters | None:
    """The adapters that the kernels add, which read the numbers of a step from the same memory as
    the graphs."""
    if not spec.engine.max_loaded_loras:
        return None
    from weft.ops.triton.lora import TritonAdapters
    from weft.ops.triton.ops import TritonOps

    ops = cast(TritonOps, kernels.ops)
    sizes = [0]
    if spec.engine.cuda_graph and not spec.model.has_experts:
        sizes += [*graph_sizes(spec.engine), *prompt_graph_sizes(spec.engine)]
    ops.adapters = TritonAdapters(
        spec.dtype,
        gpu.device,
        spec.engine.max_loaded_loras,
        buffer.send,
        split_numbers,
        graph_tokens=max(sizes),
    )
    return ops.adapters


def gpu_kernels(
    engine: EngineConfig,
    config: ModelConfig,
    pool: KVPool,
    context_length: int,
) -> GpuKernels:
    """Raises NoTriton without the package triton, and ValueError for an unknown backend or a type
    of KV that the backend cannot read."""
    try:
        from weft.ops.triton.ops import TritonOps
        from weft.ops.triton.sampling import TritonSamplerOps

        attention = _make_attention(engine, config, pool, context_length)
    except ImportError as exc:
        raise NoTriton(
            "the kernels for GPUs need the package triton, which comes with torch for CUDA "
            f"({exc}); --attention-backend torch does without, slowly"
        ) from exc
    dtype = getattr(torch, config.dtype)
    ops = TritonOps(dtype, pool.k[0].device, config.quantize)
    return GpuKernels(ops, attention, TritonSamplerOps())


def _make_attention(
    engine: EngineConfig,
    config: ModelConfig,
    pool: KVPool,
    context_length: int,
) -> GpuAttentionBackend:
    name = engine.attention_backend
    if name == "auto":
        name = DEFAULT_BACKEND
    if name not in GPU_ATTENTION_BACKENDS:
        needs = (*METHODS, "tiling", "expect")
        own = own_backend(name, config, pool, context_length, needs)
        return cast(GpuAttentionBackend, own)
    module, _, cls = GPU_ATTENTION_BACKENDS[name].partition(":")
    make = getattr(import_module(module), cls)
    return cast(GpuAttentionBackend, make(config, pool, context_length))
