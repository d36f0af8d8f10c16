"""Requests about weights: what is refused before the engine hears of it, and what it is told."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.server.fake import RunningServer
from weft.messages.codec import ToEngine, decode_to_engine, encode
from weft.messages.weights import (
    InitWeightsUpdateGroup,
    ReleaseMemoryOccupation,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightsFromTensor,
    WeightsReply,
)
from weft.server.admin.weights import NamedTensor, as_safetensors

NAME = "model.norm.weight"
GROUP = {"master_address": "127.0.0.1", "master_port": 1_000, "rank_offset": 1, "world_size": 2}


@pytest.fixture
def told(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine is told; it answers everything with yes."""
    messages: list[Any] = []

    def send(message: ToEngine) -> None:
        messages.append(decode_to_engine(encode(message)))
        version = getattr(message, "weight_version", None) or "default"
        server.engine.answer(WeightsReply(call=message.call, success=True, weight_version=version))  # type: ignore[union-attr]

    monkeypatch.setattr(server.engine, "send", send)
    return messages


def tensor(**changes: Any) -> dict[str, Any]:
    data = base64.b64encode(np.arange(4, dtype=np.float32).tobytes()).decode()
    return {"name": NAME, "dtype": "float32", "shape": [4], "data": data} | changes


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("update_weights_from_disk", {"model_path": "a", "load_format": "pt"}, "load_format"),
        ("update_weights_from_disk", {"model_path": "a", "weight_version": ""}, "weight_version"),
        ("update_weights_from_disk", {"model_path": "a", "is_async": True}, "is_async"),
        ("update_weights_from_disk", {}, "model_path"),
        (
            "update_weights_from_tensor",
            {"serialized_named_tensors": ["gASV"]},
            "serialized_named_tensors",
        ),
        (
            "update_weights_from_tensor",
            {"named_tensors": [tensor(dtype="int8")]},
            "named_tensors[0]",
        ),
        ("update_weights_from_tensor", {"named_tensors": [tensor(), tensor()]}, "named_tensors[1]"),
        ("update_weights_from_tensor", {"named_tensors": [tensor(shape=[5])]}, "named_tensors[0]"),
        (
            "update_weights_from_tensor",
            {"named_tensors": [tensor(shape=[-2, -2])]},
            "named_tensors[0].shape",
        ),
        (
            "update_weights_from_tensor",
            {"named_tensors": [tensor(shape=[10**12, 10**12])]},
            "named_tensors[0]",
        ),
        (
            "update_weights_from_tensor",
            {"named_tensors": [tensor(data="é" * 24)]},
            "named_tensors[0]",
        ),
        ("init_weights_update_group", {**GROUP, "rank_offset": 0}, "rank_offset"),
        ("init_weights_update_group", {**GROUP, "rank_offset": 2}, "rank_offset"),
        ("init_weights_update_group", {**GROUP, "master_port": 70_000}, "master_port"),
        ("init_weights_update_group", {**GROUP, "master_address": " "}, "master_address"),
        ("init_weights_update_group", {**GROUP, "timeout_s": 0}, "timeout_s"),
        ("get_weights_by_name", {"name": NAME, "truncate_size": 0}, "truncate_size"),
    ],
)
def test_impossible_values_are_refused_by_name(
    http: httpx.Client, told: list[Any], path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = http.post(f"/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not told


def test_tensors_in_json_and_as_safetensors_are_the_same_to_the_engine(
    http: httpx.Client, told: list[Any]
) -> None:
    assert http.post(
        "/update_weights_from_tensor", json={"named_tensors": [tensor()], "weight_version": "v"}
    ).json()
    content = as_safetensors([msgspec.convert(tensor(), NamedTensor)])
    answer = http.post(
        "/update_weights_from_tensor?weight_version=v&abort_all_requests=true",
        content=content,
        headers={"content-type": "application/octet-stream"},
    )
    assert answer.json()["weight_version"] == "v"
    first, second = told
    assert first == UpdateWeightsFromTensor(call=first.call, content=content, weight_version="v")
    assert msgspec.structs.replace(second, call=first.call, abort_all_requests=False) == first
    assert second.abort_all_requests
    assert content[8:].startswith(
        b'{"model.norm.weight":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    )


def test_a_body_of_tensors_has_the_limit_of_bodies(http: httpx.Client, told: list[Any]) -> None:
    answer = http.post(
        "/update_weights_from_tensor",
        content=bytes(17_000_000),
        headers={"content-type": "application/octet-stream"},
    )
    assert answer.status_code == 413
    assert not told


def test_requests_arrive_as_they_were_sent(http: httpx.Client, told: list[Any]) -> None:
    disk = {"model_path": "step-7", "abort_all_requests": True}
    spread = {"names": [NAME], "dtypes": ["bfloat16"], "shapes": [[4]]}
    http.post("/update_weights_from_disk", json=disk).raise_for_status()
    http.post("/init_weights_update_group", json=GROUP).raise_for_status()
    http.post("/update_weights_from_distributed", json=spread).raise_for_status()
    http.post("/release_memory_occupation").raise_for_status()
    update, init, receive, release = told
    assert update == UpdateWeightsFromDisk(call=update.call, **disk)
    assert init == InitWeightsUpdateGroup(
        call=init.call,
        master_address="127.0.0.1",
        master_port=1_000,
        rank_offset=1,
        world_size=2,
        group_name="weight_update_group",
        backend="gloo",
        timeout_s=120.0,
    )
    assert receive == UpdateWeightsFromDistributed(
        call=receive.call, group_name="weight_update_group", **spread
    )
    assert release == ReleaseMemoryOccupation(call=release.call, tags=None)


def test_answers_and_the_model_s_facts_say_which_weights_are_in_use(
    http: httpx.Client, server: RunningServer
) -> None:
    server.call(lambda: setattr(server.client.state, "weight_version", "first"))
    try:
        answer = http.post(
            "/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 2}}
        ).json()
        assert answer["meta_info"]["weight_version"] == "first"
        assert http.get("/model_info").json()["weight_version"] == "first"
    finally:
        server.call(lambda: setattr(server.client.state, "weight_version", "default"))
