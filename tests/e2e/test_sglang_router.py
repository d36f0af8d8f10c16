"""Two servers behind sglang-router, where that is installed: in this environment, or in that of the
interpreter which `SGLANG_ROUTER_PYTHON` names."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.handoff_proof import free_port
from tests.e2e.server import HANG_S, Server, wait_until

PYTHON = os.environ.get("SGLANG_ROUTER_PYTHON", "")
if not PYTHON and importlib.util.find_spec("sglang_router"):
    PYTHON = sys.executable
pytestmark = pytest.mark.skipif(not PYTHON, reason="sglang-router is not installed")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server, int]]:
    """One that computes prompts and one that continues them; alone, each serves whole requests. And
    the port of the first for KV."""
    port = free_port()
    options = ("weft-nano", "--disaggregation-bootstrap-port", str(port))
    first = Server(*options, "--disaggregation-mode", "prefill")
    second = Server(*options, "--disaggregation-mode", "decode")
    yield first, second, port
    first.stop()
    second.stop()


@contextmanager
def router(*options: str) -> Iterator[str]:
    """The address of a router with these options, which has found its servers."""
    port = free_port()
    command = [PYTHON, "-m", "sglang_router.launch_router", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--prometheus-port", str(free_port()), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        assert wait_until(lambda: process.poll() is not None or is_ready(url))
        assert process.poll() is None, "the router has ended"
        yield url
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readiness", timeout=HANG_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def complete(url: str, prompt: str) -> str:
    body = {"model": "weft-nano", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def num_served(server: Server) -> int:
    stats = server.load()["stats"]
    return int(stats["total_requests"])


def test_round_robin_gives_each_server_its_share(servers: tuple[Server, Server, int]) -> None:
    first, second, _ = servers
    before = num_served(first), num_served(second)
    options = ("--worker-urls", first.url, second.url, "--policy", "round_robin")
    with router(*options) as url:
        prompts = [f"def f{i}(" for i in range(8)]
        through = [complete(url, prompt) for prompt in prompts]
    assert through == [complete(first.url, prompt) for prompt in prompts]
    shares = num_served(first) - before[0] - 8, num_served(second) - before[1]
    assert shares == (4, 4)


def test_cache_aware_sends_a_conversation_where_its_beginning_is(
    servers: tuple[Server, Server, int],
) -> None:
    first, second, _ = servers
    options = ("--worker-urls", first.url, second.url, "--policy", "cache_aware")
    with router(*options) as url:
        beginning = "import os, sys, json, time, random, socket, threading\n" * 3
        complete(url, beginning)
        before = [server.load()["stats"]["total_cached_tokens"] for server in (first, second)]
        for turn in range(4):
            complete(url, f"{beginning}x = {turn}\n")
        after = [server.load()["stats"]["total_cached_tokens"] for server in (first, second)]
    hits = [now - then for now, then in zip(after, before, strict=True)]
    assert min(hits) == 0, "one server alone gets it"
    assert max(hits) > 4 * 32


def test_prefill_and_decode_give_the_answer_of_one_server(
    servers: tuple[Server, Server, int],
) -> None:
    first, second, port = servers
    options = (
        *("--pd-disaggregation", "--prefill", first.url, str(port), "--decode", second.url),
        *("--policy", "random"),
    )
    prompt = "import os\nimport sys\n\n\ndef main(argv):\n" * 4
    before = second.load()["stats"]["total_handoff_tokens"]
    with router(*options) as url:
        through = complete(url, prompt)
    assert second.load()["stats"]["total_handoff_tokens"] > before
    second.post("/flush_cache")
    assert through == complete(second.url, prompt)
