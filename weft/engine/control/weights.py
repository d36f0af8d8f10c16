"""Handlers of control requests about weights and memory.

Each becomes a job for the device, and is answered when that is done (`device_jobs.py`). No tensor
is seen here.
"""

from __future__ import annotations

from weft.engine import device_jobs
from weft.engine.control.target import ControlTarget
from weft.engine.device_jobs import Answer, Job
from weft.messages.calls import ControlReply
from weft.messages.weights import (
    DestroyWeightsUpdateGroup,
    GetWeightsByName,
    GetWeightsByNameReply,
    InitWeightsUpdateGroup,
    ReleaseMemoryOccupation,
    ResumeMemoryOccupation,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightsFromTensor,
    WeightsReply,
    WeightsUpdate,
)
from weft.plan.device import (
    DeviceReply,
    DeviceRequest,
    GetWeight,
    JoinGroup,
    LeaveGroup,
    ReceiveWeights,
    ReleaseMemory,
    ResumeMemory,
    UpdateFromDisk,
    UpdateFromTensors,
)

TAGS = ("weights", "kv_cache")  # kinds of memory


def update_weights_from_disk(engine: ControlTarget, message: UpdateWeightsFromDisk) -> None:
    _update(engine, message, UpdateFromDisk(message.model_path), is_whole=True)


def update_weights_from_tensor(engine: ControlTarget, message: UpdateWeightsFromTensor) -> None:
    _update(engine, message, UpdateFromTensors(message.content))


def update_weights_from_distributed(
    engine: ControlTarget, message: UpdateWeightsFromDistributed
) -> None:
    request = ReceiveWeights(
        message.group_name,
        tuple(message.names),
        tuple(message.dtypes),
        tuple(tuple(shape) for shape in message.shapes),
    )
    _update(engine, message, request)


def _update(
    engine: ControlTarget, message: WeightsUpdate, request: DeviceRequest, *, is_whole: bool = False
) -> None:
    job = Job(
        request,
        _answer(message.call),
        weight_version=message.weight_version,
        aborts=message.abort_all_requests,
        is_whole=is_whole,
    )
    engine.device.ask(job)


def init_weights_update_group(engine: ControlTarget, message: InitWeightsUpdateGroup) -> None:
    request = JoinGroup(
        name=message.group_name,
        host=message.master_address,
        port=message.master_port,
        rank=message.rank_offset,
        world_size=message.world_size,
        backend=message.backend,
        timeout_s=message.timeout_s,
    )
    engine.device.ask(Job(request, _answer(message.call)))


def destroy_weights_update_group(engine: ControlTarget, message: DestroyWeightsUpdateGroup) -> None:
    engine.device.ask(Job(LeaveGroup(message.group_name), _answer(message.call)))


def release_memory_occupation(engine: ControlTarget, message: ReleaseMemoryOccupation) -> None:
    request = ReleaseMemory(_tags(message.tags))
    engine.device.ask(Job(request, _answer(message.call), needs_idle=True))


def resume_memory_occupation(engine: ControlTarget, message: ResumeMemoryOccupation) -> None:
    engine.device.ask(Job(ResumeMemory(_tags(message.tags)), _answer(message.call)))


def get_weights_by_name(engine: ControlTarget, message: GetWeightsByName) -> None:
    def answer(engine: device_jobs.Engine, reply: DeviceReply, num_hit: int) -> ControlReply:
        return GetWeightsByNameReply(
            call=message.call,
            success=reply.ok,
            shape=list(reply.shape),
            values=reply.values,
            message=reply.message,
            status=_status(reply),
        )

    engine.device.ask(Job(GetWeight(message.name, message.truncate_size), answer))


def _answer(call: int) -> Answer:
    """The reply to a change of weights or memory, from that of the device."""

    def answer(engine: device_jobs.Engine, reply: DeviceReply, num_hit: int) -> ControlReply:
        return WeightsReply(
            call=call,
            success=reply.ok,
            weight_version=engine.device.weight_version,
            message=reply.message,
            status=_status(reply),
            num_tensors=reply.num_tensors,
            num_bytes=reply.num_bytes,
            num_paused_requests=num_hit,
            released=list(reply.released),
        )

    return answer


def _tags(asked: list[str] | None) -> tuple[str, ...]:
    return TAGS if asked is None else tuple(asked)


def _status(reply: DeviceReply) -> int:
    return 200 if reply.ok else reply.status
