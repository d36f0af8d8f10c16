"""Paged attention by FlashInfer, a package for GPUs from compute capability 8.0 on. It has never run here: what it is
told follows its documentation (docs.flashinfer.ai, github.com/flashinfer-ai/flashinfer).

Its pages are taken to be of one token, whatever `--page-size` is. It wants the slots of all requests in one list:

    indices    | slots of request 0 | slots of request 1 | ...        made on the device, out of the table of slots
    indptr     0                    3                    7            on the host, too, where lengths are known

With these lengths it plans, on the host, how the work is shared out; so a step waits for nothing on the device. Plans
are copied out of pinned memory, which the next one may not overwrite before: `Planner` sees to that. A graph has a
planner, whose plan always lies in the same place, for each window of the model's layers; they are planned anew before
the graph is replayed (`expect`). Only decode steps are graphs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.config.gpu import flashinfer_bytes
from weft.config.model import ModelConfig
from weft.executor.attention_layout import Size, Tiling
from weft.executor.backend import AttentionBatch
from weft.executor.gpu.gpu import Event, Gpu
from weft.executor.gpu.providers import provider
from weft.executor.gpu.shipping import paged_step
from weft.executor.gpu.store import Store
from weft.executor.kv_pool import KVPool
from weft.models.layers.attention import Heads
from weft.ops.triton.indices import slot_indices
from weft.ops.triton.paged import Kv, PagedStep
from weft.plan.step import IntArray

PLAN_INTS = 2 << 20  # of one plan, on the device: what a wrapper takes for itself, too
GROUP_OF_TENSOR_CORES = (
    4  # query heads that share a KV head; for fewer, decoding without tensor cores is faster
)
WHOLE = 1 << 30  # rows of a tile: the kernels cut the queries themselves


class Planner:
    """One wrapper of FlashInfer's, and the pinned memory that its plans come from."""

    def __init__(self, gpu: Gpu, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._gpu = gpu
        self._host = torch.empty(0, dtype=torch.int32)
        self._copied: Event | None = None

    def plan(self, indptrs: Sequence[IntArray], indices: Tensor, *shape: int, **how: Any) -> None:
        """Plan a step of R requests; `indptrs` are [R + 1], of the queries, if it is a step of prompts, and of the
        slots in `indices`, which are on the device."""
        if self._copied is not None:
            self._copied.synchronize()
        size = len(indptrs[0])
        if (len(indptrs) + 1) * size > len(self._host):
            self._host = self._gpu.pinned((2 * (len(indptrs) + 1) * size,), torch.int32)
        *parts, last = self._host[: (len(indptrs) + 1) * size].view(-1, size)
        for part, indptr in zip(parts, indptrs, strict=True):
            part.numpy()[:] = indptr
        last.fill_(1)  # tokens in the last page of each request
        self.wrapper.plan(*parts, indices, last[1:], *shape, **how)
        self._copied = self._gpu.record()


class DecodeGraph(NamedTuple):
    """What the graph of decode steps of one size reads, always at the same place."""

    indptr: Tensor  # [R + 1]
    indices: Tensor  # as many as R requests can have
    planners: dict[int, Planner]  # by window


class FlashInferPaged:
    """An `AttentionBackend`. `tiling` lays steps out for it."""

    def __init__(self, config: ModelConfig, pool: KVPool, context_length: int, gpu: Gpu) -> None:
        """Positions are below `context_length`. Raises NoProvider without the package."""
        self._library: Any = provider("flashinfer")
        self.tiling = Tiling(config.num_heads, config.num_kv_heads, WHOLE, 1)
        self._config, self._context_length, self._gpu = config, context_length, gpu
        self._pages = [
            (k.unsqueeze(1), v.unsqueeze(1)) for k, v in zip(pool.k, pool.v, strict=True)
        ]
        self._store = Store(
            config, [Kv(k, v) for k, v in zip(pool.k, pool.v, strict=True)], context_length
        )
        self._dtype, self._device = pool.k[0].dtype, pool.k[0].device
        self._work = torch.zeros(flashinfer_bytes(config), dtype=torch.uint8, device=self._device)
        self._with_tensor_cores = config.num_heads // config.num_kv_heads >= GROUP_OF_TENSOR_CORES
        windows = sorted({config.window(layer) for layer in range(config.num_layers)})
        self._decodes = {window: Planner(gpu, self._decode_wrapper()) for window in windows}
        prompts = self._library.BatchPrefillWithPagedKVCacheWrapper
        self._prompts = {
            window: Planner(gpu, prompts(self._work, "NHD", backend="fa2")) for window in windows
        }
        self._graphs: dict[int, DecodeGraph] = {}  # by number of requests
        self._graph_indices = torch.empty(
            0, dtype=torch.int32, device=self._device
        )  # one graph runs at a time
        self._graph_plans = {window: self._ints(PLAN_INTS).view(torch.uint8) for window in windows}
        self._step: PagedStep | None = None
        self._planned = self._decodes  # those of the present step, by window

    def prepare(self, batch: AttentionBatch) -> None:
        step, size = paged_step(batch, self.tiling)
        self._step = step
        if not len(batch.lens):  # a graph is captured, and planned already
            graph = self._graphs[size.num_requests]
            slot_indices(batch.table, step.rows, graph.indptr, self._context_length, graph.indices)
            self._planned = graph.planners
            return
        stops = batch.starts + batch.lens
        indptr = _indptr(stops)
        indices = self._ints(int(indptr[-1]))
        slot_indices(batch.table, step.rows, _indptr_there(step.kv_lens), int(stops.max()), indices)
        if size.num_decodes == size.num_requests:
            self._planned = self._decodes
            self._plan((indptr,), indices)
        else:
            self._planned = self._prompts
            self._plan((_indptr(batch.lens), indptr), indices, causal=True)

    def expect(self, starts: IntArray, lens: IntArray, size: Size) -> None:
        """Plan a decode step. A request that is padding sees one cached token, whosever that is."""
        assert size.num_decodes == size.num_requests, "steps with prompts are not captured"
        num = size.num_requests
        if num not in self._graphs:
            self._graphs[num] = self._graph(num)
        stops = np.ones(num, np.int32)
        stops[: len(lens)] = starts + lens
        self._planned = self._graphs[num].planners
        self._plan(
            (_indptr(stops),), self._graph_indices[:0]
        )  # those that count, the graph makes itself

    def forward(self, qkv: Tensor, heads: Heads, layer: int) -> Tensor:
        """As `PagedAttention.forward`; what it returns for tokens that are padding may be anything at all."""
        assert self._step is not None, "prepare() comes first"
        q = self._store(qkv, heads, layer, self._step.positions, self._step.out_slots)
        out: Tensor = self._planned[self._config.window(layer)].wrapper.run(q, self._pages[layer])
        return out.flatten(1)

    def _plan(self, indptrs: Sequence[IntArray], indices: Tensor, **how: Any) -> None:
        config = self._config
        for window, planner in self._planned.items():
            planner.plan(
                indptrs,
                indices,
                *(config.num_heads, config.num_kv_heads, config.head_dim, 1),
                window_left=window - 1,  # tokens before it that a token sees; -1: all
                sm_scale=1 / math.sqrt(config.head_dim),
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                **how,
            )

    def _graph(self, num: int) -> DecodeGraph:
        """For `num` requests. The largest graph comes first."""
        if num * self._context_length > len(self._graph_indices):
            self._graph_indices = self._ints(num * self._context_length)
        indptr, last = self._ints(num + 1), self._ints(num)
        planners = {}
        for window, space in self._graph_plans.items():
            wrapper = self._decode_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=self._graph_indices,
                paged_kv_last_page_len_buffer=last,
            )
            wrapper.reset_workspace_buffer(
                self._work, space
            )  # graphs of one window share the place of their plans
            planners[window] = Planner(self._gpu, wrapper)
        return DecodeGraph(indptr, self._graph_indices, planners)

    def _decode_wrapper(self, **how: Any) -> Any:
        kind = self._library.BatchDecodeWithPagedKVCacheWrapper
        return kind(self._work, "NHD", use_tensor_cores=self._with_tensor_cores, **how)

    def _ints(self, num: int) -> Tensor:
        return torch.empty(num, dtype=torch.int32, device=self._device)


def _indptr(lens: IntArray) -> IntArray:
    """[R] -> [R + 1]"""
    return np.concatenate(([0], np.cumsum(lens)), dtype=np.int32, casting="same_kind")


def _indptr_there(lens: Tensor) -> Tensor:
    """The same on the device."""
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
