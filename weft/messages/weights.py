"""Control requests about the weights and the memory of a running engine, and their replies.

While one of them is carried out no step runs; requests that come meanwhile wait. When weights have changed, all K and V
that were computed with the old ones are gone: running requests are computed anew, their output so far is kept.
"""

from __future__ import annotations

import msgspec

FIRST_VERSION = "default"  # of the weights that an engine starts with


class UpdateWeightsFromDisk(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="update_weights_from_disk"
):
    """Take all weights from the safetensors files of a folder, or none if anything is wrong with them."""

    call: int
    model_path: str  # below the engine's root of weights
    weight_version: str | None = None  # what answers are to say from then on; None: as before
    abort_all_requests: bool = False  # end open requests when the new weights are in


class UpdateWeightsFromTensor(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="update_weights_from_tensor"
):
    """Take some weights, all of them or none."""

    call: int
    content: bytes  # in the format of safetensors
    weight_version: str | None = None
    abort_all_requests: bool = False


class InitWeightsUpdateGroup(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="init_weights_update_group"
):
    """Join a group of processes whose rank 0 is going to send weights."""

    call: int
    master_address: str
    master_port: int
    rank: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float  # for joining, and for each tensor afterwards


class UpdateWeightsFromDistributed(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="update_weights_from_distributed",
):
    """Take some weights that rank 0 of a group broadcasts in this order, all of them or none."""

    call: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    weight_version: str | None = None
    abort_all_requests: bool = False


class DestroyWeightsUpdateGroup(
    msgspec.Struct, frozen=True, kw_only=True, tag="destroy_weights_update_group"
):
    """Leave a group."""

    call: int
    group_name: str


class ReleaseMemoryOccupation(
    msgspec.Struct, frozen=True, kw_only=True, tag="release_memory_occupation"
):
    """Give memory back to the system. Not while a request holds KV memory. New requests are refused until it is there
    again, those that wait go on waiting."""

    call: int
    tags: list[str]  # weights, kv_cache


class ResumeMemoryOccupation(
    msgspec.Struct, frozen=True, kw_only=True, tag="resume_memory_occupation"
):
    """Use released memory again. Weights are loaded from the folder that they last came from, the cache is empty."""

    call: int
    tags: list[str]


class WeightsReply(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="weights_reply"
):
    """Answers all of the above, when it is done."""

    call: int
    success: bool
    weight_version: str  # that is in use now
    message: str = ""
    status: int = 200  # as an HTTP status
    num_tensors: int = 0  # that were taken
    num_bytes: int = 0  # of them as they came, or of memory that was given back
    num_requests: int = 0  # whose KV was dropped, or which were aborted
    released: list[str] = []  # memory that is given back now


class GetWeightsByName(msgspec.Struct, frozen=True, kw_only=True, tag="get_weights_by_name"):
    """Ask for the first rows of a weight as it is kept, which may be in fewer bits than it came."""

    call: int
    name: str
    truncate_size: int


class GetWeightsByNameReply(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="weights_by_name_reply"
):
    call: int
    success: bool
    shape: list[int] = []  # of the rows
    values: bytes = b""  # float32
    message: str = ""
    status: int = 200
