"""The kernels in Triton's interpreter, on the CPU: tests/conftest.py chooses it before anything
imports a kernel."""

from __future__ import annotations

from tests.ops_triton.interpreter import is_recent, make_quick

if is_recent():
    make_quick()
else:
    collect_ignore_glob = ["test_*.py"]
