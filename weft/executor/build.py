"""Puts a runner together: model, weights, KV pool, attention."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from weft.config.engine import EngineConfig
from weft.config.gpu import graph_sizes, prompt_graph_sizes
from weft.config.model import ModelConfig, ModelError
from weft.config.resolve import kept_as
from weft.executor.backend import AttentionBackend, make_backend
from weft.executor.cpu.attention import CppPaged
from weft.executor.cpu.device import CallersThread, Cpu, worker_thread
from weft.executor.cpu.encoder_attention import CppWhole
from weft.executor.cpu.fused_step import WholeSteps
from weft.executor.cpu.program_encoder import RecordedEncoder
from weft.executor.cpu.program_model import RecordedModel
from weft.executor.device import Device
from weft.executor.encoder_runner import EncoderRunner, StepAttention
from weft.executor.gpu.gpu import Gpu
from weft.executor.gpu.graphs import GraphParts, StepGraphs
from weft.executor.gpu.packing import Packing
from weft.executor.gpu.parts import gpu_parts
from weft.executor.gpu.staging import Staging
from weft.executor.gpu.streams import GpuStream
from weft.executor.inputs import RowTable
from weft.executor.kv_pool import KVPool
from weft.executor.logit_processors.processors import Processors
from weft.executor.outputs.pooling import Pooler
from weft.executor.plain.encoder_attention import Whole
from weft.executor.runner import TorchRunner
from weft.executor.weights.keeper import Keeper, Kept
from weft.executor.weights.load import load_weights, randomize
from weft.executor.weights.root import WeightsRoot, default_root
from weft.executor.weights.scales import kv_scales
from weft.models.registry import Encoder, Model, make_encoder, make_model
from weft.observe.log import EventLog
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.encoder import CppEncoderOps
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.sampling import CppChoose
from weft.ops.encoder import EncoderOps, PlainEncoderOps
from weft.ops.plain import PlainOps
from weft.ops.protocol import Ops
from weft.ops.sampling import Choose, TorchChoose

FORMATS = {  # of weights that our kernels read
    "float32": WeightFormat.F32,
    "bfloat16": WeightFormat.BF16,
    "int8": WeightFormat.I8,
    "int4": WeightFormat.I4,
}

KV_DTYPES = ("float32", "bfloat16", "int8")

log = EventLog("engine")


class KernelsUnavailable(ModelError):
    """Kernels that were asked for by name cannot be had."""


class NoGpu(ModelError):
    """The driver shows a GPU, and torch cannot use it."""


def load_runner(
    engine: EngineConfig,
    model: ModelConfig,
    *,
    folder: Path,
    kv_tokens: int,
    page_size: int,
    max_rows: int,
    context_length: int,
    processors: Processors | None = None,
) -> TorchRunner | EncoderRunner:
    """Load the model in `folder` and make room for `kv_tokens` slots and `max_rows` requests.

    Slots are 0 to kv_tokens - 1, rows 0 to max_rows - 1. Raises `ModelError` if the weights cannot be used, ValueError
    for an unknown attention backend.
    """
    assert kv_tokens % page_size == 0, "the KV pool consists of whole pages"
    thread = worker_thread(engine.threads)
    try:
        room = Room(kv_tokens, max_rows, context_length)
        gpu = find_gpu(engine)
        if model.is_encoder:
            return thread.submit(_load_encoder, engine, model, folder, room, thread, gpu).result()
        return thread.submit(_load, engine, model, folder, room, thread, gpu, processors).result()
    except BaseException:
        thread.shutdown()
        raise


def find_gpu(engine: EngineConfig) -> Gpu | None:
    """The GPU, if one is to compute. Raises NoGpu."""
    if engine.device != "cuda":
        return None
    from weft.executor.gpu.cuda import Cuda

    try:
        return Cuda()
    except RuntimeError as exc:
        reason = str(exc).partition("\n")[0]
        raise NoGpu(
            f"torch cannot use the GPU that the driver shows ({reason}); --device cpu can do without"
        ) from exc


class Room(NamedTuple):
    """What there is to be room for."""

    kv_tokens: int
    max_rows: int
    context_length: int


class Parts(NamedTuple):
    """What a runner is put together from, for one kind of device."""

    model: Model
    ops: Ops
    attention: AttentionBackend
    choose: Choose
    rows: RowTable
    device: Device
    graphs: StepGraphs | None = None
    whole_steps: WholeSteps | None = None
    kernels: Library | None = None


def _load(
    engine: EngineConfig,
    config: ModelConfig,
    folder: Path,
    room: Room,
    thread: Executor,
    gpu: Gpu | None,
    processors: Processors | None = None,
) -> TorchRunner:
    config = kept_as(engine, config)
    with nullcontext() if gpu is None else gpu.stream():
        place = torch.device("cpu") if gpu is None else gpu.device
        kv_dtype = getattr(torch, config.kv_dtype or config.dtype)
        pool = KVPool(
            config, room.kv_tokens, place, kv_dtype, _layer_scales(engine, config, folder)
        )
        if gpu is None:
            parts = _on_cpu(engine, config, pool, room, thread)
        else:
            parts = _on_gpu(engine, config, pool, room, thread, gpu)
        _fill(engine, parts.model, folder, place)
        pooler = Pooler(config, parts.model.normed, parts.model.logits, room.max_rows, place)
    if parts.graphs is not None:
        parts.graphs.capture()
    keeper = _keeper(engine, Kept(parts.model, config, parts.ops.kept, pool.tensors, place), folder)
    return TorchRunner(
        *(
            parts.model,
            parts.attention,
            parts.choose,
            parts.rows,
            keeper,
            parts.device,
            parts.graphs,
        ),
        whole_steps=parts.whole_steps,
        processors=processors,
        pooler=pooler,
        kernels=parts.kernels,
    )


def _load_encoder(
    engine: EngineConfig,
    config: ModelConfig,
    folder: Path,
    room: Room,
    thread: Executor,
    gpu: Gpu | None,
) -> EncoderRunner:
    """An encoder: our kernels on a CPU, or torch. `room` is the scheduler's: nothing lies there."""
    config = kept_as(engine, config)
    library = cpu_kernels(engine, config) if gpu is None else None
    with nullcontext() if gpu is None else gpu.stream():
        place = torch.device("cpu") if gpu is None else gpu.device
        parts = (
            _torch_encoder(config, place)
            if library is None
            else _cpp_encoder(engine, config, library)
        )
        _fill(engine, parts.model, folder, place)
        pooler = Pooler(config, parts.model.normed, parts.model.logits, room.max_rows, place)
    keeper = _keeper(engine, Kept(parts.model, config, parts.ops.kept, [], place), folder)
    if gpu is not None:
        device: Device = GpuStream(gpu, thread)
    else:
        device = (
            Cpu(thread, CallersThread())
            if library is not None and not engine.overlap
            else Cpu(thread)
        )
    return EncoderRunner(
        parts.model, parts.attention, pooler, keeper, place, device, kernels=library
    )


