"""A log on a disk that is full, or whose reader has gone, takes nothing but the log away."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator

import pytest

from weft.config.server import ServerConfig
from weft.launch.console import Console
from weft.observe.log import EventLog, setup


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard error lies on a full disk."""
    root = logging.getLogger()
    level = logging.getLogger("weft").level
    before = root.handlers[:], root.level
    stream = open("/dev/full", "w", buffering=1)  # noqa: SIM115 (it stays open for the test)
    monkeypatch.setattr(sys, "stderr", stream)
    yield
    root.handlers[:], root.level = before
    logging.getLogger("weft").setLevel(level)
    try:
        stream.close()
    except OSError:
        return  # what could not be written is lost


def test_a_full_disk_takes_the_log_away_and_nothing_else(full_disk: None) -> None:
    console = Console(ServerConfig(), time.perf_counter(), requires_key=False)
    console.stopped()
    console.warn("something")
    setup("info")
    EventLog("server").error("something", reason="else")
    try:
        raise ValueError("of a handler")
    except ValueError:
        EventLog("server").exception("bug")
