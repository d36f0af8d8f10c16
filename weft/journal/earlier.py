"""Records of an earlier weft, as those of this one.

A journal is replayed by later versions: where a message has other names now, its record is read
under the old ones here. What is decided is the same.

    tag of a message               earlier field      field now
    slow_down                      step_s             forward_sleep_time
    set_internal_state             settings           server_args
    init_weights_update_group      rank               rank_offset
    rpc                            method, params     a control request of its own
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from weft.journal.records import CacheFlushed, Record, Submitted
from weft.messages.calls import ControlRequest
from weft.messages.control import AbortRequest, ExplainRequest, GetState, LogRequestTimes, SetPolicy

POLLED = "g"  # the barrier of a blocked input was asked. No server had one that was not open
SUBMITTED = "m"

RENAMED = {
    "slow_down": ("step_s", "forward_sleep_time"),
    "set_internal_state": ("settings", "server_args"),
    "init_weights_update_group": ("rank", "rank_offset"),
}


def record_of(data: bytes) -> Record | None:
    """A record that this weft would not write so; None for one that it does not need.

    Raises `msgspec.DecodeError` or ValueError for what no weft has written.
    """
    match msgspec.msgpack.decode(data):
        case [tag, _] if tag == POLLED:
            return None
        case [tag, {"type": "rpc", "method": str(method), **fields}] if tag == SUBMITTED:
            return _of_call(method, cast(dict[str, Any], fields.get("params", {})))
        case [tag, {"type": str(name), **fields}] if tag == SUBMITTED and name in RENAMED:
            before, now = RENAMED[name]
            fields[now] = fields.pop(before, None)
            return msgspec.convert([SUBMITTED, {"type": name, **fields}], Submitted)
    raise ValueError("it is of no version")


def _of_call(method: str, params: dict[str, Any]) -> Record:
    """A call by name. One that changed nothing, or was refused, is one that asks for the state."""
    if method == "flush_cache":
        return CacheFlushed()
    make = _CALLS.get(method)
    if make is None:
        return Submitted(GetState())
    return Submitted(make(params))


_CALLS: dict[str, Callable[[dict[str, Any]], ControlRequest[Any]]] = {
    "set_policy": lambda params: SetPolicy(params.get("policy", "")),
    "abort": lambda params: AbortRequest(params.get("rid"), params.get("all")),
    "trace_request_flow": lambda params: ExplainRequest(params.get("rid", "")),
    "log_request_processing_time": lambda params: LogRequestTimes(params.get("rid", "")),
}
