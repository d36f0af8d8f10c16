"""How fast products of a few rows read their weights on a CPU, beside a loop that does nothing but read.

    python benchmarks/products.py [--formats q4_k,q8_0] [--rows 1,16] [--kernels avx2] [--threads 2]
    python benchmarks/products.py --library OLD.so,NEW.so     # two versions in turns, in one process

A program has the products of as many layers of the 0.6 B shape as fill 200 MB, more than caches hold. Weights are random
codes. In each round every library and the loop run once, one after the other; the time that counts is the median, and the
least stands beside it. Libraries must have the structures of this checkout, and its layout of weights in memory.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from read_loop import ReadLoop, seconds
from torch import Tensor

from weft.ops.codes import CodeFormat, Codes, Scales
from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, WeightFormat
from weft.ops.cpp.library import Library, load
from weft.ops.cpp.ops import PackedMatrix
from weft.ops.cpp.program import Program
from weft.ops.quantize import INT4, INT8

HALF = torch.float16
FORMATS = {
    "q8_0": CodeFormat(8, 32, offset=128, scale_type=HALF),
    "q4_0": CodeFormat(4, 32, offset=8, scale_type=HALF),
    "q4_1": CodeFormat(4, 32, has_mins=True, scale_type=HALF),
    "q4_k": CodeFormat(4, 32, has_mins=True, is_coarse=True),
    "q5_k": CodeFormat(6, 32, has_mins=True, is_coarse=True),
    "q6_k": CodeFormat(6, 16, offset=32, is_coarse=True),
    "int8": INT8,
    "int4": INT4,
}
# Of a layer: inputs, outputs, whether a gate and its up alternate.
SHAPES = ((1024, 4096, False), (2048, 1024, False), (1024, 6144, True), (3072, 1024, False))
WEIGHT_BYTES = 200 << 20


def matrix_of(
    library: Library, name: str, in_size: int, out_size: int, gated: bool
) -> PackedMatrix:
    """A weight of one part, or of a gate and an up part, with random content."""
    sizes = (out_size // 2,) * 2 if gated else (out_size,)
    format = WeightFormat.BF16
    matrix = PackedMatrix(library, in_size, sizes, False, gated, format, keeps_codes=True)
    if name == "bf16":
        for part, size in enumerate(sizes):
            matrix.put(part, torch.randn(size, in_size).bfloat16())
        return matrix
    codes = FORMATS[name]
    for part in range(len(sizes)):
        matrix.keep_as(part, codes)
    for part, size in enumerate(sizes):
        matrix.put_codes(part, random_codes(codes, size, in_size))
    return matrix


def random_codes(format: CodeFormat, num_rows: int, in_size: int) -> Codes:
    values = torch.randint(2**format.bits, (num_rows, in_size), dtype=torch.uint8)
    num_groups = in_size // format.group

    def scales() -> Scales:
        fine = torch.randn(num_rows, num_groups)
        if not format.is_coarse:
            return Scales((fine * 0.01).to(format.scale_type))
        coarse = torch.full((num_rows, in_size // 256), 1e-3, dtype=HALF)
        return Scales((fine * 20).clamp(-63, 63).to(torch.int8), coarse)

    return Codes(format, values, scales(), scales() if format.has_mins else None)


class Products:
    """The products of many layers, for one library."""

    def __init__(self, library: Library, name: str, num_rows: int) -> None:
        self._library = library
        self._step = abi.StepArgs(num_tokens=num_rows)
        self._keep: list[object] = []
        self.results: list[Tensor] = []
        self.num_bytes = 0
        first = [matrix_of(library, name, *shape) for shape in SHAPES]
        args: list[ctypes.Structure] = []
        while self.num_bytes < WEIGHT_BYTES:
            for shape, matrix in zip(SHAPES, first, strict=True):
                args.append(self._product(matrix, shape, num_rows))
        self._program = Program(args, self._keep)

    def _product(
        self, matrix: PackedMatrix, shape: tuple[int, int, bool], num_rows: int
    ) -> abi.LinearArgs:
        in_size, out_size, gated = shape
        (panels,) = matrix.pieces
        memory = self._library.memory.zeros(panels.memory.numel())
        memory.copy_(panels.memory)
        weight = abi.PackedWeight.from_buffer_copy(panels.struct)
        weight.panels = memory.data_ptr()
        self.num_bytes += memory.numel()
        x = torch.randn(num_rows, in_size, generator=torch.Generator().manual_seed(0))
        y = torch.zeros(num_rows, out_size // 2 if gated else out_size)
        scratch = torch.zeros(num_rows * (4 * in_size + 64) + 128, dtype=torch.uint8)
        self._keep += [memory, weight, x, y, scratch, panels]
        self.results.append(y)
        return abi.LinearArgs(
            weight=ctypes.addressof(weight),
            x=x.data_ptr(),
            x_stride=in_size,
            epilogue=Epilogue.GATED_SILU if gated else Epilogue.STORE,
            y=y.data_ptr(),
            y_stride=y.stride(0),
            scratch=-(-scratch.data_ptr() // 64) * 64,
        )

    def run(self) -> None:
        self._program.run(self._library, self._step)


def measure(
    name: str,
    num_rows: int,
    libraries: Sequence[Library],
    loop: ReadLoop,
    num_rounds: int,
) -> None:
    """Print a line for each library."""
    products = []
    for library in libraries:
        torch.manual_seed(0)
        products.append(Products(library, name, num_rows))
    works: list[Callable[[], None]] = [loop.run, *(one.run for one in products)]
    times: list[list[float]] = [[] for _ in works]
    for _ in range(num_rounds + 1):
        for work, found in zip(works, times, strict=True):
            found.append(seconds(work))
    reads = np.array(times[0][1:])
    loop_rate = WEIGHT_BYTES / float(np.median(reads)) / 1e9
    best_rate = WEIGHT_BYTES / float(reads.min()) / 1e9
    for index, one in enumerate(products):
        took = np.array(times[index + 1][1:])
        rate = one.num_bytes / float(np.median(took)) / 1e9
        best = one.num_bytes / float(took.min()) / 1e9
        same = all(map(torch.equal, one.results, products[0].results))
        ratio = statistics.median(np.array(times[1][1:]) / took)
        print(
            f"{libraries[index].instruction_set} {name:5} rows {num_rows:3}: {rate:5.1f} GB/s "
            f"(best {best:5.1f}), loop {loop_rate:5.1f} ({best_rate:5.1f}): {rate / loop_rate:4.0%} "
            f"({best / best_rate:4.0%}); {ratio:5.3f} of the first's speed, "
            f"{'same bits' if same else 'OTHER BITS'}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=",".join((*FORMATS, "bf16")))
    parser.add_argument("--rows", default="1")
    parser.add_argument("--kernels", default="")
    parser.add_argument(
        "--library", default="", help="files, by commas; else that of this checkout"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loop = ReadLoop(WEIGHT_BYTES, options.threads)
    for kernels in options.kernels.split(","):
        libraries = [Library(Path(file), kernels) for file in options.library.split(",") if file]
        for num_rows in map(int, options.rows.split(",")):
            for name in options.formats.split(","):
                measure(name, num_rows, libraries or [load(kernels)], loop, options.rounds)


if __name__ == "__main__":
    main()
