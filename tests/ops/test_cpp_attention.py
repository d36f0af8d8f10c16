from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from weft.config.sight import Sight
from weft.ops.attention import paged_attention
from weft.ops.cpp import abi
from weft.ops.cpp.abi import KvFormat
from weft.ops.cpp.library import Library
from weft.ops.quantize import quantize_int8

pytestmark = pytest.mark.pairs

FORMATS = (KvFormat.F32, KvFormat.BF16, KvFormat.I8)  # of caches
DTYPES = {KvFormat.F32: torch.float32, KvFormat.BF16: torch.bfloat16}


@dataclass
class Cached:
    """Requests with a random cache: request r has starts[r] tokens in it and lens[r] to run. Their
    pages stand in any order, and what no request may look at, also what is before its window, is
    not a number."""

    starts: Sequence[int]
    lens: Sequence[int]
    format: KvFormat = KvFormat.BF16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 0
    chunked: bool = False
    cap: float = 0.0
    has_sinks: bool = False
    is_gated: bool = False
    page_size: int = 16
    seed: int = 0
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
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
        self.q = torch.randn(sum(self.lens), self.heads * self.head_dim, generator=random)
        self.scales = [torch.zeros(0), torch.zeros(0)]
        k, v = torch.randn(2, num_slots, self.kv_heads, self.head_dim, generator=random)
        if self.format == KvFormat.I8:
            (k, k_scale), (v, v_scale) = (quantize_int8(x.flatten(0, 1)) for x in (k, v))
            shape = (num_slots, self.kv_heads)
            self.k, self.v = k.view(*shape, -1), v.view(*shape, -1)
            self.scales = [k_scale.view(shape), v_scale.view(shape)]
            self.scales[0][~seen], self.scales[1][~seen] = torch.nan, torch.inf
        else:
            self.k, self.v = k.to(DTYPES[self.format]), v.to(DTYPES[self.format])
            self.k[~seen], self.v[~seen] = torch.nan, torch.inf
        self.sinks = None
        if self.has_sinks:
            self.sinks = 2 * torch.randn(self.heads, generator=random)
        self.gate = None
        if self.is_gated:
            self.gate = torch.randn(self.q.shape, generator=random)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def floats(self) -> tuple[Tensor, Tensor]:
        if self.format == KvFormat.I8:
            k, v = (
                x.double() * scale[..., None]
                for x, scale in zip((self.k, self.v), self.scales, strict=True)
            )
            return k, v
        return self.k.double(), self.v.double()

    def expected(self) -> Tensor:
        q = self.q.double().view(-1, self.heads, self.head_dim)
        starts = torch.tensor(self.starts)
        lens = torch.tensor(self.lens)
        out = paged_attention(
            q,
            *self.floats(),
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
        out = out.flatten(1)
        if self.gate is not None:
            out *= torch.sigmoid(self.gate.double())
        return out

    def attend(
        self,
        kernels: Library,
        starts: Sequence[int] | None = None,
        lens: Sequence[int] | None = None,
    ) -> Tensor:
        """What the kernel makes of all tokens, or of those that `starts` and `lens` name instead,
        by request."""
        first = torch.tensor(self.lens).cumsum(0) - torch.tensor(self.lens)
        starts = starts or self.starts
        lens = lens or self.lens
        begins = [
            int(f) + start - old for f, start, old in zip(first, starts, self.starts, strict=True)
        ]
        tokens = torch.cat(
            [torch.arange(begin, begin + num) for begin, num in zip(begins, lens, strict=True)]
        )
        # Rows are wider than the queries; where there are gates, each stands behind its head.
        places = torch.arange(self.q.shape[1])
        head_stride = self.head_dim
        if self.gate is not None:
            head_stride = 2 * self.head_dim
            places = places + places // self.head_dim * self.head_dim
        q = torch.full((len(tokens), self.heads * head_stride + 5), torch.nan)
        q[:, places] = self.q[tokens]
        if self.gate is not None:
            q[:, places + self.head_dim] = self.gate[tokens]
        out = torch.full((len(tokens), self.q.shape[1]), torch.nan)
        pointers = (x.data_ptr() for x in (self.k, self.v, *self.scales))
        cache = abi.KvCache(self.format, self.kv_heads, self.head_dim, *pointers)
        args = abi.AttentionArgs(
            ctypes.addressof(cache),
            q.data_ptr(),
            q.shape[1],
            out.data_ptr(),
            self.heads,
            self.window,
            self.scale,
            cap=self.cap,
            sinks=None if self.sinks is None else self.sinks.data_ptr(),
            chunked=self.chunked,
        )
        if self.gate is not None:
            args.head_stride = head_stride
            args.gate = q[:, self.head_dim :].data_ptr()
        arrays = [torch.tensor(starts).int(), torch.tensor(lens).int()]
        step = abi.StepArgs(
            num_tokens=len(tokens), num_requests=len(starts), rows=self.rows.data_ptr()
        )
        step.starts, step.lens = (x.data_ptr() for x in arrays)
        step.table, step.table_stride = self.table.data_ptr(), self.table.shape[1]
        kernels.run_one(args, step)
        return out

    def share(self, requests: Sequence[int], num_tokens: int) -> None:
        """These requests begin with the slots of the first of them."""
        of_first = self.table[self.rows[requests[0]], :num_tokens].clone()
        for request in requests[1:]:
            self.table[self.rows[request], :num_tokens] = of_first

    def alone(self, request: int) -> Cached:
        """One of the requests, by itself."""
        found = copy.copy(self)
        found.starts = [self.starts[request]]
        found.lens = [self.lens[request]]
        found.rows = self.rows[request : request + 1]
        found.q = self.q.split_with_sizes(list(self.lens))[request]
        if self.gate is not None:
            found.gate = self.gate.split_with_sizes(list(self.lens))[request]
        return found


def assert_right(kernels: Library, cached: Cached) -> None:
    expected = cached.expected()
    in_pairs = (
        cached.format == KvFormat.BF16 and "bf16" in kernels.instruction_set
    )  # queries and weights in bf16, too
    tolerance = 0.02 if in_pairs else 1e-5
    if cached.format == KvFormat.I8:
        tolerance = 3e-4  # queries and weights in 16 bits, beside keys and values in 8
    torch.testing.assert_close(cached.attend(kernels).double(), expected, rtol=0, atol=tolerance)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("format", FORMATS)
def test_single_tokens_see_all_that_is_cached(kernels: Library, format: KvFormat) -> None:
    assert_right(kernels, Cached([0, 5, 63, 64, 255, 256, 511, 900], [1] * 8, format))


@pytest.mark.parametrize("format", FORMATS)
def test_prompts_and_single_tokens_share_a_step(kernels: Library, format: KvFormat) -> None:
    assert_right(kernels, Cached([300, 0, 700, 31, 250], [1, 130, 3, 290, 20], format))


@pytest.mark.parametrize("format", FORMATS)
def test_capped_scores_are_those_of_the_twin(kernels: Library, format: KvFormat) -> None:
    assert_right(kernels, Cached([300, 0, 700, 31], [1, 130, 3, 30], format, cap=0.7))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (50, 0.0), (0, 0.7)])
