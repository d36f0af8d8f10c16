"""`/v1/files`, `/v1/batches` and `/v1/messages/batches`, with the clients of their APIs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.server.fake import HANG_S, MODEL, RunningServer, eventually, running
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.state.store import StateStore

ALICE = "alice-secret"
BOB = "bob-secret"
CHAT = "/v1/chat/completions"


def lines(num: int, path: str = CHAT) -> bytes:
    found = []
    for index in range(num):
        body = {"messages": [{"role": "user", "content": f"{index}"}], "max_tokens": 3}
        found.append({"custom_id": f"c{index}", "method": "POST", "url": path, "body": body})
    return "\n".join(map(json.dumps, found)).encode()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys"
    keys.write_text(f"@alice {ALICE}\n@bob {BOB}\n")
    config = ServerConfig(state_dir=str(folder / "state"), api_key_file=str(keys), drain_s=1.0)
    with running(config) as server:
        yield server


def openai_of(server: RunningServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=HANG_S)


def test_a_batch_of_openai_from_file_to_results(keyed: RunningServer) -> None:
    client = openai_of(keyed, ALICE)
    data = lines(20) + b"\nnot a line\n"
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    assert file.bytes == len(data)
    assert file.filename == "in.jsonl"
    assert file.purpose == "batch"
    assert client.files.content(file.id).content == data
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"of": "us"},
    )
    assert eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert counts.total == 21
    assert counts.completed == 20
    assert counts.failed == 1
    assert batch.metadata == {"of": "us"}
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    answered = client.files.content(batch.output_file_id).text.splitlines()
    ids = [json.loads(one)["custom_id"] for one in answered]
    assert sorted(ids) == sorted(f"c{index}" for index in range(20))
    first = json.loads(answered[0])["response"]
    assert first["status_code"] == 200
    assert first["body"]["choices"][0]["message"]["content"]
    errors = client.files.content(batch.error_file_id).text
    assert "this line cannot be read" in errors
    assert all(one.background for one in keyed.engine.seen)
    assert [one.id for one in client.batches.list()] == [batch.id]
    assert {one.id for one in client.files.list(purpose="batch")} == {file.id}
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_batch_of_messages_from_requests_to_results(keyed: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=keyed.url, api_key=ALICE, max_retries=0, timeout=HANG_S)
    params = {
        "model": MODEL,
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "a"}],
    }
    wrong = {**params, "max_tokens": -4}
    batch = client.messages.batches.create(
        requests=[
            {"custom_id": "good", "params": params},  # type: ignore[typeddict-item]
            {"custom_id": "wrong", "params": wrong},  # type: ignore[typeddict-item]
        ]
    )

    def has_ended() -> bool:
        return client.messages.batches.retrieve(batch.id).processing_status == "ended"

    assert eventually(has_ended)
    batch = client.messages.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert counts.succeeded == 1
    assert counts.errored == 1
    assert counts.processing == 0
    found = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    assert found["good"].type == "succeeded"
    assert found["wrong"].type == "errored"
    assert [one.id for one in client.messages.batches.list()] == [batch.id]
    client.messages.batches.delete(batch.id)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_files_and_batches_of_another_key_are_unknown(keyed: RunningServer) -> None:
    alice = openai_of(keyed, ALICE)
    bob = openai_of(keyed, BOB)
    file = alice.files.create(file=("in.jsonl", lines(1)), purpose="batch")
    batch = alice.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    for ask in (
        lambda: bob.files.retrieve(file.id),
        lambda: bob.files.content(file.id),
        lambda: bob.files.delete(file.id),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert list(bob.files.list()) == []
    assert list(bob.batches.list()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"endpoint": "/v1/images"}, "endpoint is '/v1/images'"),
        ({"completion_window": "soon"}, "completion_window is 'soon'"),
        ({"input_file_id": "file-0"}, "there is no file 'file-0'"),
        ({"metadata": {str(one): "" for one in range(17)}}, "metadata has 17 pairs"),
        ({"output_expires_after": {"seconds": 5}}, "seconds is 5"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_by_name(
    keyed: RunningServer, change: dict[str, object], words: str
) -> None:
    client = openai_of(keyed, ALICE)
    file = client.files.create(file=("in.jsonl", lines(1)), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **change}
    answer = httpx.post(
        f"{keyed.url}/v1/batches", json=body, headers={"authorization": f"Bearer {ALICE}"}
    )
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("files", "data", "status", "words"),
    [
        (None, {"purpose": "batch"}, 415, "multipart/form-data"),
        ({"other": b"x"}, {"purpose": "batch"}, 400, "the form has no file"),
        ({"file": b"x"}, {"purpose": "fine-tune"}, 400, "purpose is 'fine-tune'"),
        ({"file": b"x"}, {}, 400, "purpose is None"),
        (
            {"file": b"x"},
            {"purpose": "batch", "expires_after[seconds]": "7"},
            400,
            "expires_after[seconds] is '7'",
        ),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(
    keyed: RunningServer,
    files: dict[str, bytes] | None,
    data: dict[str, str],
    status: int,
    words: str,
) -> None:
    headers = {"authorization": f"Bearer {ALICE}"}
    answer = httpx.post(f"{keyed.url}/v1/files", files=files, data=data, headers=headers)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


LIMITS: dict[str, Any] = {
    "max_file_mb": 0.001,
    "max_files": 1,
    "max_batch_lines": 2,
    "max_open_batches": 1,
}


def begin_two(client: openai.OpenAI) -> None:
    for _ in range(2):
        file = client.files.create(file=("in.jsonl", lines(3) + b" " * 900), purpose="batch")
        client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )


@pytest.mark.parametrize("limit", LIMITS)
def test_what_exceeds_a_limit_is_refused_and_counted(limit: str) -> None:
    limits = replace(Limits(), **{limit: LIMITS[limit]})
    with running(limits=limits) as server:
        server.engine.hold = True
        client = openai_of(server, "none")
        with pytest.raises(openai.APIStatusError) as refused:
            begin_two(client)
        assert refused.value.status_code == (413 if limit == "max_file_mb" else 400)
        metrics = httpx.get(f"{server.url}/metrics").text
        assert f'weft:refused_total{{limit="{limit}"}} 1' in metrics


def test_batches_go_on_with_the_next_server(tmp_path: Path) -> None:
    config = ServerConfig(state_dir=str(tmp_path), drain_s=1.0)
    with running(config) as server:
        server.engine.hold = True
        client = openai_of(server, "none")
        file = client.files.create(file=("in.jsonl", lines(9)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    with running(config) as server:
        client = openai_of(server, "none")
        assert eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        assert ended.output_file_id is not None
        assert len(client.files.content(ended.output_file_id).text.splitlines()) == 9


def test_files_and_batches_stay_when_a_full_disk_is_emptied_of_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = StateStore._commit
    begin_anew = StateStore._begin_anew
    full = [False]

    def commit_with_room(self: StateStore, writes: Any) -> None:
        if full[0]:
            raise sqlite3.OperationalError("database or disk is full")
        commit(self, writes)

    def begin_with_room(self: StateStore) -> bool:
        full[0] = False
        return begin_anew(self)

    monkeypatch.setattr(StateStore, "_commit", commit_with_room)
    monkeypatch.setattr(StateStore, "_begin_anew", begin_with_room)
    config = ServerConfig(state_dir=str(tmp_path), drain_s=1.0)
    with running(config) as server:
        client = openai_of(server, "none")
        file = client.files.create(file=("in.jsonl", lines(2)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        assert eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
        full[0] = True
        body = {"input": "a", "max_output_tokens": 16}
        assert httpx.post(f"{server.url}/v1/responses", json=body).status_code == 503
        cleared = httpx.post(f"{server.url}/state/clear", json={})
        assert (cleared.status_code, full[0]) == (200, False), cleared.text
    with running(config) as server:
        client = openai_of(server, "none")
        assert client.files.content(file.id).content == lines(2)
        ended = client.batches.retrieve(batch.id)
        assert ended.output_file_id is not None
        assert len(client.files.content(ended.output_file_id).text.splitlines()) == 2
