"""The facts about all models: requests come and end, actions have ended. It decides nothing."""

from __future__ import annotations

from weft.residency.resident import Level, Resident
from weft.residency.rules import Rules


class Residents:
    """The models of a server, by name, and what becomes of them."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.models: dict[str, Resident] = {}
        self.rate = rules.first_rate  # bytes of weights that load in a second, as measured

    # ---- requests

    @property
    def num_bytes(self) -> int:
        """Bytes of all models that are in memory, come or go."""
        return sum(one.num_bytes for one in self.models.values())

    @property
    def are_calm(self) -> bool:
        """Whether nobody waits, and no model has to leave: then the end of a request has no other
        effect than that its model may be idle, from which on it stays until `leaves_s`."""
        return not any(
            one.must_leave or one.gives_way or one.wanted_since_s is not None
            for one in self.models.values()
        )

    def leaves_s(self, name: str) -> float | None:
        """When a model that nobody asks for any more is unloaded; None: it is in use, or stays."""
        model = self.models[name]
        if not model.ttl_s or model.pin or not model.is_idle:
            return None
        return model.at.used_s + model.ttl_s

    def add(self, model: Resident) -> None:
        self.models[model.name] = model

    def remove(self, name: str) -> None:
        assert self.models[name].level is Level.ABSENT, f"{name} is in memory"
        del self.models[name]

    def is_open(self, name: str) -> bool:
        """Whether a request that comes now may begin."""
        return self.models[name].is_open

    def begin(self, name: str, now_s: float) -> bool:
        """Let a request begin, if it may. A model that is not known answers nothing."""
        model = self.models.get(name)
        if model is None or not model.is_open:
            return False
        model.num_open += 1
        model.at.used_s = now_s
        return True

    def request(self, name: str, now_s: float) -> bool:
        """A request for a model. Returns whether it may begin; else it waits until `admit`, or
        `give_up`."""
        if self.begin(name, now_s):
            return True
        self.models[name].waiting.append(now_s)
        return False

    def admit(self, name: str, now_s: float) -> int:
        """How many of the waiting requests begin now: all of them if the model is ready."""
        if not self.is_open(name):
            return 0
        model = self.models[name]
        num = len(model.waiting)
        model.waiting.clear()
        model.asked_s = None
        if num:
            model.num_open += num
            model.at.used_s = now_s
        return num

    def give_up(self, name: str, arrived_s: float) -> None:
        """A waiting request has ended."""
        self.models[name].waiting.remove(arrived_s)

    def end(self, name: str, now_s: float) -> float | None:
        """A request that had begun has ended. Returns the same as `leaves_s`."""
        model = self.models[name]
        assert model.num_open, f"no request for {name} is open"
        model.num_open -= 1
        model.at.used_s = now_s
        return self.leaves_s(name)

    def ask_load(self, name: str, now_s: float) -> None:
        model = self.models[name]
        model.must_leave = False
        if model.level is not Level.READY and model.asked_s is None:
            model.asked_s = now_s

    def ask_unload(self, name: str) -> None:
        """Unload a model as soon as its open requests have ended, even if it is pinned."""
        model = self.models[name]
        model.asked_s = None
        if model.level is not Level.ABSENT:
            model.must_leave = True

    # ---- ends of actions

    def loaded(self, name: str, now_s: float) -> None:
        model = self.models[name]
        model.load_s = now_s - model.at.began_s
        if model.load_s > 0 and model.fixed_bytes:
            self.rate += (model.fixed_bytes / model.load_s - self.rate) / 2
        self._ready(model, now_s)

    def grown(self, name: str, now_s: float) -> None:
        self._ready(self.models[name], now_s)

    def _ready(self, model: Resident, now_s: float) -> None:
        model.level = Level.READY
        model.asked_s = None
        model.at.ready_s = now_s
        model.at.used_s = now_s

    def shrunk(self, name: str, now_s: float) -> None:
        """A model has no KV any more since `now_s`."""
        self.models[name].level = Level.SMALL

    def not_changed(self, name: str, now_s: float) -> None:
        """A model could not be shrunk, and will not be asked again; or not be grown, and is
        unloaded before it answers."""
        model = self.models[name]
        model.can_shrink = False
        model.must_leave = model.must_leave or model.level is Level.GROWING
        self._ready(model, now_s)

    def lost(self, name: str) -> None:
        """The engine of a model has ended by itself: what is left of it is cleared away."""
        self.models[name].level = Level.UNLOADING

    def unloaded(self, name: str) -> None:
        """A model is not in memory any more: it was unloaded, its load failed, or its engine is
        lost. Requests that were open end by themselves; those that wait go on waiting."""
        model = self.models[name]
        model.level = Level.ABSENT
        model.gives_way = False
        model.must_leave = False
        model.was_small = False

    def refused(self, name: str) -> None:
        """The waiting requests of a model have ended, because it cannot be loaded."""
        model = self.models[name]
        model.waiting.clear()
        model.asked_s = None
