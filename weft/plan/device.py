"""Work for the device that is no step: what goes in, what comes out. It is done between steps,
never while one runs.

Like plans these are plain values: whoever asks sees no tensor, whoever does it no request.
`Runner.control` takes them.
"""

from __future__ import annotations

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
    """Tell the first rows of a weight."""

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
    """Count which experts tokens get: start, stop, look, which tells the counts, or dump, which
    begins anew besides."""

    action: str


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """Read and check an adapter (LoRA), and lay it out for `LoadAdapter`, which then only puts it
    in. The one request that is carried out beside steps, and beside other requests: it changes
    nothing that these read. Several are done in their order.
    """

    path: str  # as in `LoadAdapter`
    uid: str


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Put an adapter (LoRA) into a place that is free. If it has not been read before, it is read
    now. The place stays free if anything is wrong with its files, also if they have changed since
    `uid` was computed.
    """

    place: int  # 0..max_loaded_loras-1, as `Plan.adapters` names it from now on
    path: str  # folder with adapter_config.json and adapter_model.safetensors
    uid: str  # of the content of these files


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Forget the adapter in a place; the place is free again."""

    place: int


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
)


@dataclass(frozen=True, slots=True)
class DeviceReply:
    ok: bool
    message: str = ""  # why not; for who asked: no path, no address
    status: int = 400  # if not ok, as an HTTP status: who asked is to blame below 500
    kv_is_stale: bool = False  # weights are others than those that K and V were computed with
    is_reloaded: bool = (
        False  # the weights are those of the last folder again; what came as tensors is lost
    )
    released: tuple[
        str, ...
    ] = ()  # memory that is given back now; nothing can be computed while there is any
    num_tensors: int = 0  # that were taken
    num_bytes: int = 0  # of them, as they came; or of memory given back
    shape: tuple[int, ...] = ()  # of the weight that was asked for
    values: bytes = b""  # its first rows, float32
    # Of experts, `values` are counts, int64 [prefill and decode, layers, experts],
    layers: tuple[int, ...] = ()  # of these layers,
    file: str = ""  # which this file below the profiler's folder has, too;
    is_recording: bool = False  # and they grow with the steps to come


class Pending(Protocol):
    """Work that has been asked for."""

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> DeviceReply:
        """Wait for its end. Raises nothing that whoever asked is to blame for."""
        ...


class Done:
    """Work that is done already."""

    def __init__(self, reply: DeviceReply) -> None:
        self._reply = reply

    def done(self) -> bool:
        return True

    def result(self) -> DeviceReply:
        return self._reply


NO_DEVICE = Done(
    DeviceReply(ok=False, message="there is no device behind this engine, and so no weights")
)
