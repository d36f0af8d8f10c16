"""What requests get that do not give sampling parameters: the model's own, in every API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.server.fake import HANG_S, MODEL, RunningServer, running
from weft.messages.sampling import SamplingParams

DEFAULTS = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
}
MESSAGES = [{"role": "user", "content": "x"}]
ASK: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 2}},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 2},
    "/api/chat": {"model": MODEL, "messages": MESSAGES, "stream": False},
    "/api/generate": {"model": MODEL, "prompt": "x", "stream": False},
}


@pytest.fixture(scope="module")
def recommended() -> Iterator[RunningServer]:
    with running(sampling=msgspec.structs.replace(SamplingParams(), **DEFAULTS)) as server:
        yield server


@pytest.fixture
def client(recommended: RunningServer) -> Iterator[httpx.Client]:
    recommended.reset()
    with httpx.Client(base_url=recommended.url, timeout=HANG_S) as client:
        yield client


def sampled(server: RunningServer) -> dict[str, Any]:
    """The sampling that the engine was given last."""
    return {name: getattr(server.engine.seen[-1].sampling, name) for name in DEFAULTS}


@pytest.mark.parametrize("path", ASK)
def test_every_api_takes_the_models_sampling_where_a_request_says_nothing(
    client: httpx.Client, recommended: RunningServer, path: str
) -> None:
    assert client.post(path, json=ASK[path]).status_code == 200
    assert sampled(recommended) == DEFAULTS


@pytest.mark.parametrize("path", ASK)
def test_a_value_in_a_request_overrides_the_model_even_if_it_is_the_default_of_the_api(
    client: httpx.Client, recommended: RunningServer, path: str
) -> None:
    body = dict(ASK[path])
    said = {"temperature": 1.0, "top_p": 1.0}
    if path == "/generate":
        body["sampling_params"] = {**body["sampling_params"], **said}
    elif path.startswith("/api/"):
        body["options"] = said
    else:
        body |= said
    assert client.post(path, json=body).status_code == 200
    assert sampled(recommended) == DEFAULTS | said


def test_the_server_tells_them(client: httpx.Client) -> None:
    assert client.get("/server_info").json()["sampling_defaults"] == DEFAULTS


def test_a_response_tells_what_was_used(client: httpx.Client) -> None:
    answer = client.post("/v1/responses", json=ASK["/v1/responses"]).json()
    assert answer["temperature"] == 0.6
    assert answer["top_p"] == 0.95
