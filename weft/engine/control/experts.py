"""Handlers that count the tokens of each expert. Each is a job for the device, which counts; this
module sees no tensor."""

from __future__ import annotations

import numpy as np

from weft.engine.device_jobs import DeviceJob, JobResult
from weft.engine.services import Services
from weft.messages.calls import ControlReply
from weft.messages.control import (
    DumpExpertDistributionRecord,
    ExpertDistributionReply,
    ExpertRecordReply,
    GetExpertDistributionRecord,
    StartExpertDistributionRecord,
    StopExpertDistributionRecord,
)
from weft.plan.device import RecordExperts

NOTHING = (2, 0, 0)  # shape of the counts in a replay, because a journal has none


def start_record(services: Services, message: StartExpertDistributionRecord) -> None:
    _submit(services, message.call, "start")


def stop_record(services: Services, message: StopExpertDistributionRecord) -> None:
    _submit(services, message.call, "stop")


def _submit(services: Services, call: int, action: str) -> None:
    def answer(result: JobResult) -> ControlReply:
        reply = result.reply
        return ExpertRecordReply(
            call=call,
            success=reply.ok,
            message=reply.message,
            status=200 if reply.ok else reply.status,
        )

    services.device_jobs.submit(DeviceJob(RecordExperts(action), answer))


def look_at_record(services: Services, message: GetExpertDistributionRecord) -> None:
    _tell(services, message.call, "look")


def dump_record(services: Services, message: DumpExpertDistributionRecord) -> None:
    _tell(services, message.call, "dump")


def _tell(services: Services, call: int, action: str) -> None:
    """Answer with the counts."""

    def answer(result: JobResult) -> ControlReply:
        reply = result.reply
        if not reply.ok:
            return ExpertDistributionReply(
                call=call,
                success=False,
                message=reply.message,
                status=reply.status,
            )
        shape = reply.shape or NOTHING
        prefill, decode = np.frombuffer(reply.values, np.int64).reshape(shape).tolist()
        return ExpertDistributionReply(
            call=call,
            success=True,
            layers=list(reply.layers),
            prefill=prefill,
            decode=decode,
            file=reply.file,
            is_recording=reply.is_recording,
        )

    job = DeviceJob(RecordExperts(action), answer, is_logged=action != "look")
    services.device_jobs.submit(job)
