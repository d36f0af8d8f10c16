from __future__ import annotations

import numpy as np
import pytest

from tests.executor.driver import ints
from weft.executor.backend import StepSize
from weft.executor.gpu.layout import MAX_SPLITS, Tiling

TILING = Tiling(
    num_heads=4, num_kv_heads=2, tile_rows=16, num_processors=132
)  # a tile has 8 tokens


def test_every_query_is_in_one_tile_or_decodes() -> None:
    starts = ints([0, 50, 7, 3])
    lens = ints([20, 1, 8, 9])
    layout = TILING.lay_out(
        ints([5, 2, 9, 0]), starts, lens, np.arange(38, dtype=np.int32), TILING.size(lens)
    )
    seen = [
        (int(request), token)
        for request, first in zip(layout.tile_req, layout.tile_start, strict=True)
        for token in range(first // 2, min(first // 2 + 8, lens[request]))
    ]
    seen += [(int(request), 0) for request in layout.decode_req]
    assert sorted(seen) == [
        (request, token) for request, num in enumerate(lens) for token in range(num)
    ]
    assert layout.positions.tolist() == [*range(20), 50, *range(7, 15), *range(3, 12)]
    assert layout.kv_lens.tolist() == [20, 51, 15, 12]
    assert layout.q_indptr.tolist() == [0, 20, 21, 29, 38]


def test_tiles_that_see_most_come_first() -> None:
    lens = ints([20, 8])
    layout = TILING.lay_out(
        ints([0, 1]), ints([0, 100]), lens, np.zeros(28, np.int32), TILING.size(lens)
    )
    assert layout.tile_req.tolist() == [1, 0, 0, 0]
    assert layout.tile_start.tolist() == [0, 32, 16, 0]


def test_what_is_longer_than_the_step_is_padding() -> None:
    size = StepSize(num_requests=3, num_tokens=12, num_decodes=2, num_tiles=4, num_splits=5)
    layout = TILING.lay_out(
        ints([4, 6]), ints([9, 0]), ints([1, 9]), np.arange(10, dtype=np.int32), size
    )
    assert layout.rows.tolist() == [4, 6, 0]
    assert layout.kv_lens.tolist() == [10, 9, 0]
    assert layout.q_indptr.tolist() == [0, 1, 10, 10]
    assert layout.decode_req.tolist() == [0, -1]
    assert layout.tile_req.tolist() == [1, 1, -1, -1]
    assert layout.positions[10:].tolist() == [0, 0]
    assert layout.out_slots[9:].tolist() == [9, -1, -1]
    assert all(part.dtype == np.int32 for part in layout)


@pytest.mark.parametrize("seed", range(20))
def test_sizes_for_any_step_hold_every_step_within_their_bounds(seed: int) -> None:
    random = np.random.default_rng(seed)
    tiling = Tiling(num_heads=3 * 7, num_kv_heads=3, tile_rows=16, num_processors=132)
    lens = random.integers(1, 30, random.integers(1, 9)).astype(np.int32)
    bound = tiling.extend_size(int(lens.sum()), len(lens))
    args = (
        np.arange(len(lens), dtype=np.int32),
        np.zeros(len(lens), np.int32),
        lens,
        np.zeros(lens.sum(), np.int32),
    )
    layout = tiling.lay_out(*args, bound)  # asserts that it fits
    assert set(layout.tile_req.tolist()) - {-1} == set(range(len(lens)))
    ones = np.ones(len(lens), np.int32)
    assert tiling.decode_size(len(lens) + 1).holds(tiling.size(ones))
    assert not tiling.decode_size(len(lens) + 1).holds(tiling.size(ones + 1))


def test_few_requests_are_split_and_many_are_not() -> None:
    assert TILING.num_splits(1) == MAX_SPLITS
    assert TILING.num_splits(64) == 16  # 9 would do
    assert TILING.num_splits(1_000) == 1


def test_a_step_without_tokens_has_a_layout() -> None:
    empty = ints([])
    layout = TILING.lay_out(empty, empty, empty, empty, TILING.size(empty))
    assert [len(part) for part in layout] == [0, 0, 1, 0, 0, 0, 0, 0]
