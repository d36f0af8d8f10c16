"""What the kernels become on an H100 or H200, found out without one by compiling alone:
`compiled.py` does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = 227 * 1024  # bytes that a program may have
LARGEST = [  # of each kernel the variants with most registers or with instructions of their own
    "extend 128 x 4",
    "extend 128 x 2, window",
    "extend 256 x 8",
    "decode 64 x 4",
    "decode 128 x 4, fp8",
    "combine",
    "rotary, fp8",
    "norm and fp8",
    "threshold",
    "draw",
    "short convolution",
    "delta rule",
    "mamba",
]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    settings = {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    env = {**os.environ, **settings, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.ops_triton.compiled", *LARGEST]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    return {kernel.pop("kernel"): kernel for kernel in kernels}


def test_registers_suffice_and_nothing_is_spilled(found: dict[str, dict[str, int]]) -> None:
    assert list(found) == LARGEST
    for name, kernel in found.items():
        assert kernel["spills"] == kernel["stack"] == 0, (name, kernel)
        assert kernel["registers"] <= 255, (name, kernel)
        assert kernel["shared"] <= SHARED, (name, kernel)


def test_attention_uses_tensor_cores_and_loads_ahead(found: dict[str, dict[str, int]]) -> None:
    for name, kernel in found.items():
        if name.startswith("extend"):
            assert kernel["wgmma"] > 0, (name, kernel)
        if name.startswith("decode"):
            assert kernel["mma"] > 0, (name, kernel)
        if name.startswith(("extend", "decode")):
            assert kernel["async_copies"] > 0, (name, kernel)


def test_four_programs_that_decode_share_a_processor(found: dict[str, dict[str, int]]) -> None:
    kernel = found["decode 64 x 4"]
    assert 4 * 128 * kernel["registers"] <= 65_536
    assert 4 * kernel["shared"] <= SHARED


def test_floats_of_eight_bits_are_made_by_one_instruction(found: dict[str, dict[str, int]]) -> None:
    for name in ("rotary, fp8", "norm and fp8"):
        assert found[name]["float8"] > 0, name
