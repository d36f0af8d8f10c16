"""Durations and deadlines are counted by a clock that only goes forward: nobody minds when the
machine's is set."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "weft"
WALL_CLOCKS = {
    "time.time",
    "time.time_ns",
    "datetime.now",
    "datetime.utcnow",
    "time.gmtime",
    "time.localtime",
}

# What decides, and what in it tells the time of day to people without deciding anything by it.
DECIDES = (
    "scheduler",
    "memory",
    "plan",
    "engine",
    "journal",
    "executor",
    "messages",
    "text",
    "client",
    "server/http/middleware.py",
    "server/limits.py",
    "launch",
    "assemble",
    "cli",
    "bench",
)
TOLD = {
    "executor/profile/profile.py",  # when what the kernels noted was, on the clock of the trace
    "client/adapters.py",  # since when an adapter is served
    "bench/results.py",  # when it was measured
    "launch/front.py",  # since when the model is served
    "launch/several/blank.py",  # since when the server runs
    "launch/several/roster.py",  # since when a model is served
    "cli/store/common.py",  # how old a file is
    "cli/replay.py",  # when a journal began
    "journal/recorder.py",  # the same
    "text/templates/chat_template.py",  # templates that tell the date
}


def reads(source: str) -> bool:
    # Few files are parsed.
    return any(name in source for name in WALL_CLOCKS) and any(
        isinstance(node, ast.Call) and ast.unparse(node.func) in WALL_CLOCKS
        for node in ast.walk(ast.parse(source))
    )


def test_nothing_is_decided_by_a_clock_that_can_be_set() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if reads(path.read_text("utf-8"))
    }
    assert {path for path in found if path.startswith(DECIDES)} == TOLD
