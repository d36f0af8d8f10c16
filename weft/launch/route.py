"""The verb `route`: a front before several servers, until a signal stops it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from weft.config.numbers import counted
from weft.config.options import Command, asked_help
from weft.config.relay import RelayConfig, RelayServers, relay_servers
from weft.config.server import ServerConfig
from weft.launch.listen import listen

ABOUT = (
    "A front before several servers: each request goes to a prefill and a decode server, or to one "
    "of several workers."
)
TICK_S = 0.1


def route(argv: Sequence[str]) -> int:
    """Run until stopped. Returns the exit status. Raises SettingsError."""
    began = time.perf_counter()
    command = Command("weft route", ABOUT, RelayConfig)
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    config = command.read(argv, os.environ).make(RelayConfig)
    servers = relay_servers(config)

    from weft.observe import log
    from weft.server.serve import run

    with listen(config.host, config.port) as listener:
        log.setup(config.log_level, format=config.log_format)
        return run(_run(config, servers, listener, began))


async def _run(
    config: RelayConfig, servers: RelayServers, listener: socket.socket, began: float
) -> int:
    from weft.launch.signals import LoopSignals
    from weft.relay.app import Relay
    from weft.server.serve import make_server

    signals = LoopSignals()
    relay = Relay(config, servers)
    settings = ServerConfig(drain_s=config.drain_s)
    http = make_server(relay.app, settings, relay.limits, relay.metrics.refused)
    watching = asyncio.create_task(relay.watch(config.probe_s))
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    _tell_ready(config, servers, listener.getsockname()[1], time.perf_counter() - began)
    stop = asyncio.create_task(signals.stop.wait())
    abort = asyncio.create_task(signals.abort.wait())
    try:
        await asyncio.wait({stop, serving, watching}, return_when=asyncio.FIRST_COMPLETED)
        relay.is_draining = True
        http.should_exit = True
        await asyncio.wait({serving, abort}, return_when=asyncio.FIRST_COMPLETED)
        http.force_exit = True
        await asyncio.wait({serving}, timeout=config.drain_s)
        if watching.done():
            watching.result()  # it never ends by itself
        return 0
    finally:
        for task in (stop, abort, watching, serving):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        relay.close()


def _tell_ready(config: RelayConfig, servers: RelayServers, port: int, seconds: float) -> None:
    if config.log_level not in ("debug", "info") or config.log_format == "json":
        return
    parts = [
        counted(len(group), role.removesuffix("s"), role)
        for role, group in servers._asdict().items()
        if group
    ]
    host = f"[{config.host}]" if ":" in config.host else config.host
    line = f"weft route · {', '.join(parts)} · ready in {seconds:.1f} s · http://{host}:{port}"
    print(line, file=sys.stderr, flush=True)
