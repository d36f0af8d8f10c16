"""What an engine is handed and does not own: device, clock, profiler, grammars, logit processors,
the store of KV, another server, and whoever follows the prefix cache.

Each is a protocol, so that tests, simulation and replay put others in their place. None of it is
state of the engine: a snapshot names these things and does not hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from weft.grammar.protocol import Grammars
from weft.memory.events.protocol import CacheEvents
from weft.memory.handoff.protocol import Handoff
from weft.memory.tiers.protocol import Tiers
from weft.plan.step import Runner
from weft.scheduler.features.processors import ProcessorChecks


class NoProcessors:
    """For engines that have no logit processors."""

    def wrong(self, name: str, params: Mapping[str, Any]) -> str:
        return f"there is no logit processor {name!r}: this engine has none"


class ProfileReport(Protocol):
    """How far a profile is, and what it has found: `executor/profile/profile.py`."""

    @property
    def state(self) -> Literal["none", "writing", "done", "failed"]: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def trace(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def message(self) -> str: ...


class Profiler(Protocol):
    """Records what the device does in the steps between `start` and `stop`. Neither waits for the
    device."""

    def start(
        self,
        *,
        num_steps: int | None,
        activities: Sequence[str],
        record_shapes: bool,
        with_stack: bool,
        profile_memory: bool,
        folder: str,
        prefix: str,
    ) -> str | None:
        """Record from the next step on, `num_steps` of them if not None.

        Returns the path of the trace below the profiler's folder, "" if none is written, or None
        while the profiler is being prepared beside the steps: call again. Raises ValueError for a
        setting that is not possible, with those that are.
        """
        ...

    def stop(self) -> ProfileReport:
        """Stop, if it still records, and report how far it is. Call again while it is "writing"."""
        ...


class NoProfiler:
    """For engines without a device to look at."""

    def start(self, **how: object) -> str | None:
        raise ValueError("this engine has no profiler")

    def stop(self) -> ProfileReport:
        raise ValueError("this engine has no profiler")


class Surroundings(NamedTuple):
    """All of it, of one engine. `report_failure` gets each exception of the device and the
    scheduler."""

    runner: Runner
    clock: Callable[[], float]
    report_failure: Callable[[Exception], None]
    profiler: Profiler
    grammars: Grammars
    processors: ProcessorChecks
    tiers: Tiers
    handoff: Handoff
    cache_events: CacheEvents
