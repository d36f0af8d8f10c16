"""The engines of a front: one engine process, or several behind the same interface.

The front sends and receives messages, and waits for the end: no engine is left that could answer.
`replicas.py` implements several engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import (
    Any,
    Protocol,
)

import zmq

from weft.client.client import EngineClient
from weft.config.server import ServerConfig
from weft.launch.engine_process import EngineProcess
from weft.launch.watch import (
    EngineWatch,
    ExitStatus,
    HangWatch,
)
from weft.messages.channel import (
    AsyncReceiver,
    Sender,
)
from weft.messages.codec import (
    ToEngine,
    read_from_engine,
)
from weft.observe.log import EventLog

log = EventLog("serve")


class Engines(Protocol):
    """The engines of one front. All methods are called from one event loop."""

    def send(self, message: ToEngine) -> None:
        """Send a message without waiting."""
        ...

    async def run(self, client: EngineClient) -> ExitStatus:
        """Deliver the engines' messages to `client` until no engine is left that could answer. When
        an engine is lost, its open requests end with an error."""
        ...

    def close(self) -> None:
        """Close the sockets. The caller that started the processes must stop them."""
        ...


class EngineLink:
    """The front's ends of the sockets of one engine process, and the watch of that process."""

    def __init__(self, process: EngineProcess) -> None:
        args = process.args
        self.process = process
        # One for all engines: each has two threads, and with more threads than the C library has
        # heaps (eight for a core) the tokenizer's wait for the event loop's.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._receiver = AsyncReceiver(context, args.from_engine, read_from_engine, bind=True)
        self._sender = Sender(context, args.to_engine, bind=True)
        self.send = self._sender.send  # no wrapper: every request passes here
        self.watch = EngineWatch(process, self._receiver)

        self._is_closed = False

    async def until_end(
        self, receiving: Coroutine[Any, Any, None], hanging: Coroutine[Any, Any, ExitStatus]
    ) -> ExitStatus:
        """Receive messages until the engine has ended, or until `hanging` gives it up."""
        received = asyncio.create_task(receiving)
        lost = asyncio.create_task(self.watch.end())
        hung = asyncio.create_task(hanging)
        tasks: set[asyncio.Task[Any]] = {received, lost, hung}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if received.done():
                received.result()  # it ends only by an exception
            return lost.result() if lost.done() else hung.result()
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._receiver.close()
            self._sender.close()


class OneEngine:
    """The engine of a server without replicas."""

    def __init__(self, process: EngineProcess, config: ServerConfig) -> None:
        self._config = config
        self._link = EngineLink(process)
        self.send = self._link.send

    async def run(self, client: EngineClient) -> ExitStatus:
        client.metrics.processes.add("engine", self._link.process.pid)
        receiving = client.run(self._link.watch.receive)
        return await self._link.until_end(receiving, self._watch_for_hang(client))

    def close(self) -> None:
        self._link.close()

    async def _watch_for_hang(self, client: EngineClient) -> ExitStatus:
        """When the engine hangs, the front refuses new requests and ends the open ones with an
        error. `on_hang` decides whether a long hang ends the server."""

        def hangs(reason: str) -> None:
            log.error(
                "engine_hangs",
                reason=reason,
                open=client.num_open,
            )
            client.metrics.responds(False)
            client.deliveries.end_all(reason)

        def recovers() -> None:
            client.metrics.responds(True)

        await client.state.wait_ready()
        watch = HangWatch(
            self._link.watch,
            client.state.hang_detector,
            on_hang=hangs,
            on_recovery=recovers,
        )
        end = await watch.run(self._config)
        return end._replace(reason=f"{end.reason}; the server ends (--on-hang)")
