"""Prints what the person who started `weft serve` needs to know: a dozen timed lines until the
server is ready, and how it stops.

    weft 0.1.0 · weft-nano (11.4 M, bfloat16) · cpu, 2 threads
      kv cache    1.6 GB = 524,288 tokens (page 8) · 256 requests of 2,048 tokens
      loading     2 s so far: 412 MB in memory, the weights take 23 MB   (only if it takes longer)
      weights     23 MB loaded in 0.1 s
      warm-up     2 tokens in 0.2 s
    ready in 2.4 s · http://127.0.0.1:30000  (API /v1, metrics /metrics)

All lines go to standard error; with a log level above "info" only warnings are printed. If the log
is JSON, the lines are JSON too.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.config.amounts import parameters, size, types
from weft.config.numbers import counted
from weft.config.resolve import kept_as
from weft.config.server import ServerConfig
from weft.observe.log import EventLog
from weft.version import __version__

if TYPE_CHECKING:
    from weft.assemble.prepare import Prepared

log = EventLog("serve")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Console:
    def __init__(self, config: ServerConfig, began: float, *, requires_key: bool) -> None:
        """`began`: time.perf_counter(), in seconds, when the command started.
        `requires_key`: users need a key.
        """
        self._config = config
        self._requires_key = requires_key
        self._began = began
        self._is_shown = config.log_level in ("debug", "info")
        self._countdown = ""  # the line shown last
        self._is_progress_open = False  # whether the line of progress may be rewritten

    def loading(self, prepared: Prepared) -> None:
        model = prepared.model
        config = prepared.config
        name = f"{model.name} ({parameters(model)}, {types(kept_as(config, model))})"
        threads = counted(config.threads, "thread")
        where = config.device
        if config.device == "cpu":
            where = f"cpu, {threads}"
        if self._config.dp_size > 1:
            where = f"{self._config.dp_size} engines, each on {where}"
        self._print(f"weft {__version__} · {name} · {where}")
        if prepared.draft is not None:
            draft = prepared.draft.model
            self._phase("draft model", f"{draft.name} ({parameters(draft)})")
        self._phase("kv cache", str(prepared.sizing))
        if prepared.sizing.note:
            self._phase("", f"{prepared.sizing.note} (--kv-tokens, --memory-fraction)")

    def several(self, names: str, budget_bytes: int) -> None:
        """The first line of a server with several models."""
        self._print(f"weft {__version__} · {names or 'no models yet'}")
        self._phase("memory", f"{size(budget_bytes)} for all models together")

    def progress(self, resident: int, wanted: int) -> None:
        """Show how far the engines are: they have `resident` bytes of memory, and their weights
        take `wanted`. On a terminal the line is rewritten in place."""
        elapsed = time.perf_counter() - self._began
        text = (
            f"{elapsed:.0f} s so far: {size(resident)} in memory, the weights take {size(wanted)}"
        )
        is_rewritten = sys.stderr.isatty() and self._config.log_format == "text"
        if not (is_rewritten and self._is_shown):
            self._phase("loading", text)
            return
        _rewrite(f"  {'loading':<11} {text}")
        self._is_progress_open = True

    @property
    def progress_every_s(self) -> float:
        """Time between two calls of `progress`: a terminal shows them in one line."""
        return 0.5 if sys.stderr.isatty() else 10.0

    def ready(self, startup: Sequence[tuple[str, str, float]], port: int) -> None:
        for phase, what, seconds in startup:
            self._phase(phase, f"{what} in {seconds:.1f} s")
        elapsed = time.perf_counter() - self._began
        self._print(f"ready in {elapsed:.1f} s · {self._url(port)}  (API /v1, metrics /metrics)")
        if self._config.host not in LOOPBACK and not self._requires_key:
            self.warn(
                f"everyone who can reach {self._config.host}:{port} can use this server; "
                "--api-key or WEFT_API_KEY protects it"
            )

    def fewer_connections(self, connections: int, asked: int) -> None:
        self.warn(
            f"at most {connections:,} connections, not {asked:,}: the system allows no more open "
            "files (ulimit -n)"
        )

    def draining(self, num_open: int, left_s: float) -> None:
        """Show the countdown: one line, rewritten in place on a terminal, else printed once."""
        requests = f"{num_open} open request{'s' if num_open != 1 else ''}"
        text = f"stopping: {requests}, {math.ceil(left_s)} s left (Ctrl-C again ends them now)"
        if text != self._countdown and sys.stderr.isatty() and self._config.log_format == "text":
            _rewrite(text)
        elif not self._countdown:
            self._print(text)
        self._countdown = text

    def aborting(self, num_open: int) -> None:
        if self._countdown and sys.stderr.isatty():
            sys.stderr.write("\n")
        if num_open:
            self.warn(f"{num_open} request{'s' if num_open != 1 else ''} ended unfinished")

    def stopped(self) -> None:
        self._print("stopped")

    def ended(self, reason: str, status: int) -> None:
        """Say why the server has ended, unless the user asked for it."""
        if reason and self._config.log_format == "json":
            log.error("ended", reason=reason, status=status)
        elif reason:
            print(f"weft: {reason}", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        if self._config.log_format == "json":
            log.warning("console", text=text)
        else:
            _say(f"warning: {text}")

    def _url(self, port: int) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(
            self._config.host, self._config.host
        )
        return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"

    def _phase(self, name: str, text: str) -> None:
        self._print(f"  {name:<11} {text}")

    def _print(self, text: str) -> None:
        if not self._is_shown:
            return
        if self._is_progress_open:
            self._is_progress_open = False
            _rewrite("")
        if self._config.log_format == "json":
            log.info("console", text=" ".join(text.split()))
        else:
            _say(text)


def _rewrite(text: str) -> None:
    """Replace the line of the terminal in which the cursor is, or lose it, as `_say` does."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()


def _say(text: str) -> None:
    """Print a line. A full disk or a closed pipe loses the line, but does not end the server."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
