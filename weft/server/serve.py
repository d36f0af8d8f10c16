"""uvicorn without its command line: the application on a socket, in the event loop of whoever calls.

Signals, ports and processes are the launcher's business.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from weft.config.server import ServerConfig
from weft.server.limits import KEEP_ALIVE_S
from weft.server.protocol import GuardedProtocol

T = TypeVar("T")
BACKLOG = 2_048


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals alone. `await serve(sockets=[...])`; stop it by `should_exit = True`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, config: ServerConfig) -> HttpServer:
    """The server of `app`. After `should_exit` was set it ends with the last request, at most `drain_s` later."""
    return HttpServer(
        uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=max(int(config.drain_s), 1),
        )
    )


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
