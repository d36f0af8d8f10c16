from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.fake import HANG_S, RunningServer, running
from weft.config.server import ServerConfig


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    """A server with a fresh fake engine."""
    shared_server.reset()
    return shared_server


@pytest.fixture(scope="session")
def shared_http(shared_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared_server.url, timeout=HANG_S) as client:
        yield client


@pytest.fixture
def http(server: RunningServer, shared_http: httpx.Client) -> httpx.Client:
    return shared_http


@pytest.fixture(scope="session")
def shared_sdk(shared_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0, timeout=HANG_S
    ) as client:
        yield client


@pytest.fixture
def sdk(server: RunningServer, shared_sdk: openai.OpenAI) -> openai.OpenAI:
    return shared_sdk


@pytest.fixture(scope="session")
def shared_tool_server() -> Iterator[RunningServer]:
    with running(
        ServerConfig(drain_s=1.0, tool_call_parser="hermes", reasoning_parser="qwen3")
    ) as server:
        yield server


@pytest.fixture
def tool_server(shared_tool_server: RunningServer) -> RunningServer:
    """A server whose model writes calls as Hermes and reasoning as Qwen 3, with a fresh fake
    engine."""
    shared_tool_server.reset()
    return shared_tool_server


@pytest.fixture
def tool_sdk(tool_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0, timeout=HANG_S
    ) as client:
        yield client
