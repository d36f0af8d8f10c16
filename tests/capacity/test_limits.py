"""What limits a machine, from figures at a level that it does not bear."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from weft.capacity.limits import what_limits
from weft.capacity.trial import LoadPoint
from weft.sim.curve import CostParts
from weft.sim.report import Slo

PARTS = CostParts(weights_s=5.0, compute_s=3.0, context_s=1.0, sample_s=1.0)
POINT = LoadPoint(
    level=8.0,
    good_share=0.8,
    good_per_s=1.0,
    requests_per_s=1.3,
    output_per_s=100.0,
    ttft_s=(0.3, 2.0),
    itl_s=(0.03, 0.09),
    refused=0,
    retractions=0,
    device_use=0.95,
    row_use=0.4,
    kv_use=0.3,
    hit_rate=0.0,
    front_s=0.02,
    parts=PARTS,
)
SLO = Slo(1.0, 0.1)


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({}, "bandwidth", "bandwidth 60%, compute 30%, streaming 10%"),
        ({"parts": replace(PARTS, compute_s=9.0)}, "compute", "compute 56%"),
        ({"parts": replace(PARTS, sample_s=9.0)}, "streaming", "each new token"),
        ({"kv_use": 0.95}, "memory", "95% of the KV pool"),
        ({"retractions": 3}, "memory", "3 requests lost"),
        ({"front_s": 0.2}, "front", "0.200 s in the front"),
        ({"front_s": 0.6, "ttft_s": (5.0, 9.0)}, "front", "0.600 s"),
        ({"row_use": 0.95, "device_use": 0.7}, "rows", "--max-running-requests"),
        ({"row_use": 0.95, "device_use": 0.8}, "bandwidth", ""),
        ({"device_use": 0.4}, "prompts", "works 40% of the time.* takes 2.00 s"),
        ({"device_use": 0.4, "ttft_s": (0.3, 0.9)}, "bandwidth", ""),
    ],
)
def test_the_limit_is_named(changes: dict[str, Any], name: str, reason: str) -> None:
    found = what_limits(POINT._replace(**changes), SLO)
    assert found.name == name
    assert re.search(reason, found.reason)
