"""Python's collector leaves alone what all tests share, and no test gives that back to it.

weft freezes when an engine has warmed up and thaws when one is closed. In a process of tests, that
would let each collection after it walk through everything that the tests have imported. Nor does
weft collect before it would freeze: that is for what is frozen, and costs a tenth of tests that
make many engines.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator

import pytest

MANY = 100_000  # objects; to look at them takes a twentieth of a second
_FREEZE = gc.freeze
_UNFREEZE = gc.unfreeze
WEFTS: dict[str, Callable[[], None]] = {}  # what weft has instead of `_nothing`


def freeze_for_good() -> None:
    """What is there now stays; later calls of weft change nothing."""
    gc.collect()
    _FREEZE()
    gc.freeze = gc.unfreeze = _nothing
    if garbage := sys.modules.get("weft.observe.garbage"):
        WEFTS.setdefault("freeze", garbage.freeze)
        vars(garbage)["freeze"] = _nothing


def freeze_what_stays() -> None:
    """Behind the tests of a file: what they have imported stays for all others."""
    if len(gc.get_objects()) > MANY:
        gc.collect()
        _FREEZE()


def _nothing() -> None:
    pass


@pytest.fixture
def own_freezing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of what weft freezes: its calls have their effect, and nothing is frozen before."""
    monkeypatch.setattr(gc, "freeze", _FREEZE)
    monkeypatch.setattr(gc, "unfreeze", _UNFREEZE)
    if WEFTS:
        monkeypatch.setattr("weft.observe.garbage.freeze", WEFTS["freeze"])
    gc.unfreeze()
    yield
    gc.freeze()