class EncoderParts(NamedTuple):
    """What an encoder's runner is put together from, by who computes."""

    model: Encoder
    ops: EncoderOps
    attention: StepAttention


def _torch_encoder(config: ModelConfig, place: torch.device) -> EncoderParts:
    ops = PlainEncoderOps(getattr(torch, config.dtype), place, config.quantize)
    return EncoderParts(make_encoder(config, ops), ops, Whole(config))


def _cpp_encoder(engine: EngineConfig, config: ModelConfig, library: Library) -> EncoderParts:
    library.num_threads = engine.threads
    recording = CppEncoderOps(library, FORMATS[config.quantize or config.dtype])
    whole = CppWhole(config, recording)
    return EncoderParts(
        RecordedEncoder(make_encoder(config, recording), recording, whole), recording, whole
    )


def _layer_scales(
    engine: EngineConfig, config: ModelConfig, folder: Path
) -> list[tuple[float, float]] | None:
    """Those of K and V that the checkpoint brings for a cache in fp8."""
    if config.kv_dtype != "float8_e4m3fn" or engine.load_format == "dummy":
        return None
    return kv_scales(folder, config.num_layers)


def _fill(engine: EngineConfig, model: Model | Encoder, folder: Path, place: torch.device) -> None:
    """Give the model its weights."""
    if engine.load_format == "dummy":
        randomize(model.weights(), place)
    else:
        load_weights(model.weights(), folder)


