"""Records of an earlier weft are read as messages of this one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from weft.journal.earlier import record_of
from weft.journal.records import Began, CacheFlushed, Record, Submitted
from weft.messages.calls import ControlRequest
from weft.messages.control import (
    AbortRequest,
    ExplainRequest,
    GetState,
    SetInternalState,
    SetPolicy,
    SlowDown,
)
from weft.messages.weights import InitWeightsUpdateGroup


def read(record: list[Any]) -> Record | None:
    return record_of(msgspec.msgpack.encode(record))


GROUP = {"master_address": "a", "master_port": 9, "world_size": 2, "group_name": "g"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "slow_down", "step_s": 0.5}, SlowDown(0.5, call=1)),
        ({"type": "set_internal_state", "settings": {"a": 1}}, SetInternalState({"a": 1}, call=1)),
        (
            {"type": "init_weights_update_group", **GROUP, "rank": 1},
            InitWeightsUpdateGroup("a", 9, 1, 2, "g", call=1),
        ),
    ],
)
def test_a_field_with_another_name_now_is_read(
    fields: dict[str, Any], message: ControlRequest[Any]
) -> None:
    assert read(["m", {**fields, "call": 1}]) == Submitted(message)


def test_settings_of_version_3_are_read_by_the_names_of_the_options() -> None:
    settings = {
        "num_pages": 9,
        "page_size": 4,
        "max_running_requests": 2,
        "context_length": 30,
        "vocab_size": 5,
        "policy": "fair",
        "max_step_s": 0.05,
        "tenant_weights": [["a", 2.0], ["b", 0.5]],
        "chunked_prefill_size": None,
        "mixed_chunk": False,
        "aging_s": 0.0,
    }
    changed = {**settings, "policy": "lpm", "started_with": settings}
    began = read(["began", 3, "0.1", 1.0, 0, changed, b""])
    assert isinstance(began, Began)
    now = began.settings
    assert now.schedule_policy == "lpm"
    assert now.max_step_s == 0.05
    assert now.chunk_len is None
    assert now.tenant_shares == {"a": 2.0, "b": 0.5}
    assert now.sized_for.schedule_policy == "fair"


@pytest.mark.parametrize(
    ("method", "params", "record"),
    [
        ("set_policy", {"policy": "lpm"}, Submitted(SetPolicy("lpm"))),
        ("abort", {"rid": "r"}, Submitted(AbortRequest("r"))),
        ("trace_request_flow", {"rid": "r"}, Submitted(ExplainRequest("r"))),
        ("flush_cache", {}, CacheFlushed()),
        ("get_stats", {}, Submitted(GetState())),
        ("no such method", {}, Submitted(GetState())),
    ],
)
def test_a_call_by_name_is_the_request_that_does_the_same(
    method: str, params: dict[str, Any], record: Record
) -> None:
    assert read(["m", {"type": "rpc", "call": 1, "method": method, "params": params}]) == record


def test_what_no_server_decided_by_is_left_out_and_what_none_has_written_is_refused() -> None:
    assert read(["g", True]) is None
    for unknown in (["x", 1], ["m", {"type": "none"}], []):
        with pytest.raises(ValueError, match="no version"):
            read(unknown)
