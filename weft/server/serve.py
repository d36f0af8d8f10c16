"""uvicorn without its command line: serves the application on a socket, in the caller's event loop.

The launcher handles signals, ports and processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.server.http.protocol import ConnectionLimiter, GuardedProtocol

T = TypeVar("T")
BACKLOG = 2_048
# Seconds for which another thread keeps the interpreter while the loop waits for it; Python's
# default is 5 ms.
SWITCH_S = 0.0005


class HttpServer(uvicorn.Server):
    """A uvicorn server that does not handle signals.

    Start it with `await serve(sockets=[...])`; stop it with `should_exit = True`.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(
    app: ASGIApp,
    config: ServerConfig,
    limits: Limits | None = None,
    refused: Callable[[str], None] = lambda limit: None,
) -> HttpServer:
    """The server of `app`.

    After `should_exit` is set, it ends with the last request, at most `drain_s` later.

    `refused` is called with the name of each limit that ends a connection.
    """
    limits = limits or Limits()
    limiter = ConnectionLimiter(limits, refused)
    protocol: Any = partial(GuardedProtocol, limiter=limiter)
    keep_alive_s: Any = limits.keep_alive_s  # parts of seconds, too, whatever uvicorn's type says
    return HttpServer(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=max(int(config.drain_s), 1),
        )
    )


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on uvloop if it is installed.

    Other threads release the interpreter early (`SWITCH_S`).
    """
    sys.setswitchinterval(SWITCH_S)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
