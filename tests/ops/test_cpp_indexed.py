"""Attention to the keys that an indexer chooses, by the kernels of every instruction set: against
torch."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from tests.executor.driver import ints
from weft.ops.cpp import abi
from weft.ops.cpp.abi import KvFormat
from weft.ops.cpp.library import Library
from weft.ops.indexed import chosen_keys, index_scores

HEADS = 11
HEAD_DIM = 48
INDEX_HEADS = 3
INDEX_DIM = 32
NUM_SLOTS = 640
CHOSEN = 21
# The first sees fewer keys than are chosen, the second more from its third token on, and the last
# more than are scored at a time.
STARTS = ints([3, CHOSEN - 2, 300])
LENS = ints([4, 5, 1])
DTYPES = {KvFormat.F32: torch.float32, KvFormat.BF16: torch.bfloat16}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Case:
    """One step. Rows of queries have those of the indexer and its weights behind them."""

    def __init__(self, format: KvFormat) -> None:
        self.format = format
        self.num_tokens = int(LENS.sum())
        self.q = random(self.num_tokens, HEADS * HEAD_DIM)
        self.index_q = random(self.num_tokens, INDEX_HEADS * INDEX_DIM)
        self.weights = random(self.num_tokens, INDEX_HEADS)
        self.keys = random(NUM_SLOTS, HEAD_DIM).to(DTYPES[format])
        self.index_keys = random(NUM_SLOTS, INDEX_DIM).to(DTYPES[format])
        slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))
        self.table = slots.view(2, 320).int()
        # The last two share the first keys.
        self.rows = ints([1, 0, 0])

    def seen(self) -> list[tuple[int, Tensor]]:
        """Of each token: its number in the step, and the slots of the keys that it sees."""
        found: list[tuple[int, Tensor]] = []
        for row, start, num in zip(self.rows, STARTS, LENS, strict=True):
            for index in range(num):
                found.append((len(found), self.table[row][: start + index + 1].long()))
        return found

    def expected(self, out: Tensor) -> Tensor:
        """`out` [T, HEADS * HEAD_DIM] with the rows of tokens that see more keys than are chosen"""
        out = out.clone()
        for token, slots in self.seen():
            if len(slots) <= CHOSEN:
                continue
            here = slice(token, token + 1)
            q = self.index_q[here].view(1, INDEX_HEADS, INDEX_DIM)
            scores = index_scores(q, self.index_keys[slots], self.weights[here])
            chosen = chosen_keys(scores, torch.tensor([len(slots)]), CHOSEN)[0]
            assert int(chosen.sum()) == CHOSEN
            keys = self.keys[slots[chosen]].float()
            products = self.q[here].view(HEADS, HEAD_DIM) @ keys.T / math.sqrt(HEAD_DIM)
            out[token] = (products.softmax(-1) @ keys).flatten()
        return out

    def run(self, kernels: Library, out: Tensor) -> None:
        columns = torch.cat((self.q, self.index_q, self.weights), 1)
        caches = []
        for keys in (self.keys, self.index_keys):
            address = keys.data_ptr()
            cache = abi.KvCache(
                format=self.format, kv_heads=1, head_dim=keys.shape[1], k=address, v=address
            )
            caches.append(cache)
        of_index = columns[:, HEADS * HEAD_DIM :]
        chosen = torch.full((self.num_tokens, CHOSEN), -1, dtype=torch.int32)
        args = abi.IndexedArgs(
            cache=ctypes.addressof(caches[0]),
            index=ctypes.addressof(caches[1]),
            q=columns.data_ptr(),
            q_stride=columns.stride(0),
            index_q=of_index.data_ptr(),
            weights=of_index[:, INDEX_HEADS * INDEX_DIM :].data_ptr(),
            out=out.data_ptr(),
            heads=HEADS,
            index_heads=INDEX_HEADS,
            num_chosen=CHOSEN,
            scale=1 / math.sqrt(HEAD_DIM),
            chosen=chosen.data_ptr(),
        )
        step = abi.StepArgs(
            num_tokens=self.num_tokens,
            num_requests=len(LENS),
            rows=self.rows.ctypes.data,
            starts=STARTS.ctypes.data,
            lens=LENS.ctypes.data,
            table=self.table.data_ptr(),
            table_stride=self.table.stride(0),
        )
        kernels.run_one(args, step)


@pytest.mark.parametrize("format", DTYPES)
def test_tokens_attend_to_the_keys_that_are_chosen(kernels: Library, format: KvFormat) -> None:
    case = Case(format)
    before = torch.full((case.num_tokens, HEADS * HEAD_DIM), 7.0)
    out = before.clone()
    case.run(kernels, out)
    # Queries and weights are rounded as in all attention, which chooses no other keys.
    in_pairs = format == KvFormat.BF16 and "bf16" in kernels.instruction_set
    tolerance = 0.02 if in_pairs else 1e-5
    torch.testing.assert_close(out, case.expected(before), rtol=0, atol=tolerance)
    assert (out == 7.0).all(1).tolist() == [True] * 6 + [False] * 4


def test_of_equal_keys_the_first_are_chosen_and_no_number_comes_last(kernels: Library) -> None:
    case = Case(KvFormat.F32)
    case.index_keys.zero_()
    last = len(case.seen()) - 1
    slots = case.seen()[last][1]
    case.index_keys[slots[5]] = torch.nan
    out = torch.zeros(case.num_tokens, HEADS * HEAD_DIM)
    case.run(kernels, out)
    first = [slot for index, slot in enumerate(slots[: CHOSEN + 1]) if index != 5]
    keys = case.keys[torch.stack(first)]
    products = case.q[last].view(HEADS, HEAD_DIM) @ keys.T / math.sqrt(HEAD_DIM)
    expected = (products.softmax(-1) @ keys).flatten()
    torch.testing.assert_close(out[last], expected, rtol=0, atol=1e-5)
