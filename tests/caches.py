"""A cache of weft that belongs to one test, but for the compiled kernels: to compile them takes a
minute of a processor, and all tests need the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.ops.cpp.build import cache_folder


def set_own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weft keep its files in `folder` for as long as the test runs."""
    compiled = cache_folder()
    compiled.mkdir(parents=True, exist_ok=True, mode=0o700)
    monkeypatch.setenv("WEFT_CACHE", str(folder))
    own = cache_folder()
    own.parent.mkdir(parents=True)
    own.symlink_to(compiled)
