"""Converts records of earlier versions of weft to records of this version.

Later versions replay a journal. If a message has other field names now, this module reads its
record by the earlier names. The decisions are the same.
    tag of a message               earlier field      field now
    slow_down                      step_s             forward_sleep_time
    set_internal_state             settings           server_args
    init_weights_update_group      rank               rank_offset
    rpc                            method, params     a control request of its own
    (settings of the scheduler)    policy             schedule_policy
                                   max_step_s         max_step_ms
                                   tenant_weights     the same as text, alice=2,bob=0.5
                                   chunked_prefill_size None   -1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from weft.journal.records import Began, CacheFlushed, Record, Submitted
from weft.json_types import JsonObject
from weft.messages.calls import ControlRequest
from weft.messages.control import AbortRequest, ExplainRequest, GetState, LogRequestTimes, SetPolicy

SETTINGS = 4  # index of the settings among the fields of `Began`
POLLED = "g"  # a poll of the barrier of a blocked input. On servers it was always open
SUBMITTED = "m"
BEGAN = "began"

RENAMED = {
    "slow_down": ("step_s", "forward_sleep_time"),
    "set_internal_state": ("settings", "server_args"),
    "init_weights_update_group": ("rank", "rank_offset"),
}


def record_of(data: bytes) -> Record | None:
    """Convert a record that this weft would write differently; None for one that it does not need.

    Raises `msgspec.DecodeError` or ValueError for data that no version of weft has written.
    """
    match msgspec.msgpack.decode(data):
        case [tag, _] if tag == POLLED:
            return None
        case [tag, *began] if tag == BEGAN:
            began[SETTINGS] = _settings(began[SETTINGS])
            return msgspec.convert([BEGAN, *began], Began)
        case [tag, {"type": "rpc", "method": str(method), **fields}] if tag == SUBMITTED:
            return _of_call(method, cast(JsonObject, fields.get("params", {})))
        case [tag, {"type": str(name), **fields}] if tag == SUBMITTED and name in RENAMED:
            before, now = RENAMED[name]
            fields[now] = fields.pop(before, None)
            return msgspec.convert([SUBMITTED, {"type": name, **fields}], Submitted)
    raise ValueError("it has no version")


def _settings(fields: JsonObject) -> JsonObject:
    """The scheduler's settings of version 3 and before, with their current names."""
    now = dict(fields)
    now["schedule_policy"] = now.pop("policy")
    now["max_step_ms"] = round(now.pop("max_step_s") * 1_000, 9)
    weights = [f"{name}={weight!r}" for name, weight in now["tenant_weights"]]
    now["tenant_weights"] = ",".join(weights)
    if now["chunked_prefill_size"] is None:
        now["chunked_prefill_size"] = -1
    if now.get("started_with") is not None:
        now["started_with"] = _settings(now["started_with"])
    return now


def _of_call(method: str, params: JsonObject) -> Record:
    """A call by method name. A call that changed nothing, or was refused, becomes GetState."""
    if method == "flush_cache":
        return CacheFlushed()
    make = _CALLS.get(method)
    if make is None:
        return Submitted(GetState())
    return Submitted(make(params))


_CALLS: dict[str, Callable[[JsonObject], ControlRequest[Any]]] = {
    "set_policy": lambda params: SetPolicy(params.get("policy", "")),
    "abort": lambda params: AbortRequest(params.get("rid"), params.get("all")),
    "trace_request_flow": lambda params: ExplainRequest(params.get("rid", "")),
    "log_request_processing_time": lambda params: LogRequestTimes(params.get("rid", "")),
}
