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
from weft.config.keys import KeyDigests, read_keys
from weft.config.limits import Limits
from weft.config.options import Command, asked_help
from weft.config.server import ServerConfig

if TYPE_CHECKING:
    from weft.launch.local import End
    from weft.launch.prepare import Prepared

ABOUT = "Serve a model over HTTP: OpenAI API, native API, metrics. Without MODEL, the bundled weft-nano."
ENGINE_STOP_S = 2.0
SECRETS = ("WEFT_API_KEY", "WEFT_ADMIN_API_KEY")


def serve(argv: Sequence[str]) -> int:
    """Run until stopped. Returns the exit status. Raises SettingsError and ModelError before anything is loaded."""
    began = time.perf_counter()
    command = Command("weft serve", ABOUT, EngineConfig, ServerConfig, Limits, positional="model")
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    settings = command.read(argv, os.environ)
    digests, config = read_keys(settings.make(ServerConfig))
    for name in SECRETS:  # the engine and whatever else is started has no use for them
        os.environ.pop(name, None)

    from weft.launch.listen import listen
    from weft.launch.prepare import prepare
    from weft.observe.log import EventLog

    with listen(config.host, config.port) as listener:
        end = _run(prepare(settings.make(EngineConfig)), config, settings.make(Limits), digests, listener, began)
    if end.reason and config.log_format == "json":
        EventLog("serve").error("ended", reason=end.reason, status=end.status)
    elif end.reason:
        print(f"weft: {end.reason}", file=sys.stderr, flush=True)
    return end.status


def _run(
    prepared: Prepared,
    config: ServerConfig,
    limits: Limits,
    digests: KeyDigests,
    listener: socket.socket,
    began: float,
) -> End:
    """Start the engine, answer HTTP until the end, stop the engine."""
    from weft.config.process import EngineArgs
    from weft.launch.console import Console
    from weft.launch.engine_process import RPC_SOCKET, EngineProcess, SocketFolder
    from weft.observe import log
    from weft.observe.trace import make_tracer

    log.setup(config.log_level, format=config.log_format)
    tracer = make_tracer(config.otlp_endpoint, config.served_model_name or prepared.model.name)
    console = Console(config, began, is_shut=bool(digests.user))
    console.loading(prepared)
    with SocketFolder() as sockets:
        args = EngineArgs(
            config=prepared.config,
            folder=str(prepared.folder),
            to_engine=sockets.address("to_engine"),
            from_engine=sockets.address("from_engine"),
            rpc=sockets.address(RPC_SOCKET),
            log_level=config.log_level,
            log_format=config.log_format,
        )
        process = EngineProcess(args)
        try:
            from weft.launch.local import run
            from weft.launch.open_files import fit

            fitting = fit(limits)
            if fitting is not limits:
                console.warn(
                    f"at most {fitting.max_connections:,} connections, not {limits.max_connections:,}: "
                    "the system allows no more open files (ulimit -n)"
                )
            return run(prepared, config, fitting, digests, tracer, listener, console, process, args)
        finally:
            process.stop(ENGINE_STOP_S)
            tracer.close()
