"""How fast attention of single tokens reads the cache on a CPU, beside a loop that does nothing but read.

    python benchmarks/attention.py [--shape 0.6b] [--kv bf16] [--contexts 1024,8192] [--requests 1] [--threads 2] [--kernels avx2]

A program has as many layers as fill a few hundred megabytes, more than caches hold, as in a decode step of a model. Pages
of 16 tokens stand in any order. Medians of rounds in which both are measured in turns. Two versions are compared in turns,
each from its own checkout (PYTHONPATH).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics

import torch
from read_loop import ReadLoop, seconds

from weft.executor.kv_pool import zeros
from weft.ops.cpp import abi
from weft.ops.cpp.abi import KvFormat
from weft.ops.cpp.library import Library, load
from weft.ops.cpp.program import Program

SHAPES = {  # query heads, KV heads, size of a head
    "0.6b": (16, 8, 128),
    "135m": (9, 3, 64),
    "8b": (32, 8, 128),
    "256": (8, 2, 256),
}
FORMATS = {
    "bf16": (KvFormat.BF16, torch.bfloat16),
    "int8": (KvFormat.I8, torch.int8),
    "fp32": (KvFormat.F32, torch.float32),
}
CPU = torch.device("cpu")
CACHE_BYTES = 384 << 20
PAGE = 16


class Decode:
    """The attention of one token of each request, in every layer of a model that has nothing else."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        kv: str,
        context: int,
        num_requests: int,
        window: int,
        library: Library,
    ) -> None:
        heads, kv_heads, head_dim = shape
        format, dtype = FORMATS[kv]
        self._library = library
        pages = -(-context // PAGE)
        num_slots = num_requests * pages * PAGE
        slot_bytes = 2 * kv_heads * (head_dim * dtype.itemsize + 4 * (kv == "int8"))
        seen = min(window or context, context)
        num_layers = max(1, CACHE_BYTES // (num_slots * slot_bytes))
        self.num_bytes = num_layers * num_requests * seen * slot_bytes
        self.num_layers = num_layers
        order = torch.randperm(num_requests * pages, generator=torch.Generator().manual_seed(0))
        slots = (order[:, None] * PAGE + torch.arange(PAGE)).flatten().int()
        ints = dict.fromkeys(("rows", "starts", "lens"))
        ints["rows"] = torch.arange(num_requests).int()
        ints["starts"] = torch.full((num_requests,), context - 1).int()
        ints["lens"] = torch.ones(num_requests).int()
        table = slots.view(num_requests, -1)
        q = torch.randn(num_requests, heads * head_dim)
        out = torch.empty_like(q)
        self._keep: list[object] = [ints, table, q, out]
        args = [
            self._layer(format, dtype, shape, num_slots, window, q, out) for _ in range(num_layers)
        ]
        self._program = Program(args, self._keep)
        self._step = abi.StepArgs(
            num_tokens=num_requests,
            num_requests=num_requests,
            table=table.data_ptr(),
            table_stride=table.stride(0),
            **{name: array.data_ptr() for name, array in ints.items()},
        )

    def _layer(
        self,
        format: KvFormat,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        num_slots: int,
        window: int,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> abi.AttentionArgs:
        heads, kv_heads, head_dim = shape
        # As the KV pool has them: where the system gives large pages, it gives them to these.
        k, v = (zeros((num_slots, kv_heads, head_dim), dtype, CPU).fill_(1) for _ in "kv")
        scales = [torch.full((num_slots, kv_heads), 0.01) for _ in "kv"]
        cache = abi.KvCache(format, kv_heads, head_dim, k.data_ptr(), v.data_ptr())
        cache.k_scale, cache.v_scale = (x.data_ptr() for x in scales)
        self._keep += [k, v, scales, cache]
        return abi.AttentionArgs(
            cache=ctypes.addressof(cache),
            q=q.data_ptr(),
            q_stride=q.stride(0),
            out=out.data_ptr(),
            heads=heads,
            window=window,
            scale=head_dim**-0.5,
        )

    def run(self) -> None:
        self._program.run(self._library, self._step)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--kv", default="bf16,int8")
    parser.add_argument("--contexts", default="1024,8192,16384,32768")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernels", default="", help="an instruction set, as of weft serve")
    options = parser.parse_args()
    library = load(options.kernels)
    torch.set_num_threads(options.threads)
    loop = ReadLoop(CACHE_BYTES, options.threads)
    for kv in options.kv.split(","):
        for context in map(int, options.contexts.split(",")):
            decode = Decode(
                SHAPES[options.shape], kv, context, options.requests, options.window, library
            )
            reads: list[float] = []
            attends: list[float] = []
            for _ in range(options.rounds + 1):
                reads.append(seconds(loop.run))
                attends.append(seconds(decode.run))
            read = statistics.median(reads[1:])
            attend = statistics.median(attends[1:])
            read_rate, attend_rate = CACHE_BYTES / read / 1e9, decode.num_bytes / attend / 1e9
            print(
                f"{options.shape} {kv} context {context:6d} x {options.requests}: "
                f"{attend / decode.num_layers * 1e6:8.1f} us a layer, {attend_rate:5.1f} GB/s; "
                f"read loop {read_rate:5.1f} GB/s: {attend_rate / read_rate:4.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
