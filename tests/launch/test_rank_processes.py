"""How the end of a rank is told, with processes that only end."""

from __future__ import annotations

import sys
import threading

import pytest

from weft.assemble import rank_processes
from weft.assemble.rank_processes import RankProcesses
from weft.config.engine import EngineConfig
from weft.config.engine_args import FollowerArgs

HANG_S = 240.0
ARGS = FollowerArgs(
    config=EngineConfig(),
    folder="",
    rank=1,
    link=-1,
    meeting="",
    memory=-1,
    log_level="info",
    log_format="text",
)
SAYS_WHY = """
import os, sys
from weft.config.engine_args import FollowerArgs
os.write(FollowerArgs.from_json(sys.stdin.readline()).last_words, b"MemoryError: none left")
sys.exit(1)
"""
SAYS_NOTHING = "import sys; sys.stdin.readline(); sys.exit(3)"


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (SAYS_WHY, "rank 1 failed: MemoryError: none left"),
        (SAYS_NOTHING, "rank 1 ended with exit status 3; its last output is above"),
    ],
)
def test_the_end_of_a_rank_is_reported_in_its_own_words_if_it_had_any(
    script: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "COMMAND", (sys.executable, "-c", script))
    told: list[str] = []
    has_ended = threading.Event()

    def note(reason: str) -> None:
        told.append(reason)
        has_ended.set()

    ranks = RankProcesses(note)
    ranks.start(ARGS)
    ranks.watch()
    assert has_ended.wait(HANG_S)
    assert told == [line]
    ranks.close()
