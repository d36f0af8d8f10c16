"""Memory of packed weights: zeros, cut from large pieces."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from weft.executor.wire.shared_pool import SharedPool
from weft.ops.cpp.weight_memory import HUGE_PAGE, PIECE_BYTES, WeightMemory
from weft.parallel.shared_memory import anonymous_file
from weft.weights.release import give_back

CPU = torch.device("cpu")
BYTES = torch.uint8
SIZES = (1, 64, 100, 3_000_000, 5)


def test_tensors_are_zeros_side_by_side_that_share_nothing() -> None:
    memory = WeightMemory()
    tensors = [memory.zeros(size) for size in SIZES]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(number + 1)
    for number, (size, tensor) in enumerate(zip(SIZES, tensors, strict=True)):
        assert tensor.shape == (size,)
        assert tensor.untyped_storage().nbytes() == size
        assert tensor.eq(number + 1).all()
    ends = [tensor.data_ptr() + len(tensor) for tensor in tensors]
    for end, behind in zip(ends, tensors[1:], strict=False):
        assert 0 <= behind.data_ptr() - end < 64


def test_a_piece_begins_with_a_huge_page_and_a_large_tensor_has_its_own() -> None:
    memory = WeightMemory()
    first = memory.zeros(64)
    large = memory.zeros(PIECE_BYTES + 1)
    assert first.data_ptr() % HUGE_PAGE == 0
    assert large.data_ptr() % HUGE_PAGE == 0
    assert not large[-HUGE_PAGE:].any()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux only")
def test_pages_of_one_tensor_are_given_back_without_its_neighbours() -> None:
    memory = WeightMemory()
    left, middle, right = (memory.zeros(10 * mmap.PAGESIZE + 100) for _ in range(3))
    for tensor in (left, middle, right):
        tensor.fill_(7)
    assert 0 < give_back([middle]) <= len(middle)
    assert not middle[mmap.PAGESIZE : -mmap.PAGESIZE].any()
    assert left.eq(7).all()
    assert right.eq(7).all()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has files without a name")
def test_memory_that_two_have_is_given_back_for_both() -> None:
    file = anonymous_file(0)
    shape = (3, mmap.PAGESIZE)
    first = SharedPool(file)
    same = SharedPool(file)
    nothing, mine, behind = (first.zeros(each, BYTES, CPU) for each in ((0, 4), shape, (5, 2)))
    mine.fill_(7)
    behind.fill_(9)
    theirs = [same.zeros(each, BYTES, CPU) for each in ((0, 4), shape, (5, 2))]
    assert not len(nothing)
    assert theirs[1].eq(7).all()
    assert theirs[2].eq(9).all()
    assert give_back([mine]) == mine.nbytes
    assert not theirs[1].any()
    assert theirs[2].eq(9).all()
    first.close()
