"""The models of a server: does what `Residency` decides, and tells it what has become of it.

    use ─▶ Residency.request ─▶ may begin
                             ─▶ waits ◀── admit ◀── loaded
    every fact ─▶ settle: admit, step, one task for each action, a timer for the next time

It belongs to one event loop. Loads, unloads and saves are tasks or threads, so that the streams of
other models go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from weft.batches.tries import NOT_LOADED
from weft.client.calls import EngineFault
from weft.client.engine_state import EngineUnavailable
from weft.config.amounts import size
from weft.launch.engine_group import EngineGroup
from weft.launch.several.alarm import Alarm
from weft.launch.several.failures import LoadFailures
from weft.launch.several.hosted import HostedModel, LoadFailed
from weft.launch.several.spare import SpareProcess
from weft.launch.several.specs import ModelSpec
from weft.launch.several.waiting import LoadLine, Waiter
from weft.observe.log import EventLog
from weft.observe.several import HouseMetrics
from weft.residency.residency import Residency
from weft.residency.resident import Level, Resident
from weft.residency.residents import Residents
from weft.residency.rules import Action, Grow, Load, Refuse, Rules, Shrink, Unload
from weft.server.app import ModelApp
from weft.server.errors import ApiError
from weft.server.several.names import NamesOfModels

log = EventLog("models")


class House:
    """The hosted models, and which of them are in memory."""

    def __init__(
        self,
        rules: Rules,
        metrics: HouseMetrics,
        new_host: Callable[[ModelSpec], HostedModel],
        new_spare: Callable[[], EngineGroup | None],
    ) -> None:
        """`new_spare` starts a process for the next load; None: nothing is started ahead."""
        self.hosts: dict[str, HostedModel] = {}
        self.names = NamesOfModels()
        self.facts = Residents(rules)
        self.core = Residency(self.facts)
        self.line = LoadLine()
        self.metrics = metrics
        self.failures = LoadFailures(lambda name: metrics.failures.labels(name).inc())
        self._new_host = new_host
        self._spare = SpareProcess(new_spare)
        self._tasks: set[asyncio.Task[None]] = set()
        self._alarm = Alarm(self.settle)
        # Nobody waited when `settle` ran last: until then, ends of requests change nothing else.
        self._is_calm = True
        self.is_closing = False
        metrics.budget.set(rules.budget_bytes)

    def add(self, spec: ModelSpec) -> None:
        """Offer a model. Raises ValueError if a name belongs to another one."""
        self.names.add(spec.name, spec.aliases)
        self.hosts[spec.name] = self._new_host(spec)

    def remove(self, name: str) -> None:
        """Offer a model no longer. It is not in memory, and nobody waits for it."""
        if self.names.own(name):
            self.names.remove(name)
        del self.hosts[name]
        if name in self.facts.models:
            self.facts.remove(name)

    async def withdraw(self, name: str) -> None:
        """Offer a model no longer: requests that wait for it end, those that are open go on to
        their end, and then it is unloaded."""
        self.names.remove(name)
        message = f"the model {name!r} is being removed"
        if name in self.facts.models:
            self.facts.refused(name)
        self.line.fail(name, ApiError(404, message, param="model", code="model_not_found"))
        await self.unload(name)
        self.remove(name)

    def level(self, name: str) -> Level:
        model = self.facts.models.get(name)
        return Level.ABSENT if model is None else model.level

    def served(self, name: str) -> ModelApp | None:
        """A model that answers; None if it is not loaded."""
        front = self.hosts[name].front
        if front is None or self.level(name) is not Level.READY:
            return None
        return front.served

    # ---- requests

    async def begin(self, name: str, rid: str, most_waiting: int, longest_s: float) -> ModelApp:
        """Wait until a request may begin. Raises `ApiError`."""
        if not self.names.own(name):  # it was removed since the request came
            raise self.names.unknown(name)
        if name not in self.facts.models or not self.facts.is_open(name):
            self._require_no_failure(name)
            self.line.require_room(most_waiting)
            with self.line.early(name, rid, time.monotonic()):
                await self.know(name)
        now_s = time.monotonic()
        if not self.facts.request(name, now_s):
            await self._wait(self.line.add(name, rid, now_s), longest_s)
        served = self.served(name)
        if served is None:  # its engine has ended since
            self.end(name)
            message = f"the engine of the model {name!r} has ended; send the request again"
            raise ApiError(503, message, headers={"retry-after": "1"})
        return served

    async def _wait(self, waiter: Waiter, longest_s: float) -> None:
        name = waiter.model
        self.settle()
        try:
            async with asyncio.timeout(longest_s):
                await waiter.may_begin
        except TimeoutError as exc:
            self._give_up(waiter)
            message = f"the model {name!r} was not loaded within {longest_s:g} s (--load-wait-s)"
            raise ApiError(503, message, headers={"retry-after": "5"}) from exc
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def _give_up(self, waiter: Waiter) -> None:
        """A waiting request ends; or it has just been let begin."""
        if not waiter.may_begin.done() or waiter.may_begin.cancelled():
            self.line.remove(waiter)
            self.facts.give_up(waiter.model, waiter.came_s)
            self.settle()
        elif waiter.may_begin.exception() is None:
            self.end(waiter.model)

    def end(self, name: str) -> None:
        """A request that had begun has ended."""
        leaves_s = self.facts.end(name, time.monotonic())
        if not self._is_calm:
            self.settle()
        elif leaves_s is not None:
            self._alarm.set_before(leaves_s)

    async def know(self, name: str) -> None:
        """Let `Residency` know the model: its files are checked, and its size is known. Raises
        `ApiError`."""
        if name in self.facts.models:
            return
        host = self.hosts[name]
        try:
            await host.prepare()
        except LoadFailed as exc:
            raise self.failures.note(name, exc) from exc
        if name not in self.facts.models:
            fixed, kv = host.size
            spec = host.spec
            model = Resident(name, fixed, kv, spec.pin, spec.ttl_s, host.can_shrink)
            self.facts.add(model)

    # ---- what somebody asks for

    async def load(self, name: str) -> None:
        """Load a model, and wait for it. Raises `ApiError`."""
        self.failures.forget(name)
        await self.know(name)
        if self.level(name) is Level.READY and not self.facts.models[name].must_leave:
            return
        self.facts.ask_load(name, time.monotonic())
        self.settle()
        if self.level(name) is not Level.READY:
            await self.line.answered(name)

    async def unload(self, name: str) -> None:
        """Unload a model after its open requests, and wait for it."""
        if self.level(name) is Level.ABSENT:
            return
        self.facts.ask_unload(name)
        self.settle()
        while self.level(name) is not Level.ABSENT and self.facts.models[name].must_leave:
            await self.line.answered(name)

    # ---- decisions

    def settle(self) -> None:
        """Let requests begin whose model is ready, and begin what is to be done now."""
        if self.is_closing:
            return
        now_s = time.monotonic()
        self._admit(now_s)
        for action in self.core.step(now_s):
            self._do(action)
        self._admit(now_s)  # a model need not make room any more
        for name, model in self.facts.models.items():
            self.metrics.bytes.labels(name).set(model.num_bytes)
            self.metrics.waiting.labels(name).set(self.line.num_for(name))
        self._is_calm = self.facts.are_calm
        self._alarm.set(self.core.next_s(now_s))

    def _admit(self, now_s: float) -> None:
        for name in self.facts.models:
            for waiter in self.line.begin(name, self.facts.admit(name, now_s)):
                self.metrics.wait_s.of("").observe_one(now_s - waiter.came_s, waiter.rid)

    def _do(self, action: Action) -> None:
        name = action.name
        match action:
            case Load():
                self._start(self._load(name))
            case Unload():
                self.metrics.unloads.labels(name, action.why).inc()
                log.info("unload", model=name, why=action.why)
                self._start(self._unload(name))
            case Shrink():
                self._start(self._change(name, self.hosts[name].shrink, self.facts.shrunk))
            case Grow():
                self._start(self._change(name, self.hosts[name].grow, self.facts.grown))
            case Refuse():
                message = f"the model {name!r} cannot be loaded: {action.reason}"
                self.line.fail(name, ApiError(503, message, code=NOT_LOADED))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # Not in the context of the request that happens to be the first one for its model.
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- actions

    async def _load(self, name: str) -> None:
        host = self.hosts[name]
        began_s = time.monotonic()
        group = None
        if host.spec.server.dp_size == 1:
            group = self._spare.take()
        try:
            await host.load(group)
        except Exception as exc:  # whatever it is: nobody waits for this load any longer
            reason = exc
            if not isinstance(reason, LoadFailed):
                reason = LoadFailed(f"a fault of weft: {exc!r}", is_users=False)
            self.facts.unloaded(name)
            if not self.failures.may_try_again(name, reason):
                self.facts.refused(name)
                self.line.fail(name, self.failures.note(name, reason))
            self.settle()
            if reason is exc:
                return
            raise
        took_s = time.monotonic() - began_s
        log.info("loaded", model=name, seconds=round(took_s, 2), memory=size(sum(host.size)))
        self.failures.forget(name)
        self.metrics.loads.labels(name).inc()
        self.metrics.load_s.of("").observe_one(took_s)
        self.facts.loaded(name, time.monotonic())
        self._start(self._follow(host))
        self.line.answer(name)
        self.settle()
        self._make_spare()

    async def _follow(self, host: HostedModel) -> None:
        """Wait for the end of a loaded model. If it was not unloaded, its engine is lost: its open
        requests have got an error, and those that wait load it again."""
        name = host.spec.name
        front = host.front
        end = await host.lost()
        if host.front is not front or self.level(name) is Level.UNLOADING or self.is_closing:
            return
        log.error("engine_lost", model=name, reason=end.reason)
        self.metrics.failures.labels(name).inc()
        self.facts.lost(name)
        await host.close()
        self.facts.unloaded(name)
        self.line.answer(name)
        self.settle()

    async def _unload(self, name: str) -> None:
        try:
            await self.hosts[name].unload()
        finally:
            self.facts.unloaded(name)
        self.line.answer(name)
        self.settle()
        self._make_spare()

    async def _change(
        self,
        name: str,
        change: Callable[[], Coroutine[Any, Any, None]],
        done: Callable[[str, float], None],
    ) -> None:
        """Take the memory of KV from a model, or give it back."""
        try:
            await change()
        except (LoadFailed, EngineUnavailable, EngineFault) as exc:
            log.warning("kv_not_changed", model=name, reason=exc)
            done = self.facts.not_changed
        if self.level(name) in (Level.SHRINKING, Level.GROWING):  # else its engine is lost
            done(name, time.monotonic())
        self.line.answer(name)
        self.settle()

    # ---- failures

    def _require_no_failure(self, name: str) -> None:
        """Raise `ApiError` if a load has just failed. After an older one, the files of the model
        are read again: they may have changed."""
        if not self.failures.require_none(name):
            return
        model = self.facts.models.get(name)
        if model is None or (model.level is Level.ABSENT and model.is_idle):
            self.hosts[name].forget()
            self.facts.models.pop(name, None)

    def _make_spare(self) -> None:
        """Start a process that imports its modules before a model needs it."""
        for name, host in self.hosts.items():
            if self.level(name) is Level.ABSENT and host.spec.server.dp_size == 1:
                if not self.is_closing:
                    self._spare.make()
                return

    # ---- the end

    def refuse_waiting(self, error: ApiError) -> None:
        for name in self.hosts:
            if name in self.facts.models:
                self.facts.refused(name)
            self.line.fail(name, error)

    def close(self) -> None:
        """End all processes. Open requests have been answered."""
        self.is_closing = True
        self._alarm.set(None)
        for task in self._tasks:
            task.cancel()
        for host in self.hosts.values():
            host.stop()
        self._spare.stop()
