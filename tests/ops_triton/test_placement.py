"""`TritonOps` with every placement: several processes compute what one computes."""

from __future__ import annotations

import pytest
import torch

from tests.ops.placed import PLACEMENTS, Device, Process, assert_same, logits_of, whole
from tests.ops.test_placement import PLAIN, plain_experts, torch_joint, torch_logits
from weft.ops.triton.ops import TritonOps

CPU = torch.device("cpu")


def triton_ops(process: Process, number: int) -> TritonOps:
    return TritonOps(torch.float32, CPU, "", process.placement, torch_joint(process))


TRITON = Device(triton_ops, plain_experts, torch_logits)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_processes_together_compute_what_one_computes(placement: str) -> None:
    (expected,) = logits_of(PLAIN, whole())
    found = logits_of(TRITON, PLACEMENTS[placement]())
    assert_same(found, expected, is_exact=False)
