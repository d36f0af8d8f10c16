"""Puts a runner together: model, weights, KV pool, attention."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

import torch

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.executor.backend import make_backend
from weft.executor.device.cpu import worker_thread
from weft.executor.inputs import RowTable
from weft.executor.kv_pool import KVPool
from weft.executor.runner import TorchRunner
from weft.executor.weights.load import load_weights, randomize
from weft.models.registry import make_model


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
    if engine.dtype != "auto":
        config = replace(config, dtype=engine.dtype)
    device = torch.device("cpu" if engine.device == "auto" else engine.device)
    model = make_model(config, device=device)
    if engine.load_format == "dummy":
        randomize(model.weights())
    else:
        load_weights(model.weights(), folder)
    pool = KVPool(config, kv_tokens, device)
    attention = make_backend("torch" if engine.attention_backend == "auto" else engine.attention_backend, config, pool)
    return TorchRunner(model, attention, RowTable(max_rows, context_length, device), thread)