def _keeper(engine: EngineConfig, kept: Kept, folder: Path) -> Keeper:
    source = None if engine.load_format == "dummy" else folder.resolve()
    root = WeightsRoot(
        Path(engine.weights_root).expanduser() if engine.weights_root else default_root(folder)
    )
    return Keeper(kept, source, root)


def _on_cpu(
    engine: EngineConfig, config: ModelConfig, pool: KVPool, room: Room, thread: Executor
) -> Parts:
    """By our kernels, or by torch where they cannot be had."""
    cpu = torch.device("cpu")
    rows = RowTable(room.max_rows, room.context_length, cpu)
    library = cpu_kernels(engine, config)
    if library is None:
        if config.kv_dtype == "int8":
            raise KernelsUnavailable(
                "--kv-dtype is int8, which only our CPU kernels read; torch would compute here"
            )
        ops = PlainOps(getattr(torch, config.dtype), cpu, config.quantize)
        backend = "torch" if engine.attention_backend == "auto" else engine.attention_backend
        attention = make_backend(backend, config, pool)
        return Parts(make_model(config, ops), ops, attention, TorchChoose(), rows, Cpu(thread))
    recording = CppOps(library, FORMATS[config.quantize or config.dtype])
    paged = CppPaged(config, pool, recording, room.context_length)
    model = RecordedModel(make_model(config, recording), recording, paged, config.hidden_size)
    library.num_threads = engine.threads
    device = Cpu(thread) if engine.overlap else Cpu(thread, CallersThread())
    whole_steps = WholeSteps(model, rows, library)
    return Parts(
        model,
        recording,
        paged,
        CppChoose(library),
        rows,
        device,
        whole_steps=whole_steps,
        kernels=library,
    )


def _on_gpu(
    engine: EngineConfig, config: ModelConfig, pool: KVPool, room: Room, thread: Executor, gpu: Gpu
) -> Parts:
    """By our Triton kernels and torch. The row table has a line more than requests may run, for steps of graphs that
    are filled up."""
    ops, attention, graphable, choose = gpu_parts(engine, config, pool, room.context_length, gpu)
    model = make_model(config, ops)
    packing = Packing(Staging(gpu), None if graphable is None else graphable.tiling)
    rows = RowTable(room.max_rows + 1, room.context_length, gpu.device, packing)
    graphs = None
    if graphable is not None and engine.cuda_graph:
        parts = GraphParts(model, graphable, rows, packing)
        graphs = StepGraphs(gpu, parts, graph_sizes(engine), prompt_graph_sizes(engine))
    return Parts(model, ops, attention, choose, rows, GpuStream(gpu, thread), graphs)


def cpu_kernels(engine: EngineConfig, config: ModelConfig) -> Library | None:
    """The kernel library, if it is to compute. Raises `ModelError` if it was asked for by name and cannot."""
    wants_torch = engine.kernels == "torch" or engine.attention_backend != "auto"
    known = (config.quantize or config.dtype) in FORMATS and (
        config.kv_dtype or config.dtype
    ) in KV_DTYPES
    if wants_torch or not known:
        return None
    try:
        return load("" if engine.kernels == "auto" else engine.kernels)
    except Unavailable as exc:
        if engine.kernels != "auto":
            raise KernelsUnavailable(f"--kernels is {engine.kernels}, but {exc}") from exc
        log.warning(f"torch computes, several times slower than our own kernels would: {exc}")
        return None
