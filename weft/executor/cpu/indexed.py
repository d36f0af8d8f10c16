"""Attention to the keys that an indexer chooses, by the CPU kernels: what `CppPaged` records beside
its own operations."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from weft.executor.kv_pool import KVPool
from weft.models.layers.attention import Chooser
from weft.ops.cpp import abi
from weft.ops.cpp.program import ProgramRecorder


def index_caches(pool: KVPool, format: abi.KvFormat) -> list[abi.KvCache]:
    """The keys of the indexer of each layer; none without indexers."""
    found = []
    for keys in pool.index:
        address = keys.data_ptr()
        found.append(
            abi.KvCache(format=format, kv_heads=1, head_dim=keys.shape[2], k=address, v=address)
        )
    return found


def store_index(qkv: Tensor, chooser: Chooser, cache: abi.KvCache) -> abi.RotaryStoreArgs:
    """Rotates queries and keys of an indexer, and stores the keys. The caller adds the rotation."""
    return abi.RotaryStoreArgs(
        cache=ctypes.addressof(cache),
        qkv=qkv[:, -chooser.size :].data_ptr(),
        qkv_stride=qkv.stride(0),
        heads=chooser.heads,
    )


def attend_to_chosen(
    qkv: Tensor,
    chooser: Chooser,
    cache: abi.KvCache,
    attention: abi.AttentionArgs,
    recorder: ProgramRecorder,
) -> abi.IndexedArgs:
    """Attention of the tokens that `attention` leaves out. `cache`: keys of the indexer."""
    attention.most_keys = chooser.num_chosen
    columns = qkv[:, -chooser.size :]
    return abi.IndexedArgs(
        cache=attention.cache,
        index=ctypes.addressof(cache),
        q=attention.q,
        q_stride=attention.q_stride,
        index_q=columns.data_ptr(),
        weights=columns[:, -chooser.heads :].data_ptr(),
        out=attention.out,
        heads=attention.heads,
        index_heads=chooser.heads,
        num_chosen=chooser.num_chosen,
        scale=attention.scale,
        chosen=recorder.buffer(chooser.num_chosen, torch.int32).data_ptr(),
    )
