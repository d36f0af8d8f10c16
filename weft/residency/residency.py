"""Which models to load, to shrink and to unload, from facts alone; the package has the rules.

    request, end, loaded, lost, ...  ─▶  `Residents`  ─▶  step(now_s)  ─▶  actions

Every action takes time. The caller tells `Residents` its end: `loaded`, `shrunk`, `unloaded`, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weft.residency.resident import Level, Resident
from weft.residency.residents import Residents
from weft.residency.rules import Action, Delay, Grow, Load, Refuse, Shrink, Unload

# Levels in which a model is ready soon, without a further decision.
COMING = (Level.LOADING, Level.GROWING)
MIN_LOAD_S = 0.5  # of an estimate: a process starts


@dataclass
class Shortfall:
    """What is missing to load a model, beside what will be free soon."""

    num_bytes: int
    num_models: int

    @property
    def is_met(self) -> bool:
        return self.num_bytes <= 0 and self.num_models <= 0

    def give(self, num_bytes: int, num_models: int = 0) -> None:
        self.num_bytes -= num_bytes
        self.num_models -= num_models


class Residency:
    """Decides from the facts, and writes into them what it begins."""

    def __init__(self, facts: Residents) -> None:
        self.facts = facts

    def step(self, now_s: float) -> list[Action]:
        """What to do now. Each action has begun when this returns."""
        actions: list[Action] = list(self._leaving(now_s))
        for model in self.facts.models.values():
            model.gives_way = False
        for model in self._queue():
            reason = self._never_fits(model)
            if reason:
                actions.append(Refuse(model.name, reason))
                self.facts.refused(model.name)
                continue
            lack = self._lack(model)
            if lack.is_met:
                actions.append(self._begin(model, now_s))
                continue
            actions += self._make_room(model, lack, now_s)
            break  # nobody overtakes it into the memory that it needs
        return actions

    def next_s(self, now_s: float) -> float | None:
        """The next time at which `step` may have something to do without a new fact."""
        times: list[float] = []
        waits = [model.wanted_since_s for model in self._queue()]
        times += [since + self.facts.rules.patience_s for since in waits if since is not None]
        for model in self.facts.models.values():
            if model.level in (Level.READY, Level.SMALL):
                leaves_s = self.facts.leaves_s(model.name)
                if leaves_s is not None:
                    times.append(leaves_s)
                if waits:
                    times.append(model.at.ready_s + self.stay_s(model))
        later = [time_s for time_s in times if time_s > now_s]
        return min(later, default=None)

    def delay(self, name: str, now_s: float) -> Delay:
        """What a request for a model that is not ready can expect."""
        model = self.facts.models[name]
        eta_s = 0.0
        position = 0
        if model.level in COMING:
            return Delay(0, max(self._load_s(model) - (now_s - model.at.began_s), 0.0))
        for other in self.facts.models.values():
            if other.level in COMING:
                eta_s = max(eta_s, self._load_s(other) - (now_s - other.at.began_s))
        for other in self._wanted():
            eta_s += self._load_s(other)
            if other is model:
                break
            position += 1
        return Delay(position, max(eta_s, 0.0))

    def stay_s(self, model: Resident) -> float:
        """How long a model may stay before it must make room while it is in use."""
        return max(self.facts.rules.stay_loads * model.load_s, self.facts.rules.least_stay_s)

    # ---- inside

    def _load_s(self, model: Resident) -> float:
        """The expected time of a load, from the last one or from the rate of all."""
        if model.level in (Level.SMALL, Level.GROWING):
            return 0.0
        return model.load_s or max(model.fixed_bytes / self.facts.rate, MIN_LOAD_S)

    def _queue(self) -> list[Resident]:
        """The models that can be begun and are waited for, in the order of their oldest request."""
        return [one for one in self._wanted() if one.level in (Level.ABSENT, Level.SMALL)]

    def _wanted(self) -> list[Resident]:
        """The models that are waited for, those that still leave included, in that order."""
        found: list[tuple[float, str]] = []
        for model in self.facts.models.values():
            since = model.wanted_since_s
            if since is not None and model.level not in COMING:
                found.append((since, model.name))
        return [self.facts.models[name] for _, name in sorted(found)]

    def _leaving(self, now_s: float) -> Iterator[Unload]:
        """The models that leave whether or not their memory is needed."""
        for model in self.facts.models.values():
            if model.level not in (Level.READY, Level.SMALL) or model.num_open:
                continue
            is_over = model.ttl_s > 0 and now_s >= model.at.used_s + model.ttl_s
            if model.must_leave:
                yield _unload(model, "asked", now_s)
            elif is_over and model.is_idle and not model.pin:
                yield _unload(model, "idle", now_s)

    def _never_fits(self, model: Resident) -> str:
        """Why no order of the others makes room for a model; "" if one does."""
        needed = model.fixed_bytes + model.kv_bytes
        if needed > self.facts.rules.budget_bytes:
            return f"it needs {_gb(needed)}, and --memory is {_gb(self.facts.rules.budget_bytes)}"
        pinned = [
            one
            for one in self.facts.models.values()
            if one is not model and one.pin and one.level is not Level.ABSENT and not one.must_leave
        ]
        num_bytes = sum(one.fixed_bytes + one.kv_bytes for one in pinned)
        if needed + num_bytes > self.facts.rules.budget_bytes or (
            self.facts.rules.max_models and len(pinned) >= self.facts.rules.max_models
        ):
            names = ", ".join(one.name for one in pinned)
            return (
                f"it needs {_gb(needed)}, and the pinned {names} leave "
                f"{_gb(max(self.facts.rules.budget_bytes - num_bytes, 0))} of --memory"
            )
        return ""

    def _lack(self, model: Resident) -> Shortfall:
        """What is missing to load or grow a model."""
        needed = model.kv_bytes
        num_models = 0
        if model.level is Level.ABSENT:
            needed += model.fixed_bytes
            if self.facts.rules.max_models:
                present = [
                    one for one in self.facts.models.values() if one.level is not Level.ABSENT
                ]
                num_models = len(present) + 1 - self.facts.rules.max_models
        return Shortfall(needed + self.facts.num_bytes - self.facts.rules.budget_bytes, num_models)

    def _begin(self, model: Resident, now_s: float) -> Action:
        model.at.began_s = now_s
        if model.level is Level.SMALL:
            model.level = Level.GROWING
            return Grow(model.name)
        model.level = Level.LOADING
        return Load(model.name)

    def _make_room(self, needy: Resident, lack: Shortfall, now_s: float) -> Iterator[Action]:
        """Begin what gives `needy` its room, except what has begun already."""
        for model in self.facts.models.values():
            if model.level is Level.SHRINKING:
                lack.give(model.kv_bytes)
            elif model.level is Level.UNLOADING:
                lack.give(model.num_bytes, 1)
        if lack.is_met:
            return
        idle = [
            model
            for model in sorted(self.facts.models.values(), key=_by_use)
            if self._may_leave(model, needy, now_s)
        ]
        yield from self._from_idle(idle, lack, now_s)
        if lack.is_met or not self._is_patient(needy, now_s):
            return
        for model in sorted(self.facts.models.values(), key=_by_stay):
            if lack.is_met:
                return
            if model is needy or not self._must_make_room(model, now_s):
                continue
            lack.give(model.num_bytes, 1)
            if model.num_open:
                model.gives_way = True
            else:
                yield _unload(model, "room", now_s)

    def _from_idle(
        self, idle: Iterable[Resident], lack: Shortfall, now_s: float
    ) -> Iterator[Action]:
        """Take memory from models that nobody uses: their KV if that is enough, else all of them,
        the least recently used first."""
        left = list(idle)
        while left and not lack.is_met:
            small = [one for one in left if one.level is Level.READY and one.can_shrink]
            if lack.num_models <= 0 and sum(one.kv_bytes for one in small) >= lack.num_bytes:
                for model in small:
                    if lack.is_met:
                        return
                    lack.give(model.kv_bytes)
                    model.level = Level.SHRINKING
                    yield Shrink(model.name)
                return
            model = left.pop(0)
            lack.give(model.num_bytes, 1)
            yield _unload(model, "room", now_s)

    def _may_leave(self, model: Resident, needy: Resident, now_s: float) -> bool:
        """Whether an idle model may be taken memory from."""
        if model is needy or model.pin or not model.is_idle:
            return False
        is_guarded = self._came_back(model) and now_s < model.at.ready_s + self.stay_s(model)
        return model.level in (Level.READY, Level.SMALL) and not is_guarded

    def _came_back(self, model: Resident) -> bool:
        """Whether its last load began soon after it had to leave."""
        left_s = model.at.left_s
        return left_s is not None and model.at.began_s - left_s < self.facts.rules.return_s

    def _must_make_room(self, model: Resident, now_s: float) -> bool:
        """Whether a model in use, or one that others wait for later, must make room."""
        if model.pin or model.is_idle:
            return False
        is_over = now_s >= model.at.ready_s + self.stay_s(model)
        return model.level is Level.SMALL or (model.level is Level.READY and is_over)

    def _is_patient(self, model: Resident, now_s: float) -> bool:
        since = model.wanted_since_s
        return since is not None and now_s >= since + self.facts.rules.patience_s


def _by_use(model: Resident) -> tuple[float, str]:
    return model.at.used_s, model.name


def _by_stay(model: Resident) -> tuple[float, str]:
    return model.at.ready_s, model.name


def _unload(model: Resident, why: str, now_s: float) -> Unload:
    model.was_small = model.level is Level.SMALL
    model.level = Level.UNLOADING
    if why == "room":
        model.at.left_s = now_s
    return Unload(model.name, why)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
