"""A front with its engines inside another program, which runs its own HTTP server.

    async with embedded(EngineConfig(model="..."), ServerConfig()) as front:
        await front.wait_ready()
        ...                           # front.app is an ASGI application
        await front.drain(10.0)

That program handles signals, ports and printed output.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from weft.assemble.prepare import prepare
from weft.config.engine import EngineConfig
from weft.config.keys import read_keys
from weft.config.limits import Limits
from weft.config.lockstep import with_engines
from weft.config.machine import probe
from weft.config.media_options import media_options
from weft.config.server import ServerConfig
from weft.launch.context import LaunchContext
from weft.launch.engine_group import EngineGroup, part_of
from weft.launch.engine_process import SocketFolder
from weft.launch.front import Front

STOP_S = 2.0  # time for an engine to end by itself


@contextlib.asynccontextmanager
async def embedded(
    engine: EngineConfig,
    server: ServerConfig,
    limits: Limits | None = None,
) -> AsyncIterator[Front]:
    """Start the engines and their front; stop them on exit. Does not wait until the engines are
    ready. Raises SettingsError and ModelError before anything is loaded."""
    digests, server = read_keys(server)
    media_options(server)
    engine = with_engines(engine, server.dp_size)
    with contextlib.ExitStack() as started:
        group = EngineGroup(server.dp_size, are_joined=engine.enable_dp_attention)
        started.callback(group.stop, STOP_S)
        machine = part_of(probe(), server.dp_size, engine)
        prepared = await asyncio.to_thread(prepare, engine, machine)
        context = LaunchContext(
            prepared=prepared,
            config=server,
            limits=limits or Limits(),
            digests=digests,
        )
        sockets = started.enter_context(SocketFolder())
        group.begin(context, sockets)
        started.callback(group.stop, STOP_S)  # before their sockets are removed
        async with Front(context, group) as front:
            yield front
