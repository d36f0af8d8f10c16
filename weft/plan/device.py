"""Requests to the device that are not steps, and their replies.

The device works on them between steps, except `ReadAdapter`, which it carries out while steps run.
As with plans, these are plain values: the caller sees no tensor, and the device sees no request of
a user. `Runner.control` takes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)  # kinds of memory that can be released


@dataclass(frozen=True, slots=True)
class UpdateFromDisk:
    """Take all weights from the safetensors files of a folder below the root of weights."""

    folder: str


@dataclass(frozen=True, slots=True)
class UpdateFromTensors:
    """Take some weights from safetensors in memory."""

    content: bytes


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Become a rank of a group of processes whose rank 0 sends weights."""

    name: str
    host: str  # where rank 0 listens
    port: int
    rank: int
    world_size: int
    backend: str
    timeout_s: float  # for joining, and for each tensor afterwards


@dataclass(frozen=True, slots=True)
class ReceiveWeights:
    """Take some weights as rank 0 of a group broadcasts them, in this order."""

    group: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # "bfloat16"
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    name: str


@dataclass(frozen=True, slots=True)
class GetWeight:
    """Return the first rows of a weight."""

    name: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """Give memory back to the system. Its content is lost."""

    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResumeMemory:
    """Use released memory again: weights are loaded from where they came, KV is empty."""

    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordExperts:
    """Count the tokens that each expert gets. `action` is start, stop, look (returns the counts) or
    dump (returns the counts and sets them to 0)."""

    action: str


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """Read and check an adapter (LoRA), and lay it out for `LoadAdapter`, which then only copies
    it.

    This is the one request that runs while steps and other requests run, because it changes nothing
    that they read. Several are carried out in their order.
    """

    path: str  # as in `LoadAdapter`
    uid: str


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Put an adapter (LoRA) into a slot for adapters, instead of the one that is there, if any.

    An adapter that has not been read is read now. Nothing changes if something is wrong with the
    files, or if they have changed since `uid` was computed.
    """

    adapter_slot: int  # 0..max_loaded_loras-1, as `Plan.adapters` names it from now on
    path: str  # folder with adapter_config.json and adapter_model.safetensors
    uid: str  # of the content of these files


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Forget the adapter in a slot; the slot is free again."""

    adapter_slot: int


@dataclass(frozen=True, slots=True)
class MeetOthers:
    """Do nothing, at the same place between the steps of all engines that keep step. It fails in
    all of them if the last one comes too late."""

    until_s: float = math.inf  # of the monotonic clock, which all engines of a machine share


DeviceRequest: TypeAlias = (
    UpdateFromDisk
    | UpdateFromTensors
    | JoinGroup
    | ReceiveWeights
    | LeaveGroup
    | GetWeight
    | ReleaseMemory
    | ResumeMemory
    | RecordExperts
    | ReadAdapter
    | LoadAdapter
    | UnloadAdapter
    | MeetOthers
)


@dataclass(frozen=True, slots=True)
class DeviceReply:
    ok: bool
    message: str = ""  # why not; goes to the client, so it has no path and no address
    status: int = 400  # HTTP status if not ok; below 500: the caller's fault
    kv_is_stale: bool = False  # K and V were computed with other weights
    is_reloaded: bool = (
        # the weights are again those of the last folder; weights that came as tensors are lost
        False
    )
    released: tuple[
        str, ...
    ] = ()  # kinds of memory that are released now; while there is one, nothing can be computed
    num_tensors: int = 0  # weights that were replaced
    num_bytes: int = 0  # size of these weights as received; or of the released memory
    shape: tuple[int, ...] = ()  # of the weight that `GetWeight` names
    values: bytes = b""  # first rows of this weight, float32
    # For `RecordExperts`, `values` are counts: int64 [prefill and decode, layers, experts].
    layers: tuple[int, ...] = ()  # the layers that have experts
    file: str = ""  # copy of the counts, below the profiler's folder
    is_recording: bool = False  # whether the next steps are counted, too


class Pending(Protocol):
    """A request to the device, which may still be in progress."""

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> DeviceReply:
        """Wait for the reply. Raises no error for a fault of the caller: the reply has it."""
        ...


class Done:
    """A request to the device that is complete."""

    def __init__(self, reply: DeviceReply) -> None:
        self._reply = reply

    def done(self) -> bool:
        return True

    def result(self) -> DeviceReply:
        return self._reply


NO_DEVICE = Done(
    DeviceReply(ok=False, message="there is no device behind this engine, and so no weights")
)
