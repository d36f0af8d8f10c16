"""The live page with servers of the Model Context Protocol in processes of their own: one written
after the specification, and one by the Python package `mcp`, with the Python that MCP_PYTHON names
or this one, if it has the package."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import HANG_S
from tests.page.browser import BrowserThread, Watched
from tests.page.conftest import Look
from tests.page.talk import answers, call, say
from tests.server.fake import RunningServer, running
from tests.server.pictured import pictured
from weft.config.server import ServerConfig

HERE = Path(__file__).parent
PYTHONS = {"written": sys.executable, "package": os.environ.get("MCP_PYTHON", sys.executable)}
UNREACHED = "cannot be reached, or does not allow this page"


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class Tools:
    """A server with tools, in a process that ends and comes back."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.port = free_port()
        self.origin = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *origins: str) -> None:
        words = [PYTHONS[self.kind], str(HERE / f"mcp_{self.kind}.py"), str(self.port), *origins]
        self._process = subprocess.Popen(words)
        deadline = time.monotonic() + HANG_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                assert self._process.poll() is None
                time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module", params=["written", "package"])
def tools(request: pytest.FixtureRequest, browser: BrowserThread) -> Iterator[Tools]:
    if request.param == "package":
        has = subprocess.run([PYTHONS["package"], "-c", "import mcp.server.mcpserver"], check=False)
        if has.returncode:
            pytest.skip("there is no package mcp: pip install 'mcp>=2', or MCP_PYTHON")
    tools = Tools(request.param)
    yield tools
    tools.stop()


@pytest.fixture(scope="module")
def near(tools: Tools) -> Iterator[RunningServer]:
    """A server whose page may reach the tools."""
    with running(ServerConfig(drain_s=1.0, page_mcp_origins=tools.origin)) as server:
        pictured(server)
        yield server


def connected(page: Watched, tools: Tools) -> Watched:
    page.outside_allowed.append(tools.origin)
    page.page.click("#chat-more")
    page.page.fill("#mcp-url", f"{tools.origin}/mcp")
    page.page.press("#mcp-url", "Enter")
    return page


def called(page: Watched, name: str, given: dict[str, object], button: str) -> None:
    """Let the model call a tool, and decide about the call."""
    answers(page, call(name, given), end="tool_calls")
    say(page, f"use {name}")
    page.see(".call-form b", name)
    page.page.click(f".call-form button:text-is('{button}')")


def told_result(page: Watched, name: str, given: dict[str, object]) -> str:
    """What the model is told about an allowed call."""
    answers(page, call(name, given), end="tool_calls")
    say(page, f"use {name}")
    page.see(".call-form b", name)
    words = f"That was message {page.page.locator('#log article').count()}."
    asked = answers(page, {"content": words})
    page.page.click(".call-form button:text-is('Allow this call')")
    page.see(".it .md", words)
    page.see("#send")
    return str(asked[-1]["messages"][-1]["content"])


def test_tools_are_listed_called_and_fail_and_come_back_with_their_server(
    tools: Tools, near: RunningServer, look: Look
) -> None:
    tools.start(near.url)
    page = connected(look(near.url).live(), tools)
    page.see("#mcp-list li", "tools: add, fail, wait")
    page.page.click("#chat-more")
    assert told_result(page, "add", {"a": 2, "b": 3}) == "5"
    failed = told_result(page, "fail", {"words": "no such ship"})
    assert failed.startswith("error: ")
    assert "no such ship" in failed
    # A new server knows no session of the one before.
    tools.stop()
    tools.start(near.url)
    page.expected.append("404")
    assert told_result(page, "add", {"a": 20, "b": 30}) == "50"
    tools.stop()
    page.expected.append("ERR_CONNECTION_REFUSED")
    assert told_result(page, "add", {"a": 1, "b": 1}) == f"error: {tools.origin}/mcp {UNREACHED}"
    page.see(".tool pre", UNREACHED)


def test_a_call_that_takes_long_is_ended_by_the_user_and_by_its_server(
    tools: Tools, near: RunningServer, look: Look
) -> None:
    tools.start(near.url)
    page = connected(look(near.url).live(), tools)
    page.see("#mcp-list li", "tools: add, fail, wait")
    page.page.click("#chat-more")
    called(page, "wait", {}, "Allow this call")
    asked = answers(page, {"content": "So be it."})
    page.page.click(".call-form button:text-is('End the call')")
    page.see(".it .md", "So be it.")
    assert "the call was ended by the user" in asked[0]["messages"][-1]["content"]
    if tools.kind == "written":
        assert len(told_result(page, "cancelled", {})) > len("[]")
    called(page, "wait", {}, "Allow this call")
    page.see(".call-form", "runs…")
    asked = answers(page, {"content": "It is gone."})
    page.expected += ["ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION"]
    tools.stop()
    page.see(".it .md", "It is gone.")
    told = asked[0]["messages"][-1]["content"]
    assert told.startswith(f"error: {tools.origin}/mcp ")
    assert "ended" in told or UNREACHED in told


def test_a_server_that_allows_no_other_origin_is_said_to(
    tools: Tools, near: RunningServer, look: Look
) -> None:
    tools.start()
    page = look(near.url).live()
    page.expected += ["blocked by CORS policy", "ERR_FAILED", "400", "405"]
    connected(page, tools)
    page.see("#mcp-list li", UNREACHED)
    tools.stop()