def test_sinks_join_the_sum_of_each_head_once(
    kernels: Library, format: KvFormat, window: int, cap: float
) -> None:
    # Single tokens, drafts and prompts; of one segment of the cache, and of several.
    cached = Cached(
        [300, 0, 700, 31], [1, 130, 3, 30], format, window=window, cap=cap, has_sinks=True
    )
    assert_right(kernels, cached)


@pytest.mark.parametrize("head_dim", [64, 34])
def test_results_are_times_the_sigmoid_of_their_gates(kernels: Library, head_dim: int) -> None:
    assert_right(kernels, Cached([300, 0, 700], [1, 130, 3], head_dim=head_dim, is_gated=True))


def test_a_gate_that_is_not_a_number_is_seen(kernels: Library) -> None:
    cached = Cached([20, 20], [1, 1], KvFormat.F32, is_gated=True)
    expected = cached.attend(kernels)
    assert cached.gate is not None
    cached.gate[0, 3] = torch.nan
    out = cached.attend(kernels)
    assert out.isnan().nonzero().tolist() == [[0, 3]]
    assert torch.equal(out[1], expected[1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("window", [1, 50, 256, 400])
def test_a_window_hides_what_is_far(kernels: Library, format: KvFormat, window: int) -> None:
    assert_right(kernels, Cached([300, 700, 520, 0], [1, 1, 5, 301], format, window=window))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("chunk", [1, 50, 256, 300, 701])
def test_a_token_sees_its_chunk(kernels: Library, format: KvFormat, chunk: int) -> None:
    requests = ([300, 700, 511, 0, 512], [1, 1, 5, 301, 1])
    assert_right(kernels, Cached(*requests, format, window=chunk, chunked=True))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("window", "chunked"), [(1, False), (100, False), (256, False), (90, True)]
)
def test_what_a_window_has_left_behind_is_not_read(
    kernels: Library, format: KvFormat, window: int, chunked: bool
) -> None:
    cached = Cached([0], [700], format, window=window, chunked=chunked, has_sinks=True)
    whole = cached.attend(kernels)
    slots = cached.table[cached.rows[0]].long()
    start = 0
    for num in (300, 1, 3, 255, 1, 140):
        gone = slots[: Sight(window, chunked).first(start)]
        if format == KvFormat.I8:
            cached.scales[0][gone] = cached.scales[1][gone] = torch.nan
        else:
            cached.k[gone] = cached.v[gone] = torch.nan
        part = cached.attend(kernels, [start], [num])
        assert torch.equal(part, whole[start : start + num]), (start, num)
        start += num


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (7, 1), (15, 5), (16, 2), (64, 2)])
def test_any_number_of_heads_shares_keys_and_values(
    kernels: Library, heads: int, kv_heads: int
) -> None:
    assert_right(kernels, Cached([270, 40], [1, 12], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("head_dim", [32, 34, 80, 96, 128, 144, 256])
def test_any_size_of_head(kernels: Library, format: KvFormat, head_dim: int) -> None:
    assert_right(kernels, Cached([270, 40, 3], [1, 30, 3], format, head_dim=head_dim))


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_any_size_of_page(kernels: Library, page_size: int) -> None:
    assert_right(kernels, Cached([270, 40], [1, 30], page_size=page_size))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("window", "chunked", "has_sinks"),
    [
        (0, False, False),
        (100, False, False),
        (0, False, True),
        (100, False, True),
        (90, True, False),
    ],
)
def test_a_token_does_not_depend_on_how_its_prompt_was_cut(
    kernels: Library, format: KvFormat, window: int, chunked: bool, has_sinks: bool
) -> None:
    cached = Cached([0], [700], format, window=window, chunked=chunked, has_sinks=has_sinks)
    whole = cached.attend(kernels)
    for cuts in ([1, 255, 2, 442], [300, 1, 1, 1, 7, 390], [16, 500, 3]):
        start = 0
        for num in cuts:
            part = cached.attend(kernels, [start], [num])
            assert torch.equal(part, whole[start : start + num]), (start, num)
            start += num


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_token_does_not_depend_on_others_nor_on_threads(
    kernels: Library, format: KvFormat, has_sinks: bool, threads: Callable[[int], None]
) -> None:
    starts = [900, 0, 2000, 257, 12, 600]
    lens = [1, 100, 1, 4, 1, 40]
    cached = Cached(starts, lens, format, heads=6, has_sinks=has_sinks)
    threads(1)
    together = cached.attend(kernels).split_with_sizes(lens)
    for num in (2, 3, 40):
        threads(num)
        assert torch.equal(cached.attend(kernels), torch.cat(together)), num
    for request, expected in enumerate(together):
        assert torch.equal(cached.alone(request).attend(kernels), expected), request


@pytest.mark.parametrize(
    ("format", "num_sharing", "has_sinks"),
    [
        *((format, 3, has_sinks) for format in FORMATS for has_sinks in (False, True)),
        (FORMATS[0], 100, True),
        *(pytest.param(format, 100, True, marks=pytest.mark.slow) for format in FORMATS[1:]),
        *(
            pytest.param(format, num_sharing, has_sinks, marks=pytest.mark.slow)
            for format in FORMATS
            for num_sharing, has_sinks in ((12, False), (12, True), (100, False))
        ),
    ],
)
def test_requests_that_share_a_prefix_get_what_each_gets_alone(
    kernels: Library,
    format: KvFormat,
    has_sinks: bool,
    num_sharing: int,
    threads: Callable[[int], None],
) -> None:
    starts = [700, *range(600, 600 + num_sharing), 900, 900, 10]
    lens = [1] * len(starts)
    lens[2] = 3
    lens[-1] = 30
    cached = Cached(starts, lens, format, has_sinks=has_sinks, is_gated=True)
    sharing = range(1, 1 + num_sharing)
    cached.share(sharing, 590)
    # One of them has another page in its second segment, and two others a prefix of their own.
    cached.share([1 + num_sharing, 2 + num_sharing], 800)
    changed = cached.rows[num_sharing]
    cached.table[changed, 300:316] = cached.table[cached.rows[0], 300:316]
    assert_right(kernels, cached)
    threads(1)
    alone = [cached.alone(request).attend(kernels) for request in range(len(lens))]
    for num in (1, 2, 5):
        threads(num)
        together = cached.attend(kernels).split_with_sizes(lens)
        for request, expected in enumerate(alone):
            assert torch.equal(together[request], expected), request


def test_what_is_not_a_number_stays_with_its_request_behind_a_shared_prefix(
    kernels: Library,
) -> None:
    cached = Cached([600] * 6, [1] * 6, KvFormat.F32)
    cached.share(range(6), 560)
    expected = cached.attend(kernels)
    cached.v[cached.table[cached.rows[3], 570].long()] = torch.nan
    out = cached.attend(kernels)
    assert out[3].isnan().all()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(out[others], expected[others])


def test_requests_without_tokens_are_passed_over(kernels: Library) -> None:
    cached = Cached([300, 8, 40], [1, 0, 30])
    torch.testing.assert_close(
        cached.attend(kernels).double(), cached.expected(), rtol=0, atol=0.02
    )


def test_large_scores_do_not_overflow(kernels: Library) -> None:
    cached = Cached([500, 0], [1, 60], KvFormat.F32)
    cached.q *= 1000
    torch.testing.assert_close(
        cached.attend(kernels).double(), cached.expected(), rtol=0, atol=1e-2
    )


def test_what_is_not_a_number_stays_with_its_request(kernels: Library) -> None:
    cached = Cached([300, 300, 0], [1, 1, 40], KvFormat.F32)
    expected = cached.attend(kernels)
    cached.v[cached.table[cached.rows[1], 7].long()] = torch.nan
    out = cached.attend(kernels)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, *range(2, 42)]], expected[[0, *range(2, 42)]])
