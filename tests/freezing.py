"""Python's collector leaves alone what all tests share, and no test gives that back to it.

weft freezes when an engine has warmed up and thaws when one is closed. In a process of tests, that
would let each collection after it walk through everything that the tests have imported.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

_FREEZE = gc.freeze
_UNFREEZE = gc.unfreeze


def freeze_for_good() -> None:
    """What is there now stays; later calls of weft change nothing."""
    gc.collect()
    _FREEZE()
    gc.freeze = gc.unfreeze = _nothing


def _nothing() -> None:
    pass


@pytest.fixture
def own_freezing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of what weft freezes: its calls have their effect, and nothing is frozen before."""
    monkeypatch.setattr(gc, "freeze", _FREEZE)
    monkeypatch.setattr(gc, "unfreeze", _UNFREEZE)
    gc.unfreeze()
    yield
    gc.freeze()
