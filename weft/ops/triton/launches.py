"""Sizes of the kernels' tiles, and numbers of warps per tile: all tuning parameters in one place.

The numbers come only from compiling for sm_90 (tests/ops_triton/test_compiled.py repeats it). For
prompts: the largest tiles whose registers do not spill, which suits tensor cores. For decoding:
tiles small enough that four programs share a multiprocessor, each with about 16 KB of K and V in
flight. Nothing here has been timed on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple


class LoraLaunch(NamedTuple):
    chunk: int  # tokens of one adapter
    inputs: int
    ranks: int
    outputs: int
    warps: int


LORA = LoraLaunch(chunk=16, inputs=64, ranks=16, outputs=64, warps=4)


class Launch(NamedTuple):
    rows: int  # queries of a tile: (token, head) pairs that share a KV head
    keys: int  # cached tokens of a block, which are read together
    warps: int
    stages: int  # blocks of K and V whose loads are in flight together


# By head dim, rounded up to a power of two.
EXTEND = {
    16: Launch(128, 64, 4, 3),
    32: Launch(128, 64, 4, 3),
    64: Launch(128, 64, 8, 3),
    128: Launch(128, 64, 8, 3),
    256: Launch(64, 64, 8, 2),
}
DECODE = {
    16: Launch(16, 128, 4, 3),
    32: Launch(16, 128, 4, 3),
    64: Launch(16, 64, 4, 4),
    128: Launch(16, 64, 4, 3),
    256: Launch(16, 32, 4, 3),
}

ROTARY_TOKENS = 8  # tokens of one head per program, in steps of many tokens
NORM_WARPS = 8
STATE_TOKENS = 16  # of a convolution, at a time
STATE_COLUMNS = 64  # channels of a convolution in a program
STATE_WARPS = 1  # of a program with 16 columns of a matrix: sums over its rows need no other warp
COLUMNS = 1024  # of elementwise kernels
VOCAB_BLOCK = 4096  # logits of a row per program
CUT_BLOCK = 512  # values that are compared with the pivots together
CUT_GROUP = 64  # logits per group; the maxima of k groups give a lower bound for top-k


def extend_launch(head_dim: int, group: int) -> Launch:
    """`group` query heads share a KV head. A tile holds at least the queries of one token."""
    launch = EXTEND[power_of_two(head_dim)]
    return launch._replace(rows=max(launch.rows, power_of_two(group)))


def decode_launch(head_dim: int, group: int) -> Launch:
    """A tile holds the `group` queries of one token; tensor cores need at least 16 rows."""
    launch = DECODE[power_of_two(head_dim)]
    return launch._replace(rows=max(launch.rows, power_of_two(group)))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n and at least 16."""
    return max(16, 1 << (n - 1).bit_length())
