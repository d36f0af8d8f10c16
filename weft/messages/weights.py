"""Control requests about the weights and the memory of a running engine, and their reply.

While such a request is carried out, no step runs, and arriving requests wait. After a change of the
weights, all K and V of the old weights are dropped: running requests are computed again, and keep
their output so far.
"""

from __future__ import annotations

from weft.messages.calls import ControlRequest, SuccessReply

FIRST_VERSION = "default"  # of the weights that an engine starts with
GROUP = "weight_update_group"


class WeightsReply(SuccessReply):
    """The reply to all requests of this module except `GetWeightsByName`, when they are done."""

    weight_version: str  # the current version
    status: int = 200  # HTTP status
    num_tensors: int = 0  # tensors that were loaded
    num_bytes: int = 0  # size of these tensors as received, or of the released memory
    num_paused_requests: int = 0  # requests whose KV was dropped, or which were aborted
    released: list[str] = []  # tags of the memory that is released now


class WeightsUpdate(ControlRequest[WeightsReply], kw_only=True):
    """The fields of all updates. K and V of the old weights are dropped in any case."""

    weight_version: str | None = None  # the version in answers from then on; None: unchanged
    abort_all_requests: bool = False  # end open requests instead of computing them again


class UpdateWeightsFromDisk(WeightsUpdate):
    """Load all weights from the safetensors files of a folder, or none if anything is wrong."""

    model_path: str  # below --weights-root
    load_format: str | None = None  # "auto" or "safetensors": the files define the format


class UpdateWeightsFromTensor(WeightsUpdate):
    """Load some weights from this message: all of them, or none if anything is wrong."""

    content: bytes  # in the format of safetensors


class UpdateWeightsFromDistributed(WeightsUpdate):
    """Load some weights that rank 0 of a group broadcasts in this order: all of them, or none if
    anything is wrong."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = GROUP


class InitWeightsUpdateGroup(ControlRequest[WeightsReply]):
    """Join a group of processes. Its rank 0, at this address, will send weights."""

    master_address: str
    master_port: int
    rank_offset: int  # rank of this engine
    world_size: int
    group_name: str = GROUP
    backend: str = "gloo"
    timeout_s: float = 120.0  # limit for all processes to join, and then for each tensor


class DestroyWeightsUpdateGroup(ControlRequest[WeightsReply]):
    """Leave a group that sends weights."""

    group_name: str = GROUP


class ReleaseMemoryOccupation(ControlRequest[WeightsReply]):
    """Give memory back to the system. Fails while a request owns KV memory.

    Until the memory is resumed, new requests are refused, and waiting requests keep waiting.
    """

    tags: list[str] | None = None  # weights, kv_cache; None: both


class ResumeMemoryOccupation(ControlRequest[WeightsReply]):
    """Use released memory again. The cache is then empty; weights are loaded from their last
    folder."""

    tags: list[str] | None = None


class GetWeightsByNameReply(SuccessReply, tag="weights_by_name_reply"):
    shape: list[int] = []  # of the rows
    values: bytes = b""  # float32
    status: int = 200


class GetWeightsByName(ControlRequest[GetWeightsByNameReply]):
    """Ask for the first rows of a weight as it is stored in the engine, perhaps quantized."""

    name: str
    truncate_size: int = 100  # rows
