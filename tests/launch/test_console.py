"""What a start prints while the engines load."""

from __future__ import annotations

import sys
import time

import pytest

from weft.config.server import ServerConfig
from weft.launch.console import Console


def console(**options: object) -> Console:
    config = ServerConfig(**options)  # type: ignore[arg-type]
    return Console(config, time.perf_counter(), requires_key=False)


def test_progress_is_a_line_of_its_own_where_nobody_watches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = console()
    shown.progress(1_200_000_000, 8_100_000_000)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "  loading     0 s so far: 1.2 GB in memory, the weights take 8.1 GB"


def test_progress_is_rewritten_on_a_terminal_and_gone_before_the_next_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = console()
    shown.progress(1_000_000, 8_000_000)
    shown.progress(2_000_000, 8_000_000)
    shown.stopped()
    text = capsys.readouterr().err
    assert text.count("\r\x1b[2K") == 3
    assert text.endswith("\r\x1b[2Kstopped\n")
    assert text.count("\n") == 1


def test_a_quiet_log_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    console(log_level="error").progress(1_000_000, 8_000_000)
    assert capsys.readouterr().err == ""
