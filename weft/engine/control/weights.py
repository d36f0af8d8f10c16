"""Handlers of control requests about weights, adapters and memory.

Each becomes a job for the device, and is answered when the job is done (`device_jobs.py`). This
module sees no tensor.
"""

from __future__ import annotations

from weft.engine.device_jobs import Answer, DeviceJob, JobResult
from weft.engine.services import Services
from weft.messages.adapters import AdapterReply, LoadLoraAdapter, UnloadLoraAdapter
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


def update_weights_from_disk(services: Services, message: UpdateWeightsFromDisk) -> None:
    _update(services, message, UpdateFromDisk(message.model_path), from_checkpoint=True)


def update_weights_from_tensor(services: Services, message: UpdateWeightsFromTensor) -> None:
    _update(services, message, UpdateFromTensors(message.content))


def update_weights_from_distributed(
    services: Services, message: UpdateWeightsFromDistributed
) -> None:
    request = ReceiveWeights(
        message.group_name,
        tuple(message.names),
        tuple(message.dtypes),
        tuple(tuple(shape) for shape in message.shapes),
    )
    _update(services, message, request)


def _update(
    services: Services,
    message: WeightsUpdate,
    request: DeviceRequest,
    *,
    from_checkpoint: bool = False,
) -> None:
    job = DeviceJob(
        request,
        _answer(message.call),
        weight_version=message.weight_version,
        aborts=message.abort_all_requests,
        from_checkpoint=from_checkpoint,
    )
    services.device_jobs.submit(job)


def init_weights_update_group(services: Services, message: InitWeightsUpdateGroup) -> None:
    request = JoinGroup(
        name=message.group_name,
        host=message.master_address,
        port=message.master_port,
        rank=message.rank_offset,
        world_size=message.world_size,
        backend=message.backend,
        timeout_s=message.timeout_s,
    )
    services.device_jobs.submit(DeviceJob(request, _answer(message.call)))


def destroy_weights_update_group(services: Services, message: DestroyWeightsUpdateGroup) -> None:
    services.device_jobs.submit(DeviceJob(LeaveGroup(message.group_name), _answer(message.call)))


def release_memory_occupation(services: Services, message: ReleaseMemoryOccupation) -> None:
    request = ReleaseMemory(_tags(message.tags))
    services.device_jobs.submit(DeviceJob(request, _answer(message.call), needs_idle=True))


def resume_memory_occupation(services: Services, message: ResumeMemoryOccupation) -> None:
    services.device_jobs.submit(DeviceJob(ResumeMemory(_tags(message.tags)), _answer(message.call)))


def get_weights_by_name(services: Services, message: GetWeightsByName) -> None:
    def answer(result: JobResult) -> ControlReply:
        reply = result.reply
        return GetWeightsByNameReply(
            call=message.call,
            success=reply.ok,
            shape=list(reply.shape),
            values=reply.values,
            message=reply.message,
            status=_status(reply),
        )

    services.device_jobs.submit(DeviceJob(GetWeight(message.name, message.truncate_size), answer))


def _answer(call: int) -> Answer:
    """The reply to a change of weights or memory, from that of the device."""

    def answer(result: JobResult) -> ControlReply:
        reply = result.reply
        return WeightsReply(
            call=call,
            success=reply.ok,
            weight_version=result.weight_version,
            message=reply.message,
            status=_status(reply),
            num_tensors=reply.num_tensors,
            num_bytes=reply.num_bytes,
            num_paused_requests=result.num_requests,
            released=list(reply.released),
        )

    return answer


def _tags(asked: list[str] | None) -> tuple[str, ...]:
    return TAGS if asked is None else tuple(asked)


def _status(reply: DeviceReply) -> int:
    return 200 if reply.ok else reply.status


def load_lora_adapter(services: Services, message: LoadLoraAdapter) -> AdapterReply | None:
    return services.adapters.load(message)


def unload_lora_adapter(services: Services, message: UnloadLoraAdapter) -> AdapterReply | None:
    return services.adapters.unload(message)
