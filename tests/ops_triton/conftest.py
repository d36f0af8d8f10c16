"""The kernels in Triton's interpreter, on the CPU: tests/conftest.py chooses it before anything
imports a kernel."""

from __future__ import annotations

import sys
from importlib.metadata import version

# There is no Triton elsewhere, and the interpreter of an older one, which a torch for CUDA may
# bring, lacks numpy 2.4.
if sys.platform != "linux" or tuple(map(int, version("triton").split(".")[:2])) < (3, 9):
    collect_ignore_glob = ["test_*.py"]
