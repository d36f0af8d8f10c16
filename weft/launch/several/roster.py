"""The models of a server as its application sees them: names, states, and a model for a request."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from weft.launch.several.house import House
from weft.launch.several.specs import ModelSpec
from weft.observe.several import joined_page
from weft.residency.resident import Level
from weft.residency.rules import Delay
from weft.server.app import ModelApp
from weft.server.context import Readiness
from weft.server.errors import ApiError
from weft.server.limits import refusal_of, require_accepting
from weft.server.several.roster import ModelStatus, WaitingRequest

IN_MEMORY = (Level.READY, Level.SMALL, Level.SHRINKING, Level.GROWING)


class HouseRoster:
    """`Roster` over a house."""

    def __init__(
        self,
        house: House,
        readiness: Readiness,
        blank: ModelApp,
        *,
        most_waiting: int,
        longest_wait_s: float,
        takes_any_name: bool,
        look: Callable[[], Sequence[ModelSpec]],
    ) -> None:
        """`look` reads the folder of models again; it returns nothing new if nothing changed."""
        self.readiness = readiness
        self.blank = blank
        self._house = house
        self._most_waiting = most_waiting
        self._longest_wait_s = longest_wait_s
        self._takes_any_name = takes_any_name
        self._look = look
        self._since_s = time.time()
        self._removed: set[str] = set()  # models whose files are being removed
        readiness.at_drain(self._refuse_waiting)

    # ---- names

    def find(self, asked: str) -> str:
        names = self._house.names
        found = names.find(asked, self._adapters)
        if found is None and self._look_again():
            found = names.find(asked, self._adapters)
        if found is None:
            found = self._offering(asked)
        if found is None and self._takes_any_name:
            found = names.find("", self._adapters)
        if found is None:
            raise names.unknown(asked)
        return found

    def _adapters(self) -> Mapping[str, str]:
        """The adapters that models have when they are loaded, and the model of each."""
        found: dict[str, str] = {}
        for name, host in self._house.hosts.items():
            found |= dict.fromkeys(host.adapter_names, name)
        return found

    def _offering(self, adapter: str) -> str | None:
        """The model whose folder of adapters has one with this name."""
        hosts = self._house.hosts.items()
        return next((name for name, host in hosts if host.offers_adapter(adapter)), None)

    def _look_again(self) -> bool:
        """Offer what has come into the folder of models, and no longer what has gone from it.
        Returns whether there is anything new."""
        house = self._house
        in_folder = {spec.name: spec for spec in self._look()}
        for name, host in list(house.hosts.items()):
            is_free = house.level(name) is Level.ABSENT and not house.line.num_for(name)
            is_free = is_free and name not in self._removed
            if host.spec.in_folder and name not in in_folder and is_free:
                house.remove(name)
        new = [
            spec
            for name, spec in in_folder.items()
            if name not in house.hosts and name not in self._removed
        ]
        for spec in new:
            house.add(spec)
        return bool(new)

    # ---- states

    def status(self) -> Sequence[ModelStatus]:
        self._look_again()
        return [self._status(name) for name in self._house.hosts]

    def _status(self, name: str) -> ModelStatus:
        house = self._house
        host = house.hosts[name]
        spec = host.spec
        level = house.level(name)
        model = house.facts.models.get(name)
        reason = house.failures.reason(name)
        state = level.value
        if reason and level is Level.ABSENT:
            state = "failed"
        num_waiting = house.line.num_for(name)
        return ModelStatus(
            name=name,
            aliases=spec.aliases,
            is_default=name == house.names.default,
            state=state,
            reason=reason,
            pin=spec.pin,
            ttl_s=spec.ttl_s if model is None else model.ttl_s,
            since_s=self._since_s,
            left_s=self._left_s(name),
            num_open=0 if model is None else model.num_open,
            num_waiting=num_waiting,
            delay=self.delay(name) if num_waiting else None,
            num_bytes=0 if model is None else model.num_bytes,
            full_bytes=0 if model is None else model.fixed_bytes + model.kv_bytes,
            kv_bytes=0 if model is None else model.kv_bytes,
            context_length=0 if host.prepared is None else host.prepared.config.context_length,
            task=_task(host.prepared and host.prepared.model.pooling),
            facts=host.facts,
        )

    def _left_s(self, name: str) -> float | None:
        model = self._house.facts.models.get(name)
        if model is None or model.level not in IN_MEMORY or not model.ttl_s or model.pin:
            return None
        if model.num_open:
            return model.ttl_s
        return max(model.at.used_s + model.ttl_s - time.monotonic(), 0.0)

    def served(self, name: str) -> ModelApp | None:
        return self._house.served(name)

    def loaded(self) -> Mapping[str, ModelApp]:
        found = {name: self._house.served(name) for name in self._house.hosts}
        return {name: served for name, served in found.items() if served is not None}

    def delay(self, name: str) -> Delay:
        if name not in self._house.facts.models:
            return Delay(0, 0.0)
        return self._house.core.delay(name, time.monotonic())

    def waiting(self) -> Sequence[WaitingRequest]:
        now_s = time.monotonic()
        found: list[WaitingRequest] = []
        for waiter in self._house.line:
            delay = self.delay(waiter.model)
            one = WaitingRequest(
                rid=waiter.rid,
                model=waiter.model,
                waited_s=round(now_s - waiter.came_s, 3),
                position=delay.position,
                eta_s=round(delay.eta_s, 3),
            )
            found.append(one)
        return found

    def abort_waiting(self, names: Collection[str]) -> int:
        house = self._house
        aborted = house.line.abort(names)
        for waiter in aborted:
            if not waiter.is_early:
                house.facts.give_up(waiter.model, waiter.came_s)
        house.settle()
        return len(aborted)

    # ---- requests

    def enter(self, asked: str) -> tuple[str, ModelApp] | None:
        if not self.readiness.accepting:
            raise refusal_of(self.readiness)
        house = self._house
        name = house.names.own(asked or house.names.default)
        if name is None:
            return None
        front = house.hosts[name].front
        if front is None or front.lost.done() or not house.facts.begin(name, time.monotonic()):
            return None
        return name, front.served

    async def use(self, name: str, rid: str) -> ModelApp:
        require_accepting(self.readiness)
        return await self._house.begin(name, rid, self._most_waiting, self._longest_wait_s)

    def done(self, name: str) -> None:
        self._house.end(name)

    async def load(self, name: str) -> None:
        require_accepting(self.readiness)
        await self._house.load(name)

    async def unload(self, name: str) -> None:
        await self._house.unload(name)

    async def remove(self, asked: str, remove_files: Callable[[str], Awaitable[None]]) -> None:
        name = self._house.names.own(asked)
        if name is None:
            await remove_files(asked)
            return
        if not self._house.hosts[name].spec.in_folder:
            message = (
                f"the model {name!r} is named by the settings of this server, so it is not removed"
            )
            raise ApiError(409, message, param="model")
        self._removed.add(name)
        try:
            await self._house.withdraw(name)
            await remove_files(name)
        finally:
            self._removed.discard(name)

    def keep(self, name: str, idle_s: float) -> None:
        facts = self._house.facts
        if name in facts.models and idle_s == 0:
            facts.ask_unload(name)
        elif name in facts.models:
            facts.models[name].ttl_s = max(idle_s, 0.0)
        self._house.settle()

    def page(self, *, is_open: bool) -> bytes:
        models = {
            name: host.parts.metrics.registry
            for name, host in self._house.hosts.items()
            if host.parts is not None
        }
        return joined_page(self._house.metrics.registry, models, is_open=is_open)

    def _refuse_waiting(self) -> None:
        self._house.refuse_waiting(refusal_of(self.readiness))


def _task(pooling: object) -> str:
    found: str = getattr(pooling, "task", "generate")
    return found
