"""Ollama's routes that show and change the models on the server's machine: true values, streamed
progress, and only for who may administer the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.fake import HANG_S, MODEL, RunningServer, running
from tests.server.fake_catalog import DIGEST, OTHER, FakeCatalog
from weft.config.server import ServerConfig
from weft.server.context import ModelFacts
from weft.server.ollama import library


@pytest.fixture
def catalog() -> FakeCatalog:
    return FakeCatalog()


@pytest.fixture
def http(catalog: FakeCatalog) -> Iterator[httpx.Client]:
    facts = ModelFacts(folder="/served", size_bytes=7)
    with (
        running(facts=facts, catalog=catalog) as server,
        httpx.Client(base_url=server.url, timeout=HANG_S) as client,
    ):
        yield client


def lines(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_pull_is_a_stream_of_its_progress(http: httpx.Client, catalog: FakeCatalog) -> None:
    found = lines(http.post("/api/pull", json={"model": "org/new:Q4_K_M"}))
    assert found[0] == {"status": "pulling manifest"}
    assert found[-1] == {"status": "success"}
    assert found[-2]["digest"] == f"sha256:{DIGEST}"
    assert (found[-2]["completed"], found[-2]["total"]) == (100, 100)
    assert catalog.calls == [("pull", "org/new:Q4_K_M")]


def test_a_pull_may_be_one_object(http: httpx.Client, catalog: FakeCatalog) -> None:
    answer = http.post("/api/pull", json={"name": "org/new", "stream": False})
    assert (answer.status_code, answer.json()) == (200, {"status": "success"})
    catalog.fails = "org/new is gated"
    answer = http.post("/api/pull", json={"name": "org/new", "stream": False})
    assert (answer.status_code, answer.json()["error"]) == (400, "org/new is gated")


def test_an_error_is_the_last_line_of_a_stream(http: httpx.Client, catalog: FakeCatalog) -> None:
    catalog.fails = "the disk is full"
    found = lines(http.post("/api/pull", json={"model": "org/new"}))
    assert found[-1] == {"error": "the disk is full"}


def test_a_pull_that_nobody_reads_stops(http: httpx.Client, catalog: FakeCatalog) -> None:
    catalog.waits = True
    with http.stream("POST", "/api/pull", json={"model": "org/new"}) as answer:
        assert json.loads(next(answer.iter_lines())) == {"status": "pulling manifest"}
    assert catalog.was_stopped.wait(HANG_S)


def test_only_some_models_are_pulled_at_once(
    http: httpx.Client, catalog: FakeCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MAX_PULLS", 1)
    catalog.waits = True
    with http.stream("POST", "/api/pull", json={"model": "org/new"}) as answer:
        came = answer.iter_lines()  # while it lives, the connection does
        next(came)
        refused = http.post("/api/pull", json={"model": "org/more"})
        assert refused.status_code == 429
    told = http.get(f"/requests/{refused.headers['x-request-id']}").json()
    assert [(one["path"], one["status"]) for one in told["refused"]] == [("/api/pull", 429)]


def test_models_are_copied_and_removed(http: httpx.Client, catalog: FakeCatalog) -> None:
    body = {"source": OTHER.name, "destination": "mine"}
    assert http.post("/api/copy", json=body).status_code == 200
    answer = http.request("DELETE", "/api/delete", json={"model": OTHER.name})
    assert answer.status_code == 200
    assert catalog.calls == [("copy", OTHER.name, "mine"), ("delete", OTHER.name)]
    for path, body in (("copy", {"source": "x", "destination": "y"}), ("delete", {"name": "x"})):
        method = "POST" if path == "copy" else "DELETE"
        answer = http.request(method, f"/api/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]) == (404, "there is no model 'x' here")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "pull"), ("POST", "copy"), ("DELETE", "delete")]
)
def test_a_body_without_a_name_is_refused(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, f"/api/{path}", json={})
    assert answer.status_code == 400
    assert "must name a model" in answer.json()["error"]


def test_the_served_model_has_its_digest(http: httpx.Client) -> None:
    for path in ("tags", "ps"):
        [model] = http.get(f"/api/{path}").json()["models"]
        assert (model["name"], model["digest"], model["size"]) == (MODEL, DIGEST, 7)


def test_a_model_that_is_not_served_is_shown_as_its_files_say(http: httpx.Client) -> None:
    found = http.post("/api/show", json={"model": OTHER.name}).json()
    assert found["details"]["parameter_size"] == "596.05M"
    assert found["details"]["quantization_level"] == "Q4_K_M"
    assert found["model_info"]["qwen3.context_length"] == 40_960
    assert (found["template"], found["license"], found["digest"]) == ("{{ x }}", "mit", DIGEST)
    assert http.post("/api/show", json={"model": MODEL}).json()["details"]["family"] == ""
    assert http.post("/api/show", json={"name": "x"}).status_code == 404


def test_changes_need_the_administration_key(catalog: FakeCatalog) -> None:
    config = ServerConfig(api_key="sk-user", admin_api_key="sk-admin")
    with (
        running(config, catalog=catalog) as server,
        httpx.Client(base_url=server.url, timeout=HANG_S) as client,
    ):
        requests = [
            ("POST", "/api/pull", {"model": "org/new", "stream": False}),
            ("POST", "/api/copy", {"source": OTHER.name, "destination": "mine"}),
            ("DELETE", "/api/delete", {"model": OTHER.name}),
        ]
        for method, path, body in requests:
            for key, status in (("sk-user", 403), ("sk-wrong", 401), ("sk-admin", 200)):
                headers = {"authorization": f"Bearer {key}"}
                answer = client.request(method, path, json=body, headers=headers)
                assert answer.status_code == status, (path, key)
    assert len(catalog.calls) == 3


def test_a_server_without_a_store_says_so(server: RunningServer) -> None:
    answer = httpx.post(f"{server.url}/api/pull", json={"model": "org/new"}, timeout=HANG_S)
    assert answer.status_code == 501
