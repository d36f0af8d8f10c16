"""A server in virtual time around `Residency`: actions take time, requests come and end, engines
are killed. After each event it checks what must always hold."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.residency.residency import Residency
from weft.residency.resident import Level, Resident
from weft.residency.rules import Action, Grow, Load, Refuse, Rules, Shrink, Unload

LONGEST_UNLOAD_S = 0.5
GROW_S = 0.1


@dataclass
class Wait:
    name: str
    came_s: float
    num_before: int  # models before its own when it came
    work_s: float


@dataclass
class Ended:
    served: int = 0
    refused: int = 0
    lost: int = 0  # their engine was killed
    longest_wait_s: float = 0.0


@dataclass
class World:
    rules: Rules
    longest_work_s: float
    longest_load_s: float
    load_s: dict[str, float] = field(default_factory=dict)
    now_s: float = 0.0
    ended: Ended = field(default_factory=Ended)
    actions: list[tuple[float, Action]] = field(default_factory=list)
    fails: set[str] = field(default_factory=set)  # models whose loads fail
    num_begun: int = 0
    num_asked: int = 0  # requests
    is_disturbed: bool = False  # by kills and by loads and unloads that somebody asks for

    def __post_init__(self) -> None:
        self.core = Residency(self.rules)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waits: dict[str, list[Wait]] = {}
        self._open: dict[str, int] = {}
        self._life: dict[str, int] = {}
        self._wakes: set[float] = set()
        self.asked: set[str] = set()

    def add(self, model: Resident, load_s: float) -> None:
        self.core.add(model)
        self.load_s[model.name] = load_s
        self._waits[model.name] = []
        self._open[model.name] = 0
        self._life[model.name] = 0

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), call))

    def run(self) -> None:
        while self._events:
            self.now_s, _, call = heapq.heappop(self._events)
            call()
            self._settle()

    # ---- what happens

    def request(self, name: str, work_s: float) -> None:
        if self.core.request(name, self.now_s):
            self._start(name, work_s, 0.0)
        else:
            num_before = self.core.delay(name, self.now_s).position
            self._waits[name].append(Wait(name, self.now_s, num_before, work_s))

    def kill(self, name: str) -> None:
        model = self.core.models[name]
        if model.level in (Level.READY, Level.SMALL):
            self.ended.lost += self._open[name]
            for _ in range(self._open[name]):
                self.core.end(name, self.now_s)
            self._open[name] = 0
            self._life[name] += 1
            self.core.unloaded(name)

    def ask_unload(self, name: str) -> None:
        self.asked.add(name)
        self.core.ask_unload(name)

    def ask_load(self, name: str) -> None:
        self.core.ask_load(name, self.now_s)

    # ---- what the launcher does

    def _start(self, name: str, work_s: float, waited_s: float) -> None:
        self.num_begun += 1
        self._open[name] += 1
        self.ended.longest_wait_s = max(self.ended.longest_wait_s, waited_s)
        life = self._life[name]
        self.at(self.now_s + work_s, lambda: self._finish(name, life))

    def _finish(self, name: str, life: int) -> None:
        if life != self._life[name]:
            return  # its engine was killed
        self._open[name] -= 1
        self.ended.served += 1
        self.core.end(name, self.now_s)

    def _admit(self) -> None:
        for name in self.core.models:
            num = self.core.admit(name, self.now_s)
            begun, self._waits[name] = self._waits[name][:num], self._waits[name][num:]
            for wait in begun:
                self._start(name, wait.work_s, self.now_s - wait.came_s)
                self._check_bound(wait)

    def _settle(self) -> None:
        self._admit()
        before = {one.name: (one.level, one.num_open) for one in self.core.models.values()}
        for action in self.core.step(self.now_s):
            self.actions.append((self.now_s, action))
            self._check_action(action, before[action.name])
            self._do(action)
        self._admit()  # of models that need not make room any more
        self._check()
        later_s = self.core.next_s(self.now_s)
        if later_s is None or later_s in self._wakes:
            return
        if any(self._waits.values()):
            self._wakes.add(later_s)
            self.at(later_s, lambda: None)

    def _do(self, action: Action) -> None:
        name = action.name
        core = self.core
        match action:
            case Load():
                self.at(self.now_s + self.load_s[name], lambda: self._loaded(name))
            case Grow():
                self.at(self.now_s + GROW_S, lambda: core.grown(name, self.now_s))
            case Shrink():
                self.at(self.now_s + GROW_S, lambda: core.shrunk(name))
            case Unload():
                self.asked.discard(name)
                self.at(self.now_s + LONGEST_UNLOAD_S, lambda: core.unloaded(name))
            case Refuse():
                self._refuse(name)

    def _loaded(self, name: str) -> None:
        if name in self.fails:
            self.core.unloaded(name)
            self.core.refused(name)
            self._refuse(name)
        else:
            self.core.loaded(name, self.now_s)

    def _refuse(self, name: str) -> None:
        self.ended.refused += len(self._waits[name])
        self._waits[name].clear()

    # ---- what must hold

    def _check(self) -> None:
        core = self.core
        assert core.num_bytes <= self.rules.budget_bytes
        present = [one for one in core.models.values() if one.level is not Level.ABSENT]
        assert not self.rules.max_models or len(present) <= self.rules.max_models
        for name, waits in self._waits.items():
            assert len(waits) == len(core.models[name].waiting)

    def _check_action(self, action: Action, before: tuple[Level, int]) -> None:
        level, num_open = before
        model = self.core.models[action.name]
        if isinstance(action, Unload | Shrink):
            assert level in (Level.READY, Level.SMALL)
            assert not num_open, f"{action} with open requests"
            assert not model.pin or action.name in self.asked, f"{action} of a pinned model"
        if isinstance(action, Load):
            assert level is Level.ABSENT

    def _check_bound(self, wait: Wait) -> None:
        """A load that has begun when the request comes ends before the first stay begins."""
        if self.is_disturbed:
            return
        rules = self.rules
        stay_s = max(rules.least_stay_s, rules.stay_loads * self.longest_load_s)
        turn_s = max(rules.patience_s, stay_s) + self.longest_work_s
        turn_s += LONGEST_UNLOAD_S + self.longest_load_s
        waited_s = self.now_s - wait.came_s
        assert waited_s <= (wait.num_before + 1) * turn_s + self.longest_load_s + 1e-6, wait
