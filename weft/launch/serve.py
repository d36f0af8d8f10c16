"""The verb `serve`: settings from all sources, the port, the checks; then `local` takes over."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from weft.config.engine import EngineConfig
from weft.config.options import Command, asked_help
from weft.config.server import ServerConfig

ABOUT = "Serve a model over HTTP: OpenAI API, native API, metrics. Without MODEL, the bundled weft-nano."


def serve(argv: Sequence[str]) -> int:
    """Run until stopped. Returns the exit status. Raises SettingsError and ModelError before anything is loaded."""
    began = time.perf_counter()
    command = Command("weft serve", ABOUT, EngineConfig, ServerConfig, positional="model")
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    settings = command.read(argv, os.environ)
    server = settings.make(ServerConfig)

    from weft.launch.listen import listen
    from weft.launch.prepare import prepare

    with listen(server.host, server.port) as listener:
        prepared = prepare(settings.make(EngineConfig))

        from weft.launch.local import run

        end = run(prepared, server, listener, began)
    if end.reason:
        print(f"weft: {end.reason}", file=sys.stderr, flush=True)
    return end.status
