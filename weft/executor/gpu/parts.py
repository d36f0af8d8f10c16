"""What computes on a GPU: our Triton kernels, with the attention backend that was chosen; or torch alone (`torch`), which launches more, captures no graphs and waits
for its copies, and so is there to compare with."""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig, ModelError
from weft.executor.backend import AttentionBackend, LaidOutBackend, make_backend
from weft.executor.gpu.gpu import Gpu
from weft.executor.kv_pool import KVPool
from weft.ops.plain import PlainOps
from weft.ops.protocol import Ops
from weft.ops.sampling import Choose, TorchChoose


class NoTriton(ModelError):
    """The kernels for GPUs cannot be had."""


class GpuParts(NamedTuple):
    ops: Ops
    attention: AttentionBackend
    graphable: LaidOutBackend | None  # the same, if decode steps can be graphs
    choose: Choose


def gpu_parts(
    engine: EngineConfig, config: ModelConfig, pool: KVPool, context_length: int, gpu: Gpu
) -> GpuParts:
    """Raises NoTriton without the package triton, ValueError for a type of KV that the kernels do
    not read."""
    device, dtype = pool.k[0].device, getattr(torch, config.dtype)
    if engine.attention_backend == "torch":
        ops = PlainOps(dtype, device, config.quantize)
        return GpuParts(ops, make_backend("torch", config, pool), None, TorchChoose())
    try:
        from weft.executor.gpu.attention import TritonPaged
        from weft.ops.triton.ops import TritonOps
        from weft.ops.triton.sampling import TritonChoose
    except ImportError as exc:
        raise NoTriton(
            f"the kernels for GPUs need the package triton, which comes with torch for CUDA ({exc}); "
            "--attention-backend torch does without, slowly"
        ) from exc
    attention = TritonPaged(config, pool, context_length)
    return GpuParts(TritonOps(dtype, device, config.quantize), attention, attention, TritonChoose())
