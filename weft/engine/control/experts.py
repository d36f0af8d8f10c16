"""Handlers that record which experts tokens get. Each is a job for the device, which counts; no
tensor is seen here."""

from __future__ import annotations

import numpy as np

from weft.engine.device_jobs import DeviceJob, JobResult
from weft.engine.services import Services
from weft.messages.calls import ControlReply
from weft.messages.control import (
    DumpExpertDistributionRecord,
    ExpertDistributionReply,
    ExpertRecordReply,
    StartExpertDistributionRecord,
    StopExpertDistributionRecord,
)
from weft.plan.device import RecordExperts


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


def dump_record(services: Services, message: DumpExpertDistributionRecord) -> None:
    def answer(result: JobResult) -> ControlReply:
        reply = result.reply
        if not reply.ok:
            return ExpertDistributionReply(
                call=message.call,
                success=False,
                message=reply.message,
                status=reply.status,
            )
        prefill, decode = np.frombuffer(reply.values, np.int64).reshape(reply.shape).tolist()
        return ExpertDistributionReply(
            call=message.call,
            success=True,
            layers=list(reply.layers),
            prefill=prefill,
            decode=decode,
            file=reply.file,
        )

    services.device_jobs.submit(DeviceJob(RecordExperts("dump"), answer))
