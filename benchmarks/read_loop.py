"""A loop that does nothing but read memory: what products and attention of few rows are measured against."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from weft.executor.kv_pool import zeros
from weft.ops.cpp.build import find_compiler

CPU = torch.device("cpu")
READ_LOOP = """
#include <stdint.h>
#include <stddef.h>
typedef uint64_t lanes __attribute__((vector_size(64)));
uint64_t read_all(const lanes* p, size_t n) {
  lanes a = {0}, b = {0}, c = {0}, d = {0};
  for (size_t i = 0; i + 4 <= n; i += 4) {
    a ^= p[i]; b ^= p[i + 1]; c ^= p[i + 2]; d ^= p[i + 3];
  }
  a ^= b ^ c ^ d;
  return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}
"""


class ReadLoop:
    """All threads read a part of the same memory each, one word of 64 bytes after the other."""

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        source = Path(self._folder.name) / "read.c"
        source.write_text(READ_LOOP)
        made = source.with_suffix(".so")
        flags = ("-O3", "-march=native", "-shared", "-fPIC", "-x", "c")
        subprocess.run([*find_compiler(), *flags, source, "-o", made], check=True)
        self._read = ctypes.CDLL(str(made)).read_all
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._read.restype = ctypes.c_uint64
        self._memory = zeros((num_bytes,), torch.uint8, CPU).fill_(1)
        self._pool = ThreadPoolExecutor(num_threads)
        self._num_threads = num_threads

    def run(self) -> None:
        share = len(self._memory) // self._num_threads // 64
        start = self._memory.data_ptr()
        parts = [(start + i * share * 64, share) for i in range(self._num_threads)]
        list(self._pool.map(lambda part: self._read(*part), parts))


def seconds(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
