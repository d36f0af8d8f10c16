"""The list of slots, in Triton's interpreter, against what numpy picks."""

from __future__ import annotations

import pytest
import torch

from weft.ops.triton import indices
from weft.ops.triton.indices import slot_indices


@pytest.mark.parametrize("block", [4, 1024])
def test_slots_of_all_requests_stand_one_behind_the_other(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lines of any order, twice in the same one, none at all, and with nothing written behind the last."""
    monkeypatch.setattr(indices, "BLOCK", block)
    table = torch.randint(1 << 30, (5, 37), dtype=torch.int32)
    rows, lens = (
        torch.tensor([3, 0, 3, 4, 1], dtype=torch.int32),
        torch.tensor([37, 1, 4, 0, 9], dtype=torch.int32),
    )
    indptr = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    out = torch.full((60,), -7, dtype=torch.int32)
    slot_indices(table, rows, indptr, 37, out)
    wanted = torch.cat([table[row, :num] for row, num in zip(rows, lens, strict=True)])
    assert torch.equal(out[: len(wanted)], wanted)
    assert (out[len(wanted) :] == -7).all()
