"""The changes that control requests have made in engines since their start. An engine that is
started again gets them, too, before its first request.

Knows nothing of the start of engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.messages.adapters import (
    LoadLoraAdapter,
    UnloadLoraAdapter,
)
from weft.messages.calls import ControlRequest
from weft.messages.control import (
    BlockInput,
    ConfigureLogging,
    ContinueGeneration,
    PauseGeneration,
    SetInternalState,
    SetPolicy,
    Setting,
    SlowDown,
    StartExpertDistributionRecord,
    StopExpertDistributionRecord,
    UnblockInput,
)
from weft.messages.outside import CallOutside
from weft.messages.sessions import KeepSessions
from weft.messages.weights import (
    ReleaseMemoryOccupation,
    ResumeMemoryOccupation,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightsFromTensor,
)

Change = ControlRequest[Any]

# Of the requests with the same name only the last one is kept; a request and its opposite have the
# same name.
_LAST_COUNTS: dict[type[Change], str] = {
    SetPolicy: "policy",
    SlowDown: "pace",
    ConfigureLogging: "log level",
    BlockInput: "input",
    UnblockInput: "input",
    PauseGeneration: "generation",
    ContinueGeneration: "generation",
    StartExpertDistributionRecord: "experts",
    StopExpertDistributionRecord: "experts",
}
# The state of a new engine already agrees with these.
_KEEP_NOTHING = (UnblockInput, ContinueGeneration, StopExpertDistributionRecord)


class EngineChanges:
    """The changes that a new engine needs, in order."""

    def __init__(self) -> None:
        self.kept_outside: frozenset[str] = frozenset()  # control requests of `--plugins`
        self.start_ramp_s = 0.0  # the input of a new engine opens with this ramp; 0: at once
        self._last: dict[str, Change] = {}
        self._settings: dict[str, Setting] = {}
        self._adapters: dict[str, LoadLoraAdapter] = {}  # by uid
        self._weights: UpdateWeightsFromDisk | None = None
        self._released: list[Change] = []
        # The current weights were sent and not stored: a new engine could not get them.
        self.are_lost = False

    def note(self, request: Change) -> None:
        """Record a request that all engines have carried out."""
        name = _LAST_COUNTS.get(type(request))
        if isinstance(request, CallOutside) and request.name in self.kept_outside:
            name = f"outside {request.name}"
        if name is not None:
            self._last.pop(name, None)
            if not isinstance(request, _KEEP_NOTHING):
                self._last[name] = request
            return
        match request:
            case KeepSessions():  # a new engine begins without sessions
                self._last["sessions"] = KeepSessions()
            case SetInternalState():
                self._settings |= request.server_args
            case LoadLoraAdapter():
                self._adapters[request.uid] = request
            case UnloadLoraAdapter():
                self._adapters.pop(request.uid, None)
            case UpdateWeightsFromDisk():
                self._weights = request
                self.are_lost = False
            case UpdateWeightsFromTensor() | UpdateWeightsFromDistributed():
                self.are_lost = True
            case ReleaseMemoryOccupation():
                self._released.append(request)
            case ResumeMemoryOccupation():
                self._released.append(request)
                if request.tags is None:
                    self._released.clear()

    def forget_adapters(self, uids: Iterable[str]) -> None:
        """Forget adapters that engines evicted to load others."""
        for uid in uids:
            self._adapters.pop(uid, None)

    def for_new_engine(self) -> list[Change]:
        """The requests to send to a new engine, in this order."""
        found: list[Change] = []
        if self._weights is not None:
            found.append(self._weights)
        found += self._adapters.values()
        if self._settings:
            found.append(SetInternalState(server_args=dict(self._settings)))
        found += self._last.values()
        if self.start_ramp_s and "input" not in self._last:
            found.append(UnblockInput(ramp_s=self.start_ramp_s))
        found += self._released
        return found
