"""The verb `serve`: settings, port, checks, engine; then `supervisor` answers HTTP.

The order saves time: the engine process imports its modules while the launcher checks the model's
files and imports the front. All checks that can refuse the settings run before anything is loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from weft.config.engine import EngineConfig
from weft.config.keys import read_keys, share_sessions
from weft.config.limits import Limits
from weft.config.lockstep import with_engines
from weft.config.media_options import media_options
from weft.config.options import Command, asked_help
from weft.config.server import ServerConfig
from weft.config.several import GROUP, ModelsConfig, per_model
from weft.launch.context import LaunchContext

if TYPE_CHECKING:
    import socket

    from weft.launch.console import Console
    from weft.launch.engine_group import EngineGroup
    from weft.launch.signals import StartSignals
    from weft.launch.watch import ExitStatus

ABOUT = (
    "Serve a model over HTTP: OpenAI API, native API, metrics. Without MODEL, "
    "SmolLM2-135M-Instruct where it is installed, else the bundled weft-nano."
)
ENGINE_STOP_S = 2.0
SECRETS = ("WEFT_API_KEY", "WEFT_ADMIN_API_KEY", "WEFT_HANDOFF_SECRET", "WEFT_DIST_SECRET")


def serve_command() -> Command:
    return Command(
        "weft serve",
        ABOUT,
        EngineConfig,
        ServerConfig,
        Limits,
        ModelsConfig,
        positional="model",
        takes_several=True,
        tables={GROUP: per_model()},
    )


def serve(argv: Sequence[str]) -> int:
    """Run until stopped. Returns the exit status.
    Raises SettingsError and ModelError before anything is loaded.
    """
    began = time.perf_counter()
    command = serve_command()
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    settings = command.read(argv, os.environ)
    digests, config = read_keys(settings.make(ServerConfig))
    media_options(config)
    for name in SECRETS:  # neither the engine nor any other child process needs them
        os.environ.pop(name, None)
    if settings.words or settings.tables or settings.given(ModelsConfig):
        from weft.launch.several.serve import serve_several

        return serve_several(settings, config, digests, began)

    engine = with_engines(settings.make(EngineConfig), config.dp_size)
    if engine.node_rank:
        from weft.launch.node import follow_node

        return follow_node(engine, config)

    from weft.launch.engine_group import EngineGroup, part_of
    from weft.launch.open_files import fit
    from weft.launch.signals import StartSignals, Stopped, ignore

    try:
        with StartSignals() as signals, ExitStack() as started:
            # A signal that comes here waits until all that was started is known to `started`.
            with signals.deferred():
                group = EngineGroup(config.dp_size, are_joined=engine.enable_dp_attention)
                started.callback(group.stop, ENGINE_STOP_S)
                started.callback(ignore)
            from weft.assemble.prepare import prepare
            from weft.config.machine import probe
            from weft.launch.console import Console
            from weft.launch.listen import listen

            asked = settings.make(Limits)
            limits = fit(asked)
            with listen(config.host, config.port) as listener:
                engine = share_sessions(engine, digests)
                machine = part_of(probe(), config.dp_size, engine)
                prepared = prepare(engine, machine)
                console = Console(config, began, requires_key=bool(digests.user))
                if limits is not asked:
                    console.fewer_connections(limits.max_connections, asked.max_connections)
                context = LaunchContext(
                    prepared=prepared,
                    config=config,
                    limits=limits,
                    digests=digests,
                )
                end = _run(context, listener, console, group, signals)
    except Stopped:
        return 0
    console.ended(end.reason, end.status)
    return end.status


def _run(
    context: LaunchContext,
    listener: socket.socket,
    console: Console,
    group: EngineGroup,
    signals: StartSignals,
) -> ExitStatus:
    """Let the engines begin, answer HTTP until the end, then stop the engines."""
    from weft.launch.engine_process import SocketFolder
    from weft.launch.signals import ignore
    from weft.observe import log
    from weft.observe.trace import make_tracer

    config = context.config
    log.setup(config.log_level, format=config.log_format)
    tracer = make_tracer(config.otlp_endpoint, context.model_name)
    console.loading(context.prepared)
    with ExitStack() as started:
        started.callback(tracer.close)
        # A signal that comes here waits until all that was started is known to `started`.
        with signals.deferred():
            sockets = started.enter_context(SocketFolder())
            group.begin(context, sockets)
            started.callback(group.stop, ENGINE_STOP_S)
            started.callback(ignore)
        from weft.launch.supervisor import run

        return run(context, listener, console, group, tracer)
