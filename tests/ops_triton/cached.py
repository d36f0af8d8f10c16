"""Requests with a random cache, for the attention kernels and their twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

from weft.config.sight import Sight
from weft.executor.backend import StepSize
from weft.executor.gpu.layout import Tiling
from weft.ops.attention import paged_attention
from weft.ops.triton.decode import decode
from weft.ops.triton.extend import extend
from weft.ops.triton.launches import Launch
from weft.ops.triton.paged import Kv, PagedStep, Terms

MAP_NORESERVE = 0x4000  # of Linux; Python has a name for it from 3.13 on
SMALL = Launch(rows=32, keys=32, warps=4, stages=2)


@dataclass
class Cached:
    """Request r has starts[r] tokens in the cache and lens[r] to run, whose K and V are there, too.
    Pages stand in any order, and what no request may look at, also what is before its window, is
    not a number."""

    starts: Sequence[int]
    lens: Sequence[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int = 0
    chunked: bool = False
    cap: float = 0.0
    has_sinks: bool = False
    is_gated: bool = False
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    kv_scales: tuple[float, float] = (1.0, 1.0)
    launch: Launch = SMALL
    num_processors: int = 4
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        stops = [start + num for start, num in zip(self.starts, self.lens, strict=True)]
        num_pages = [-(-stop // self.page_size) for stop in stops]
        pages = torch.randperm(sum(num_pages) + 3, generator=random)
        num_slots = len(pages) * self.page_size
        self.table = torch.randint(
            num_slots, (len(stops) + 2, max(num_pages) * self.page_size), generator=random
        ).int()
        self.rows = torch.randperm(len(stops) + 2, generator=random)[: len(stops)].int()
        seen = torch.zeros(num_slots, dtype=torch.bool)
        firsts = [Sight(self.window, self.chunked).first(start) for start in self.starts]
        for row, first, stop, mine in zip(
            self.rows,
            firsts,
            stops,
            pages[: sum(num_pages)].split_with_sizes(num_pages),
            strict=True,
        ):
            slots = (mine[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
            self.table[row, : len(slots)] = slots.int()
            seen[slots[first:stop]] = True
        k, v = torch.randn(2, num_slots, self.kv_heads, self.head_dim, generator=random)
        k[~seen], v[~seen] = torch.nan, torch.inf
        self.kv = Kv(
            k.to(self.kv_dtype or self.dtype), v.to(self.kv_dtype or self.dtype), *self.kv_scales
        )
        # Queries stand beside what belongs to others, as within qkv.
        step = 2 if self.is_gated else 1
        num_heads = step * self.heads + 2
        wide = torch.full((sum(self.lens) + 3, num_heads, self.head_dim), torch.nan)
        wide[: sum(self.lens)] = torch.randn(
            sum(self.lens), num_heads, self.head_dim, generator=random
        )
        wide = wide.to(self.dtype)
        self.q = wide[:, : step * self.heads : step]
        self.gate = wide[:, 1 : step * self.heads : step] if self.is_gated else None
        self.sinks = torch.randn(self.heads, generator=random) if self.has_sinks else None
        self.tiling = Tiling(self.heads, self.kv_heads, self.launch.rows, self.num_processors)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def expected(self) -> Tensor:
        k = self.kv.k.double() * self.kv.k_scale
        v = self.kv.v.double() * self.kv.v_scale
        starts = torch.tensor(self.starts)
        lens = torch.tensor(self.lens)
        q = self.q[: sum(self.lens)].double()
        out = paged_attention(
            q,
            k,
            v,
            self.table,
            self.rows,
            starts,
            lens,
            window=self.window,
            chunked=self.chunked,
            scale=self.scale,
            cap=self.cap,
            sinks=self.sinks,
        )
        if self.gate is not None:
            out *= torch.sigmoid(self.gate[: len(out)].double())
        return out

    def attend(self, size: StepSize | None = None) -> Tensor:
        """What the kernels make of it, laid out in that size, or in one that fits."""
        starts, lens = (torch.tensor(x).int().numpy() for x in (self.starts, self.lens))
        size = size or self.tiling.size(lens)
        layout = self.tiling.lay_out(self.rows.numpy(), starts, lens, lens[:0], size)
        step = PagedStep._make((*map(torch.from_numpy, layout), self.table, size.num_splits))
        out = torch.full((len(self.q), self.heads, self.head_dim), torch.nan, dtype=self.dtype)
        terms = Terms(self.scale, self.window, self.cap, self.sinks, self.gate, self.chunked)
        if size.num_tiles:
            extend(self.q, self.kv, step, out, terms, self.launch)
        if size.num_decodes:
            rows = max(16, self.launch.rows // 2)
            decode(self.q, self.kv, step, out, terms, self.launch._replace(rows=rows))
        return out


def sparse_bytes(num: int) -> Tensor:
    """Zeros that take no memory until they are written to, and count for nothing before."""
    return torch.frombuffer(
        mmap(-1, num, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE), dtype=torch.uint8
    )


def assert_right(cached: Cached, size: StepSize | None = None, tolerance: float = 2e-5) -> None:
    out = cached.attend(size)
    num = sum(cached.lens)
    torch.testing.assert_close(out[:num].double(), cached.expected(), rtol=0, atol=tolerance)
    assert out[num:].isnan().all(), "a token that is padding was written"
