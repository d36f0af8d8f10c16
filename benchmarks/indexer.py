"""Attention to the keys that an indexer chooses, as in DeepSeek V3.2: one layer, by the kernels and
by torch, on one thread.

    python benchmarks/indexer.py            # 32 heads of 576, an indexer of 64 heads of 128
    python benchmarks/indexer.py --heads 16 --index-heads 16 --topk 512

Given is the least processor time of five rounds, in milliseconds, and of torch that of one.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import time

import numpy as np
import torch
from torch import Tensor

from weft.ops.cpp import abi
from weft.ops.cpp.abi import KvFormat
from weft.ops.cpp.library import load
from weft.ops.indexed import chosen_keys, index_scores

CASES = ((8_192, 1), (32_768, 1), (8_192, 32))  # tokens before, tokens of the step
FORMATS = {KvFormat.F32: torch.float32, KvFormat.BF16: torch.bfloat16}
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention to chosen keys.")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=576)
    parser.add_argument("--index-heads", type=int, default=64)
    parser.add_argument("--index-dim", type=int, default=128)
    parser.add_argument("--topk", type=int, default=2_048)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("keys | tokens before | tokens | kernels, ms | torch, ms | largest difference")
    for format in FORMATS:
        for before, num_tokens in CASES:
            measure(asked, format, before, num_tokens)


def measure(asked: argparse.Namespace, format: KvFormat, before: int, num_tokens: int) -> None:
    num_keys = before + num_tokens
    dtype = FORMATS[format]
    keys = torch.randn(num_keys, asked.head_dim).to(dtype)
    index_keys = torch.randn(num_keys, asked.index_dim).to(dtype)
    sizes = (asked.heads * asked.head_dim, asked.index_heads * asked.index_dim, asked.index_heads)
    rows = torch.randn(num_tokens, sum(sizes))
    q, index_q, weights = rows.split_with_sizes(sizes, dim=1)
    table = torch.randperm(num_keys).int()
    out = torch.zeros(num_tokens, sizes[0])
    chosen = torch.zeros(num_tokens, asked.topk, dtype=torch.int32)
    cache = cache_of(format, keys)
    index = cache_of(format, index_keys)
    args = abi.IndexedArgs(
        cache=ctypes.addressof(cache),
        index=ctypes.addressof(index),
        q=q.data_ptr(),
        q_stride=rows.shape[1],
        index_q=index_q.data_ptr(),
        weights=weights.data_ptr(),
        out=out.data_ptr(),
        heads=asked.heads,
        index_heads=asked.index_heads,
        num_chosen=asked.topk,
        scale=1 / math.sqrt(asked.head_dim),
        chosen=chosen.data_ptr(),
    )
    numbers = np.array([0, before, num_tokens], np.int32)
    row, start, length = (numbers[i : i + 1].ctypes.data for i in range(3))
    step = abi.StepArgs(
        num_tokens=num_tokens,
        num_requests=1,
        rows=row,
        starts=start,
        lens=length,
        table=table.data_ptr(),
        table_stride=num_keys,
    )
    library = load()
    times = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        library.run_one(args, step)
        times.append(time.process_time() - began_s)
    began_s = time.process_time()
    found = by_torch(asked, q, index_q, weights, keys[table.long()], index_keys[table.long()])
    torch_s = time.process_time() - began_s
    difference = float((out - found).abs().max())
    print(
        f"{dtype} | {before} | {num_tokens} | {1e3 * min(times):.1f} | {1e3 * torch_s:.1f} | "
        f"{difference:.1e}",
        flush=True,
    )


def cache_of(format: KvFormat, keys: Tensor) -> abi.KvCache:
    address = keys.data_ptr()
    return abi.KvCache(format=format, kv_heads=1, head_dim=keys.shape[1], k=address, v=address)


def by_torch(
    asked: argparse.Namespace,
    q: Tensor,
    index_q: Tensor,
    weights: Tensor,
    keys: Tensor,
    index_keys: Tensor,
) -> Tensor:
    num_tokens = len(q)
    num_before = len(keys) - num_tokens
    heads = index_q.reshape(num_tokens, asked.index_heads, asked.index_dim)
    seen = torch.arange(num_before + 1, len(keys) + 1)
    chosen = chosen_keys(index_scores(heads, index_keys, weights), seen, asked.topk)
    queries = q.reshape(num_tokens, asked.heads, asked.head_dim)
    scores = queries @ keys.float().T / math.sqrt(asked.head_dim)
    return (scores.masked_fill(~chosen[:, None], -torch.inf).softmax(-1) @ keys.float()).flatten(1)


if __name__ == "__main__":
    main()
