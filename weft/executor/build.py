"""Puts a runner together: model, weights, KV pool, attention."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

import torch

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig, ModelError
from weft.config.resolve import kept_as
from weft.executor.attention.cpp_paged import CppPaged
from weft.executor.backend import AttentionBackend, make_backend
from weft.executor.device.cpu import CallersThread, worker_thread
from weft.executor.inputs import RowTable
from weft.executor.kv_pool import KVPool
from weft.executor.recorded import RecordedModel
from weft.executor.runner import TorchRunner
from weft.executor.weights.keeper import Keeper, Kept
from weft.executor.weights.load import load_weights, randomize
from weft.executor.weights.root import WeightsRoot, default_root
from weft.models.registry import Model, make_model
from weft.observe.log import EventLog
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.sampling import CppChoose
from weft.ops.plain import PlainOps
from weft.ops.protocol import Ops
from weft.ops.sampling import Choose, TorchChoose

BITS = {"": 0, "int8": 8, "int4": 4}
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


def load_runner(
    engine: EngineConfig,
    model: ModelConfig,
    *,
    folder: Path,
    kv_tokens: int,
    page_size: int,
    max_rows: int,
    context_length: int,
) -> TorchRunner:
    """Load the model in `folder` and make room for `kv_tokens` slots and `max_rows` requests.

    Slots are 0 to kv_tokens - 1, rows 0 to max_rows - 1. Raises `ModelError` if the weights cannot be used, ValueError
    for an unknown attention backend.
    """
    assert kv_tokens % page_size == 0, "the KV pool consists of whole pages"
    thread = worker_thread(engine.threads)
    try:
        return thread.submit(_load, engine, model, folder, kv_tokens, max_rows, context_length, thread).result()
    except BaseException:
        thread.shutdown()
        raise


def _load(
    engine: EngineConfig,
    config: ModelConfig,
    folder: Path,
    kv_tokens: int,
    max_rows: int,
    context_length: int,
    thread: Executor,
) -> TorchRunner:
    config = kept_as(engine, config)
    device = torch.device("cpu" if engine.device == "auto" else engine.device)
    pool = KVPool(config, kv_tokens, device, getattr(torch, config.kv_dtype or config.dtype))
    library = cpu_kernels(engine, config, device)
    model: Model
    attention: AttentionBackend
    choose: Choose
    ops: Ops
    steps: Executor = thread
    if library is None:
        if config.kv_dtype == "int8":
            raise KernelsUnavailable("--kv-dtype is int8, which only our CPU kernels read; torch would compute here")
        ops = PlainOps(getattr(torch, config.dtype), device, BITS[config.quantize])
        model = make_model(config, ops)
        backend = "torch" if engine.attention_backend == "auto" else engine.attention_backend
        attention = make_backend(backend, config, pool)
        choose = TorchChoose()
    else:
        ops = recording = CppOps(library, FORMATS[config.quantize or config.dtype])
        attention = paged = CppPaged(config, pool, recording, context_length)
        model = RecordedModel(make_model(config, recording), recording, paged)
        choose = CppChoose(library)
        library.num_threads = engine.threads
        if not engine.overlap:
            steps = CallersThread()
    if engine.load_format == "dummy":
        randomize(model.weights())
    else:
        load_weights(model.weights(), folder)
    kept = Kept(model, config, ops.kept, pool.tensors, device)
    source = None if engine.load_format == "dummy" else folder.resolve()
    root = WeightsRoot(Path(engine.weights_root).expanduser() if engine.weights_root else default_root(folder))
    keeper = Keeper(kept, source, root)
    return TorchRunner(model, attention, choose, RowTable(max_rows, context_length, device), keeper, thread, steps)


def cpu_kernels(engine: EngineConfig, config: ModelConfig, device: torch.device) -> Library | None:
    """The kernel library, if it is to compute. Raises `ModelError` if it was asked for by name and cannot."""
    wants_torch = engine.kernels == "torch" or engine.attention_backend != "auto"
    known = (config.quantize or config.dtype) in FORMATS and (config.kv_dtype or config.dtype) in KV_DTYPES
    if device.type != "cpu" or wants_torch or not known:
        return None
    try:
        return load("" if engine.kernels == "auto" else engine.kernels)
    except Unavailable as exc:
        if engine.kernels != "auto":
            raise KernelsUnavailable(f"--kernels is {engine.kernels}, but {exc}") from exc
        log.warning(f"torch computes, several times slower than our own kernels would: {exc}")
        return None
