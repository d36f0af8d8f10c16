"""Handlers of control requests about weights and memory. Each becomes a job for the device, and is answered when that
is done (`device.py`)."""

from __future__ import annotations

from typing import Protocol

from weft.engine import device_jobs as device
from weft.engine.device_jobs import Answer, Device, Job
from weft.messages.codec import FromEngine
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

Update = UpdateWeightsFromDisk | UpdateWeightsFromTensor | UpdateWeightsFromDistributed


class Engine(Protocol):
    """What is needed of `service/engine.py`."""

    device: Device


def update_weights_from_disk(engine: Engine, message: UpdateWeightsFromDisk) -> None:
    _update(engine, message, UpdateFromDisk(message.model_path), is_whole=True)


def update_weights_from_tensor(engine: Engine, message: UpdateWeightsFromTensor) -> None:
    _update(engine, message, UpdateFromTensors(message.content))


def update_weights_from_distributed(engine: Engine, message: UpdateWeightsFromDistributed) -> None:
    shapes = tuple(tuple(shape) for shape in message.shapes)
    request = ReceiveWeights(
        message.group_name, tuple(message.names), tuple(message.dtypes), shapes
    )
    _update(engine, message, request)


def _update(
    engine: Engine, message: Update, request: DeviceRequest, *, is_whole: bool = False
) -> None:
    engine.device.ask(
        Job(
            request,
            _answer(message.call),
            weight_version=message.weight_version,
            aborts=message.abort_all_requests,
            is_whole=is_whole,
        )
    )


def init_weights_update_group(engine: Engine, message: InitWeightsUpdateGroup) -> None:
    request = JoinGroup(
        name=message.group_name,
        host=message.master_address,
        port=message.master_port,
        rank=message.rank,
        world_size=message.world_size,
        backend=message.backend,
        timeout_s=message.timeout_s,
    )
    engine.device.ask(Job(request, _answer(message.call)))


def destroy_weights_update_group(engine: Engine, message: DestroyWeightsUpdateGroup) -> None:
    engine.device.ask(Job(LeaveGroup(message.group_name), _answer(message.call)))


def release_memory_occupation(engine: Engine, message: ReleaseMemoryOccupation) -> None:
    engine.device.ask(
        Job(ReleaseMemory(tuple(message.tags)), _answer(message.call), needs_idle=True)
    )


def resume_memory_occupation(engine: Engine, message: ResumeMemoryOccupation) -> None:
    engine.device.ask(Job(ResumeMemory(tuple(message.tags)), _answer(message.call)))


def get_weights_by_name(engine: Engine, message: GetWeightsByName) -> None:
    def answer(engine: device.Engine, reply: DeviceReply, num_hit: int) -> FromEngine:
        return GetWeightsByNameReply(
            call=message.call,
            success=reply.ok,
            shape=list(reply.shape),
            values=reply.values,
            message=reply.message,
            status=200 if reply.ok else reply.status,
        )

    engine.device.ask(Job(GetWeight(message.name, message.truncate_size), answer))


def _answer(call: int) -> Answer:
    def answer(engine: device.Engine, reply: DeviceReply, num_hit: int) -> FromEngine:
        return WeightsReply(
            call=call,
            success=reply.ok,
            weight_version=engine.device.weight_version,
            message=reply.message,
            status=200 if reply.ok else reply.status,
            num_tensors=reply.num_tensors,
            num_bytes=reply.num_bytes,
            num_requests=num_hit,
            released=list(reply.released),
        )

    return answer
