"""The verb `serve`: settings, port, checks, engine; then `local` answers HTTP.

The order saves time: what can be refused is refused before anything loads, and the front's own modules are imported
while the engine process is already at work.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.config.engine import EngineConfig
from weft.config.options import Command, asked_help
from weft.config.server import ServerConfig

if TYPE_CHECKING:
    from weft.launch.local import End
    from weft.launch.prepare import Prepared

ABOUT = "Serve a model over HTTP: OpenAI API, native API, metrics. Without MODEL, the bundled weft-nano."
ENGINE_STOP_S = 2.0


def serve(argv: Sequence[str]) -> int:
    """Run until stopped. Returns the exit status. Raises SettingsError and ModelError before anything is loaded."""
    began = time.perf_counter()
    command = Command("weft serve", ABOUT, EngineConfig, ServerConfig, positional="model")
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    settings = command.read(argv, os.environ)
    config = settings.make(ServerConfig)

    from weft.launch.listen import listen
    from weft.launch.prepare import prepare

    with listen(config.host, config.port) as listener:
        end = _run(prepare(settings.make(EngineConfig)), config, listener, began)
    if end.reason:
        print(f"weft: {end.reason}", file=sys.stderr, flush=True)
    return end.status


def _run(prepared: Prepared, config: ServerConfig, listener: socket.socket, began: float) -> End:
    """Start the engine, answer HTTP until the end, stop the engine."""
    from weft.config.process import EngineArgs
    from weft.launch.console import Console
    from weft.launch.engine_process import EngineProcess, SocketFolder
    from weft.observe import log

    log.setup(config.log_level)
    console = Console(config, began)
    console.loading(prepared)
    with SocketFolder() as sockets:
        args = EngineArgs(
            config=prepared.config,
            folder=str(prepared.folder),
            to_engine=sockets.address("to_engine"),
            from_engine=sockets.address("from_engine"),
            log_level=config.log_level,
        )
        process = EngineProcess(args)
        try:
            from weft.launch.local import run

            return run(prepared, config, listener, console, process, args)
        finally:
            process.stop(ENGINE_STOP_S)
