"""FlashAttention-3 and FlashInfer as far as weft calls them, on the fake GPU: with the names of their parameters, as
strict as they are about types, shapes and strides, and computed by `ops/attention.py`. What they leave alone is not a
number. A graph of FlashInfer's reads nothing but its buffers, and finds out a plan that is not this step's."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.executor.fake_gpu import FakeGpu
from weft.ops.attention import paged_attention

HALF = (torch.float16, torch.bfloat16)


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(content)
    return made


def ints(tensor: Tensor, *shape: int) -> None:
    assert tensor.dtype == torch.int32
    assert tuple(tensor.shape) == shape, f"{tuple(tensor.shape)} instead of {shape}"
    assert tensor.is_contiguous()


def cache(q: Tensor, k: Tensor, v: Tensor, page_size: int) -> None:
    assert q.ndim == 3
    assert k.ndim == v.ndim == 4
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in HALF
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape
    assert k.stride() == v.stride()
    assert k.shape[1] == page_size
    assert k.shape[3] == q.shape[2]
    assert q.shape[1] % k.shape[2] == 0
    assert all(
        x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in (q, k, v)
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    rows: Tensor,
    lens: Tensor,
    kv_lens: Tensor,
    **how: Any,
):
    """In float32; [T, heads, D], NaN behind the tokens of the last request."""
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    num = int(lens.sum())
    assert (kv_lens >= lens).all()
    keys, values = (x.flatten(0, 1).float() for x in (k, v))
    out[:num] = paged_attention(
        q[:num].float(), keys, values, table, rows, kv_lens - lens, lens, **how
    ).to(q.dtype)
    return out


# FlashAttention-3


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None = None,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_splits: int = 0,
) -> Tensor:
    cache(q, k_cache, v_cache, page_size=1)
    assert q.shape[2] % 8 == 0
    assert q.shape[2] <= 256
    num = len(cu_seqlens_q) - 1
    assert page_table.dtype == torch.int32
    assert page_table.stride(1) == 1
    assert page_table.ndim == 2
    assert cache_batch_idx is not None or len(page_table) == num
    rows = torch.arange(num) if cache_batch_idx is None else cache_batch_idx
    ints(rows, num)
    ints(cache_seqlens, num)
    ints(cu_seqlens_q, num + 1)
    lens = cu_seqlens_q.diff()
    assert cu_seqlens_q[0] == 0
    assert cu_seqlens_q[-1] <= len(q)
    assert lens.min() >= 0
    assert lens.max() <= max_seqlen_q
    assert causal
    assert num_splits == 1 or num_splits * len(q) <= 2048, "too much scratch"
    left, right = window_size
    assert right == (-1 if left == -1 else 0)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    return attend(
        q, k_cache, v_cache, page_table, rows, lens, cache_seqlens, window=left + 1, scale=scale
    )


# FlashInfer


class Wrapper:
    """What both wrappers share. `indptrs` are what `plan` gets first."""

    def __init__(
        self,
        gpu: FakeGpu,
        workspace: Tensor,
        layout: str,
        graph: bool,
        buffers: tuple[Any, Any, Any],
    ):
        assert workspace.dtype == torch.uint8
        assert not workspace.any()
        assert layout == "NHD"
        self.gpu, self.graph = gpu, graph
        self.space = torch.empty(8 << 20, dtype=torch.uint8)
        self.pinned = gpu.pinned((8 << 10,), torch.int32)
        self.indptr, self.indices, self.last = buffers
        if graph:
            ints(self.last, len(self.indptr) - 1)

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        assert int_workspace_buffer.dtype == torch.uint8
        assert len(int_workspace_buffer) >= 8 << 20
        self.space = int_workspace_buffer

    def planned(
        self, indptr: Tensor, indices: Tensor, last: Tensor, page_size: int, how: dict[str, Any]
    ) -> None:
        num = len(last)
        ints(indptr, num + 1)
        ints(last, num)
        assert self.gpu._is_pinned(indptr), "it would wait for the device"
        assert self.gpu._is_pinned(last)
        assert not self.gpu._is_pinned(indices)
        assert indices.dtype == torch.int32
        assert page_size == 1
        assert (last == 1).all()
        assert indptr[0] == 0
        assert indptr.diff().min() >= 1
        if self.graph:
            assert num == len(self.last), "a graph is of one size"
            assert indptr[-1] <= len(self.indices)
            self.indices[: len(indices)].copy_(indices)
        else:
            assert len(indices) == indptr[-1]
            self.indptr, self.indices, self.last = (
                torch.empty_like(indptr),
                indices,
                torch.empty_like(last),
            )
        plan = self.pinned[: num + 2]
        plan[0], plan[1:] = how["window_left"], indptr
        self.gpu.copy(self.space.view(torch.int32)[: num + 2], plan)
        self.gpu.copy(self.indptr, indptr)
        self.gpu.copy(self.last, last)
        self.how = how

    def computed(self, q: Tensor, kv: tuple[Tensor, Tensor], lens: Tensor) -> Tensor:
        cache(q, *kv, page_size=1)
        assert q.shape[2] in (64, 128, 256)
        assert (q.shape[1], kv[0].shape[2], q.shape[2]) == self.how["shape"]
        assert q.dtype == self.how["q_data_type"] == self.how["kv_data_type"]
        indptr = self.indptr
        planned = self.space.view(torch.int32)[: len(indptr) + 1].tolist()
        assert planned == [self.how["window_left"], *indptr.tolist()], (
            "the plan is that of another step or window"
        )
        kv_lens = indptr.diff()
        table = torch.zeros(len(kv_lens), int(kv_lens.max()), dtype=torch.int32)
        for request, (begin, end) in enumerate(
            zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)
        ):
            table[request, : end - begin] = self.indices[begin:end]
        how = {"window": self.how["window_left"] + 1, "scale": self.how["sm_scale"]}
        return attend(q, *kv, table, torch.arange(len(kv_lens)), lens, kv_lens, **how)


def fake_flashinfer(gpu: FakeGpu) -> ModuleType:
    class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
        def __init__(
            self,
            float_workspace_buffer: Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            use_tensor_cores: bool = False,
            paged_kv_indptr_buffer: Tensor | None = None,
            paged_kv_indices_buffer: Tensor | None = None,
            paged_kv_last_page_len_buffer: Tensor | None = None,
        ) -> None:
            buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )
            super().__init__(gpu, float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
            self.use_tensor_cores = use_tensor_cores

        def plan(
            self,
            indptr: Tensor,
            indices: Tensor,
            last_page_len: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            *,
            window_left: int = -1,
            q_data_type: Any = "float16",
            kv_data_type: Any = None,
            sm_scale: float | None = None,
        ) -> None:
            assert self.use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8)
            how = {
                "shape": (num_qo_heads, num_kv_heads, head_dim),
                "window_left": window_left,
                "sm_scale": sm_scale,
            }
            how |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
            self.planned(indptr, indices, last_page_len, page_size, how)

        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
            assert len(q) == len(self.last)
            return self.computed(q, paged_kv_cache, torch.ones_like(self.last))

    class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
        def __init__(
            self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto"
        ) -> None:
            super().__init__(gpu, float_workspace_buffer, kv_layout, False, (None, None, None))
            assert backend == "fa2"

        def plan(
            self,
            qo_indptr: Tensor,
            paged_kv_indptr: Tensor,
            paged_kv_indices: Tensor,
            paged_kv_last_page_len: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            *,
            causal: bool = False,
            sm_scale: float | None = None,
            window_left: int = -1,
            q_data_type: Any = "float16",
            kv_data_type: Any = None,
        ) -> None:
            assert causal
            ints(qo_indptr, len(paged_kv_indptr))
            how = {"shape": (num_qo_heads, num_kv_heads, head_dim_qk), "window_left": window_left}
            how |= {"sm_scale": sm_scale, "q_data_type": q_data_type, "kv_data_type": kv_data_type}
            self.planned(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, how)
            self.qo_indptr = qo_indptr.clone()

        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
            assert len(q) == self.qo_indptr[-1]
            return self.computed(q, paged_kv_cache, self.qo_indptr.diff())

    wrappers = (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)
    return module("flashinfer", **{wrapper.__name__: wrapper for wrapper in wrappers})
