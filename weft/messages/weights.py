"""Control requests about the weights and the memory of a running engine, and their reply.

While such a request is carried out no step runs; requests that arrive meanwhile wait. After the
weights have changed, all K and V of the old weights are dropped: running requests are computed
again, and keep their output so far.
"""

from __future__ import annotations

from weft.messages.calls import ControlRequest, SuccessReply

FIRST_VERSION = "default"  # of the weights that an engine starts with
GROUP = "weight_update_group"


class WeightsReply(SuccessReply):
    """Answers all requests of this module but `GetWeightsByName`, when they are done."""

    weight_version: str  # that is in use now
    status: int = 200  # as an HTTP status
    num_tensors: int = 0  # that were taken
    num_bytes: int = 0  # of them as they came, or of memory that was given back
    num_paused_requests: int = 0  # whose KV was dropped, or which were aborted
    released: list[str] = []  # memory that is given back now


class WeightsUpdate(ControlRequest[WeightsReply], kw_only=True):
    """What all updates have. K and V of the old weights are dropped in any case."""

    weight_version: str | None = None  # that answers name from then on; None: as before
    abort_all_requests: bool = False  # end open requests instead of computing them again


class UpdateWeightsFromDisk(WeightsUpdate):
    """Take all weights from the safetensors files of a folder, or none if anything is wrong."""

    model_path: str  # below --weights-root
    load_format: str | None = None  # "auto" or "safetensors": the files themselves say it


class UpdateWeightsFromTensor(WeightsUpdate):
    """Take some weights, all of them or none."""

    content: bytes  # in the format of safetensors


class UpdateWeightsFromDistributed(WeightsUpdate):
    """Take some weights that rank 0 of a group broadcasts in this order, all of them or none."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = GROUP


class InitWeightsUpdateGroup(ControlRequest[WeightsReply]):
    """Join a group of processes whose rank 0, at this address, is going to send weights."""

    master_address: str
    master_port: int
    rank_offset: int  # rank of this engine
    world_size: int
    group_name: str = GROUP
    backend: str = "gloo"
    timeout_s: float = 120.0  # for all to join, and for each tensor afterwards


class DestroyWeightsUpdateGroup(ControlRequest[WeightsReply]):
    """Leave a group."""

    group_name: str = GROUP


class ReleaseMemoryOccupation(ControlRequest[WeightsReply]):
    """Give memory back to the system. Not while a request owns KV memory.

    New requests are refused until it is there again, those that wait go on waiting.
    """

    tags: list[str] | None = None  # weights, kv_cache; None: both


class ResumeMemoryOccupation(ControlRequest[WeightsReply]):
    """Use released memory again. The cache is empty, weights come from their last folder."""

    tags: list[str] | None = None


class GetWeightsByNameReply(SuccessReply, tag="weights_by_name_reply"):
    shape: list[int] = []  # of the rows
    values: bytes = b""  # float32
    status: int = 200


class GetWeightsByName(ControlRequest[GetWeightsByNameReply]):
    """Ask for the first rows of a weight as it is kept, which may be in fewer bits than it came."""

    name: str
    truncate_size: int = 100  # rows
