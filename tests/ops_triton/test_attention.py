"""The attention kernels, in Triton's interpreter, against `ops/attention.py` in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops_triton.cached import Cached, assert_right, sparse_bytes
from tests.seeds import slow
from weft.executor.backend import StepSize
from weft.ops.triton.launches import Launch, decode_launch, extend_launch
from weft.ops.triton.paged import Kv

SMALL = Launch(rows=16, keys=16, warps=4, stages=1)
HALF = 2e-3  # what float16 may be off


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prompts_chunks_and_single_tokens_see_what_is_theirs(
    page_size: int, dtype: torch.dtype
) -> None:
    cached = Cached([0, 33, 20, 0, 70], [17, 1, 30, 1, 2], page_size=page_size, dtype=dtype)
    assert_right(cached, tolerance=2e-5 if dtype == torch.float32 else HALF)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1), (8, 1), (3, 1), (10, 2)])
def test_heads_share_keys_in_groups_of_any_size(heads: int, kv_heads: int) -> None:
    assert_right(Cached([5, 40, 0], [19, 1, 1], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("head_dim", [16, 64, 80, *slow([32, 96, 128])])
def test_heads_have_any_size(head_dim: int) -> None:
    assert_right(Cached([5, 40], [19, 1], heads=2, kv_heads=1, head_dim=head_dim))


@pytest.mark.parametrize("window", [1, 16, 33, *slow([5, 200])])
def test_a_window_hides_what_is_before_it(window: int) -> None:
    assert_right(Cached([30, 61, 0, 3], [40, 1, 1, 9], window=window, page_size=3))


@pytest.mark.parametrize("chunk", [5, 32, 33, *slow([1, 200])])
def test_a_token_sees_its_chunk(chunk: int) -> None:
    requests = ([30, 61, 0, 3, 65, 63], [40, 1, 1, 9, 1, 2])
    assert_right(Cached(*requests, window=chunk, chunked=True, page_size=3))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_sinks_join_the_sum_of_each_head_once(heads: int, kv_heads: int, window: int) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "window": window, "page_size": 3}
    assert_right(Cached([30, 61, 0, 3], [40, 1, 1, 9], has_sinks=True, **shape))


@pytest.mark.parametrize("splits", [1, 8])
def test_results_are_times_the_sigmoid_of_their_gates(splits: int) -> None:
    mixed = Cached([30, 61, 0, 3], [40, 1, 1, 9], is_gated=True, window=5, page_size=3)
    assert_right(mixed)
    cached = Cached([0, 32, 129], [1, 1, 1], launch=SMALL, is_gated=True, has_sinks=True)
    assert_right(cached, StepSize(3, 3, 3, 0, splits))


def test_scores_are_capped() -> None:
    assert_right(Cached([30, 61, 0, 3], [40, 1, 1, 9], cap=0.7, has_sinks=True, page_size=3))
    assert_right(Cached([30, 61, 0, 3], [40, 1, 1, 9], cap=0.7, window=5))


@pytest.mark.parametrize("splits", [1, 3, 40])
def test_sinks_count_once_however_many_splits_there_are(splits: int) -> None:
    cached = Cached([0, 32, 129], [1, 1, 1], heads=2, kv_heads=1, launch=SMALL, has_sinks=True)
    assert_right(cached, StepSize(3, 3, 3, 0, splits))


@pytest.mark.parametrize("splits", [1, 3, 40, *slow([2, 8])])
def test_the_number_of_splits_does_not_matter(splits: int) -> None:
    cached = Cached([0, 32, 129], [1, 1, 1], heads=2, kv_heads=1, launch=SMALL)
    assert_right(cached, StepSize(3, 3, 3, 0, splits))


def test_a_larger_size_computes_the_same_bits() -> None:
    cached = Cached([30, 61, 0, 8], [20, 1, 13, 1], page_size=1)
    exact = cached.tiling.size(np.array(cached.lens))
    larger = StepSize(
        exact.num_requests + 3,
        len(cached.q),
        exact.num_decodes + 2,
        exact.num_tiles + 5,
        exact.num_splits,
    )
    assert_right(cached, larger)
    num = sum(cached.lens)
    assert torch.equal(cached.attend(larger)[:num], cached.attend()[:num])


def test_a_size_for_any_prompts_takes_single_tokens_as_tiles() -> None:
    cached = Cached([30, 61, 0, 8], [3, 1, 7, 1])
    assert_right(cached, cached.tiling.extend_size(len(cached.q), 6))


def test_eight_bit_kv_is_widened_and_scaled() -> None:
    cached = Cached([0, 33], [17, 1], kv_dtype=torch.float8_e4m3fn, kv_scales=(0.5, 3.0))
    assert_right(cached, tolerance=1e-4)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_tiles_that_serve_are_right_too(head_dim: int) -> None:
    cached = Cached(
        [130, 0],
        [70, 35],
        heads=2,
        kv_heads=1,
        head_dim=head_dim,
        launch=extend_launch(head_dim, 2),
    )
    assert_right(cached)
    assert_right(
        Cached(
            [300, 10],
            [1, 1],
            heads=2,
            kv_heads=1,
            head_dim=head_dim,
            launch=decode_launch(head_dim, 2),
        )
    )


def test_a_cache_may_have_more_numbers_than_32_bits_count() -> None:
    """Where only bytes that are used take memory: an index that wrapped would find the zeros at the
    beginning."""
    cached = Cached([0, 33], [9, 1], heads=2, kv_heads=1, head_dim=16, kv_dtype=torch.float8_e4m3fn)
    ahead = (1 << 32) // 16
    large = sparse_bytes((ahead + len(cached.kv.k)) * 16).view(torch.float8_e4m3fn).view(-1, 1, 16)
    large[ahead:] = cached.kv.v.where(cached.kv.v.float().isfinite(), 0)
    cached.kv = Kv(large[ahead:], large[ahead:])
    expected = cached.expected()
    cached.kv, cached.table = Kv(large, large), cached.table + ahead
    actual = cached.attend()[: len(expected)].double()
    assert torch.allclose(actual, expected, atol=2e-5)
