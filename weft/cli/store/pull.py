"""The verb `pull`: fetches a model of the Hugging Face hub."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from weft.cli.store.common import require_name, settings_of
from weft.config.amounts import size
from weft.config.options import Command, option
from weft.store.store import ModelStore
from weft.weights.pull.progress import ProgressWatcher, PullProgress
from weft.weights.pull.pull import Pulled

ABOUT = (
    "Fetch a model of the Hugging Face hub: ORG/NAME, ORG/NAME:Q4_K_M, or ORG/NAME/FILE.gguf. Of "
    "several GGUF types, one that fits into the memory is taken. A pull that was ended goes on "
    "where it was."
)
TERMINAL_S = 0.1  # between two changes of the line
LINES_S = 10.0  # between two lines, where the output is no terminal
CLEAR = "\r\x1b[K"


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    name: str = option("", "the model to fetch", group="pull", everyday=True)
    revision: str = option("", "branch, tag or commit on the hub", group="pull", everyday=True)


def pull(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    command = Command("weft pull", ABOUT, PullOptions, positional="name", has_variables=False)
    settings = settings_of(command, argv)
    if settings is None:
        return 0
    options = settings.make(PullOptions)
    name = require_name(options.name, "pull")
    line = ProgressLine()
    watcher = ProgressWatcher(line.show, line.say)
    try:
        pulled = ModelStore().pull(name, options.revision, watcher)
    except KeyboardInterrupt:
        line.say("ended; what has come is kept, and the same command goes on")
        raise
    finally:
        line.close()
    _tell(pulled)
    return 0


def _tell(pulled: Pulled) -> None:
    total = sum(file.num_bytes for file in pulled.files)
    print(f"{pulled.name}: {len(pulled.files)} files, {size(total)}, digests are right")
    print(f"weft serve {pulled.name}")


class ProgressLine:
    """PullProgress on standard error: a line that changes, or, where it is no terminal, a line from
    time to time."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._written_at = 0.0
        self._shown = ""

    def show(self, progress: PullProgress) -> None:
        now = time.monotonic()
        is_last = progress.done_bytes == progress.total_bytes
        wait_s = TERMINAL_S if self._is_terminal else LINES_S
        if now - self._written_at < wait_s and not is_last:
            return
        if progress.line == self._shown:
            return
        self._written_at = now
        self._shown = progress.line
        if self._is_terminal:
            sys.stderr.write(f"{CLEAR}{progress.line}")
        else:
            sys.stderr.write(f"{progress.line}\n")
        sys.stderr.flush()

    def say(self, line: str) -> None:
        """A line that stays."""
        begin = CLEAR if self._is_terminal else ""
        sys.stderr.write(f"{begin}{line}\n")
        sys.stderr.flush()

    def close(self) -> None:
        if self._is_terminal and self._shown:
            sys.stderr.write("\n")
            sys.stderr.flush()
