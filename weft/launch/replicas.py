"""Several engine processes behind one front, each with the whole model.

    front ─▶ Fleet ─┬─▶ engine 0     an engine that ends or hangs is replaced;
                    ├─▶ engine 1     the others continue
                    └─▶ ...

At the start, all engines must become ready. Later, the server ends only when no engine is left and
none will be started again; or, if the engines step together (`are_joined`), when one is lost.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from weft.client.client import EngineClient
from weft.client.engine_state import (
    TICK_S,
    HangDetector,
)
from weft.client.fleet.fleet import Fleet
from weft.client.fleet.member import Member
from weft.launch.context import LaunchContext
from weft.launch.engine_group import EngineGroup
from weft.launch.engines import EngineLink
from weft.launch.watch import (
    ExitStatus,
    HangWatch,
)
from weft.messages.codec import ToEngine
from weft.observe.log import EventLog
from weft.observe.metrics import Metrics
from weft.route.policy import EngineRouter
from weft.server.plugins import outside_controls

STOP_S = 2.0  # time for an abandoned engine to end by itself
FIRST_PAUSE_S = 1.0  # pause before a restart; doubled at each further restart within the hour
LONGEST_PAUSE_S = 60.0
WINDOW_S = 3600.0  # period in which restarts are counted

log = EventLog("serve")


class Replicas:
    """`Engines` with several engine processes. All methods are called from one event loop."""

    def __init__(self, group: EngineGroup, context: LaunchContext, metrics: Metrics) -> None:
        config = context.config
        num_engines = len(group.processes)
        self._group = group
        self._config = config
        self._metrics = metrics.split(num_engines)
        self._processes = metrics.processes
        self._members: list[Member] = []
        for rank, numbers in enumerate(self._metrics.engines):
            detector = HangDetector(config.step_timeout_s, config.hang_after_s)
            self._members.append(Member(rank, numbers, detector))
        if group.are_joined:
            detectors = [member.detector for member in self._members]
            for one in detectors:
                one.accompany(detectors)
        router = EngineRouter(
            config.load_balance_method, num_engines, context.prepared.config.kv_tokens
        )
        self._fleet = Fleet(self._members, router, on_availability=self._availability)
        self._fleet.changes.start_ramp_s = config.start_ramp_s
        own = outside_controls(context.prepared.config.plugins)
        self._fleet.changes.kept_outside = frozenset(name for name, one in own if one.is_kept)
        self._client: EngineClient | None = None
        self._links = [EngineLink(process) for process in group.processes]
        self._starts: list[list[float]] = [[] for _ in range(num_engines)]
        for rank, link in enumerate(self._links):
            self._fleet.attach(rank, link.send)

    def send(self, message: ToEngine) -> None:
        self._fleet.send(message)

    async def run(self, client: EngineClient) -> ExitStatus:
        self._client = client
        client.engines = self._members
        tasks: set[asyncio.Task[Any]] = {asyncio.create_task(client.run(self._fleet.receive))}
        engines = [asyncio.create_task(self._keep(rank)) for rank in range(len(self._members))]
        tasks |= set(engines)
        try:
            while True:
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    end: ExitStatus = task.result()
                    if self._group.are_joined and task in engines:
                        return end
                    if not client.state.is_alive or all(engine.done() for engine in engines):
                        return end
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        for link in self._links:
            link.close()

    async def _keep(self, rank: int) -> ExitStatus:
        """Follow an engine and its replacements until it is not replaced any more. Returns the last
        end."""
        while True:
            end = await self._follow(rank)
            client = self._client
            assert client is not None
            is_start = not client.state.is_alive
            if not is_start:
                log.error(
                    "engine_lost",
                    rank=rank,
                    reason=end.reason,
                )
            self._fleet.lose(rank, end.reason)
            if is_start:
                return end
            if self._group.are_joined:
                # The other engines wait for results of this one.
                return end._replace(reason=f"engine {rank} is lost: {end.reason}")
            self._links[rank].close()
            await asyncio.to_thread(self._group.processes[rank].stop, STOP_S)
            if not self._may_start_again(rank):
                return end
            pause_s = FIRST_PAUSE_S * 2 ** (len(self._starts[rank]) - 1)
            await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
            log.info("engine_starts_again", rank=rank)
            self._metrics.restarts.labels(str(rank)).inc()
            self._links[rank] = EngineLink(self._group.start_again(rank))
            self._members[rank].detector = HangDetector(
                self._config.step_timeout_s, self._config.hang_after_s
            )
            self._fleet.attach(rank, self._links[rank].send)

    async def _follow(self, rank: int) -> ExitStatus:
        """Receive an engine's messages until it has ended or is abandoned as hung."""
        link = self._links[rank]
        self._processes.add(f"engine.dp{rank}", link.process.pid)
        return await link.until_end(self._receive(rank, link), self._watch_for_hang(rank, link))

    async def _receive(self, rank: int, link: EngineLink) -> None:
        while True:
            self._fleet.take(rank, await link.watch.receive())
            await asyncio.sleep(0)  # a flood of messages must not keep consumers from running

    async def _watch_for_hang(self, rank: int, link: EngineLink) -> ExitStatus:
        member = self._members[rank]

        def hangs(reason: str) -> None:
            log.error(
                "engine_hangs",
                rank=rank,
                reason=reason,
            )
            for other in self._bound_to(rank):
                self._fleet.hangs(other, reason)

        def recovers() -> None:
            bound = self._bound_to(rank)
            if not any(self._members[other].detector.hang for other in bound):
                for other in bound:
                    self._fleet.recovers(other)

        while member.ready is None:
            await asyncio.sleep(TICK_S)
        watch = HangWatch(
            link.watch,
            member.detector,
            on_hang=hangs,
            on_recovery=recovers,
        )
        return await watch.run(self._config)

    def _bound_to(self, rank: int) -> list[int]:
        """The engines that cannot step while engine `rank` hangs, including itself."""
        if self._group.are_joined:
            return [member.rank for member in self._members]
        return [rank]

    def _may_start_again(self, rank: int) -> bool:
        """Whether a lost engine is replaced; if so, the restart is counted."""
        if self._fleet.changes.are_lost:
            log.error(
                "engine_not_replaced",
                rank=rank,
                reason="its weights came from a client",
            )
            return False
        now = time.monotonic()
        recent = [at for at in self._starts[rank] if now - at < WINDOW_S]
        self._starts[rank] = recent
        if len(recent) >= self._config.engine_restarts:
            log.error(
                "engine_not_replaced",
                rank=rank,
                starts=len(recent),
            )
            return False
        recent.append(now)
        return True

    def _availability(self, why_not: str) -> None:
        for member in self._members:
            self._metrics.up.labels(str(member.rank)).set(member.is_up)
        if self._client is not None:
            self._client.state.hang_detector.declare(why_not)
            self._client.metrics.responds(not why_not)
