"""Runners on a CPU: by our kernels, or by torch where the kernels cannot be had."""

from __future__ import annotations

import torch

from weft.config.model import ModelError
from weft.executor.assembly import (
    RunnerSpec,
    fill_weights,
    make_expert_recorder,
    make_kv_pool,
    make_pooler,
    make_weight_store,
)
from weft.executor.cpu.at_once import CppPagedAtOnce, CppProducts
from weft.executor.cpu.attention import CppPaged
from weft.executor.cpu.device import CpuDevice, InlineCpuDevice
from weft.executor.cpu.encoder_attention import CppBidirectional
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.executor.cpu.program_model import ProgramEncoder, ProgramModel
from weft.executor.device import StepDevice
from weft.executor.experts.recorder import recorded
from weft.executor.inputs import DeviceRowTable
from weft.executor.plain import build as plain
from weft.executor.plain.step_check import require_same_steps
from weft.executor.runner import DecoderSteps, EncoderSteps, TorchRunner
from weft.models.registry import make_encoder, make_model
from weft.models.transformers_backend.model import TransformersModel
from weft.observe.log import EventLog
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.encoder import CppEncoderOps
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.sampling import CppSamplerOps

CPU = torch.device("cpu")
FORMATS = {  # of weights that our kernels read
    "float32": WeightFormat.F32,
    "bfloat16": WeightFormat.BF16,
    "int8": WeightFormat.I8,
    "int4": WeightFormat.I4,
}
KV_DTYPES = ("float32", "bfloat16", "int8")

log = EventLog("engine")


class KernelsUnavailable(ModelError):
    """The user asked for kernels by name, and they cannot be had."""


def build_decoder(spec: RunnerSpec) -> TorchRunner:
    """A runner of programs. Steps that our kernels compute whole run as one call of the library."""
    library = find_kernels(spec)
    has_windows = spec.window_tokens > 0
    rows = DeviceRowTable(spec.max_rows, spec.context_length, CPU, has_windows=has_windows)
    if library is None:
        if spec.model.kv_dtype == "int8":
            raise KernelsUnavailable(
                "--kv-dtype is int8, which only our CPU kernels read; torch would compute here"
            )
        return plain.build_decoder(spec, CpuDevice(spec.thread), rows)
    library.num_threads = spec.engine.threads
    if spec.model.library_config:
        return _build_by_transformers(spec, library, rows)
    pool = make_kv_pool(spec, CPU)
    ops = CppOps(library, _weight_format(spec), keeps_codes=spec.model.keeps_codes)
    attention = CppPaged(
        spec.model,
        pool,
        ops,
        spec.context_length,
    )
    decoder = make_model(spec.model, ops)
    model = ProgramModel(
        decoder,
        ops,
        attention,
        spec.model.hidden_size,
    )
    fill_weights(spec, model, CPU)
    steps = DecoderSteps(
        model=model,
        attention=attention,
        sampler=CppSamplerOps(library),
        rows=rows,
        pooler=make_pooler(spec, model, CPU),
        processors=spec.processors,
    )
    experts = make_expert_recorder(spec, ops)
    return TorchRunner(
        recorded(CpuFusedSteps(model, rows, library, otherwise=steps), experts),
        store=make_weight_store(spec, model, ops.tensors, pool.tensors, CPU, experts),
        device=_device(spec),
        kernels=library,
    )


def _build_by_transformers(spec: RunnerSpec, library: Library, rows: DeviceRowTable) -> TorchRunner:
    """A runner whose matrix products, attention and sampling are our kernels, and whose model is
    Python at every step."""
    # torch's threads and ours would wait for each other on the same cores: torch, which has the
    # small work between products, gets one. This is the thread that computes.
    torch.set_num_threads(1)
    pool = make_kv_pool(spec, CPU)
    products = CppProducts(library, _weight_format(spec), keeps_codes=spec.model.keeps_codes)
    attention = CppPagedAtOnce(
        spec.model,
        pool,
        library,
        spec.context_length,
    )
    model = TransformersModel(spec.model, products)
    fill_weights(spec, model, CPU)
    require_same_steps(spec, model, attention, rows)
    steps = DecoderSteps(
        model=model,
        attention=attention,
        sampler=CppSamplerOps(library),
        rows=rows,
        pooler=make_pooler(spec, model, CPU),
        processors=spec.processors,
    )
    return TorchRunner(
        steps,
        store=make_weight_store(spec, model, products.tensors, pool.tensors, CPU),
        device=CpuDevice(spec.thread),
        kernels=library,
    )


def build_encoder(spec: RunnerSpec) -> TorchRunner:
    library = find_kernels(spec)
    if library is None:
        return plain.build_encoder(spec, CpuDevice(spec.thread), CPU)
    library.num_threads = spec.engine.threads
    ops = CppEncoderOps(library, _weight_format(spec))
    attention = CppBidirectional(spec.model, ops)
    model = ProgramEncoder(
        make_encoder(spec.model, ops),
        ops,
        attention,
        spec.model.hidden_size,
    )
    fill_weights(spec, model, CPU)
    steps = EncoderSteps(
        model=model,
        attention=attention,
        pooler=make_pooler(spec, model, CPU),
        on_device=CPU,
    )
    return TorchRunner(
        steps,
        store=make_weight_store(spec, model, ops.tensors, [], CPU),
        device=_device(spec),
        kernels=library,
    )


def find_kernels(spec: RunnerSpec) -> Library | None:
    """The kernel library, if it is to compute. Raises `KernelsUnavailable` if the user asked for it
    by name and it cannot be had."""
    engine = spec.engine
    if engine.kernels == "torch" or engine.attention_backend != "auto":
        return None
    config = spec.model
    reads_weights = (config.quantize or config.dtype) in FORMATS
    reads_kv = (config.kv_dtype or config.dtype) in KV_DTYPES
    if not reads_weights or not reads_kv:
        return None
    try:
        return load("" if engine.kernels == "auto" else engine.kernels)
    except Unavailable as exc:
        # A choice by name is a promise about speed; "auto" only wants an engine that starts.
        if engine.kernels != "auto":
            raise KernelsUnavailable(f"--kernels is {engine.kernels}, but {exc}") from exc
        log.warning(f"torch computes, several times slower than our own kernels would: {exc}")
        return None


def _weight_format(spec: RunnerSpec) -> WeightFormat:
    return FORMATS[spec.model.quantize or spec.model.dtype]


def _device(spec: RunnerSpec) -> StepDevice:
    """Without overlap the caller's thread computes: it would only wait for the other one."""
    if spec.engine.overlap:
        return CpuDevice(spec.thread)
    return InlineCpuDevice(spec.thread)
