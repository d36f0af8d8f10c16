"""The objects that an engine gets and does not own: device, clock, profiler, grammars, logit
processors, the store of KV, another server, and the listener of the prefix cache.

Each is a protocol, so that tests, simulation and replay can replace it. They are not part of the
engine's state: a snapshot names them and does not contain them.
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
    """For engines without logit processors."""

    def wrong(self, name: str, params: Mapping[str, Any]) -> str:
        return f"there is no logit processor {name!r}: this engine has none"


class ProfileReport(Protocol):
    """The progress of a profile, and its results: `executor/profile/profile.py`."""

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
    """Records the device's work in the steps between `start` and `stop`. Neither waits for the
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
        """Record from the next step on, `num_steps` steps if not None.

        Returns the path of the trace below the profiler's folder, "" if none is written, or None
        while the profiler is being prepared during steps: call again. Raises ValueError for an
        impossible setting, with the possible ones.
        """
        ...

    def stop(self) -> ProfileReport:
        """Stop recording, and report the progress. Call again while it is "writing"."""
        ...


class NoProfiler:
    """For engines without a device to profile."""

    def start(self, **how: object) -> str | None:
        raise ValueError("this engine has no profiler")

    def stop(self) -> ProfileReport:
        raise ValueError("this engine has no profiler")


class Surroundings(NamedTuple):
    """The surroundings of one engine. `report_failure` gets each exception of the device and the
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
