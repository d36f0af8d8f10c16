from __future__ import annotations

import subprocess
import sys


def test_weft_needs_no_triton_unless_a_gpu_computes() -> None:
    code = """
import sys
sys.modules["triton"] = None  # so that an import of it fails
import weft.executor.build, weft.executor.gpu.layout, weft.cli.main
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
