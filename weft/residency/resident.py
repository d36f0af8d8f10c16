"""The facts about one model. Only `Residency` writes them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum


class Level(Enum):
    """How much of a model is in memory, and what is being done about it."""

    ABSENT = "unloaded"
    LOADING = "loading"
    READY = "loaded"
    SHRINKING = "shrinking"
    SMALL = "sleeping"  # its weights, without KV
    GROWING = "growing"
    UNLOADING = "unloading"


@dataclass
class Moments:
    """When something last happened to a model."""

    used_s: float = 0.0  # end or begin of its last request
    began_s: float = 0.0  # of the load, or the growth, that is done now
    ready_s: float = 0.0
    left_s: float | None = None  # when it was unloaded for room


@dataclass
class Resident:
    """One model. Times are those of the caller's clock, in seconds."""

    name: str
    fixed_bytes: int  # weights, and what its process takes beside KV
    kv_bytes: int
    pin: bool = False
    ttl_s: float = 0.0  # idle time after which it is unloaded; 0: it stays
    can_shrink: bool = True
    level: Level = Level.ABSENT
    num_open: int = 0
    waiting: deque[float] = field(default_factory=deque)  # arrivals of waiting requests, in order
    asked_s: float | None = None  # when somebody asked for it to be loaded, without a request
    must_leave: bool = False  # somebody asked for it to be unloaded
    gives_way: bool = False  # a model that waits needs its memory: new requests wait
    at: Moments = field(default_factory=Moments)
    load_s: float = 0.0  # how long its last load took; 0: not known
    was_small: bool = False  # it had no KV when it began to be unloaded

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes now, at most."""
        if self.level is Level.ABSENT:
            return 0
        if self.level is Level.SMALL or (self.level is Level.UNLOADING and self.was_small):
            return self.fixed_bytes
        return self.fixed_bytes + self.kv_bytes

    @property
    def wanted_since_s(self) -> float | None:
        """Since when somebody waits for it; None: nobody does."""
        since = self.waiting[0] if self.waiting else None
        if self.asked_s is not None:
            since = self.asked_s if since is None else min(since, self.asked_s)
        return since

    @property
    def is_open(self) -> bool:
        """Whether a request that comes now may begin."""
        return self.level is Level.READY and not (self.gives_way or self.must_leave)

    @property
    def is_idle(self) -> bool:
        return not self.num_open and self.wanted_since_s is None
