"""A browser and a server for all tests of the live page; without a browser they are skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from tests.e2e.server import Server
from tests.page.browser import SIZE, BrowserThread, Watched, find
from tests.server.fake import RunningServer, running
from tests.server.pictured import pictured
from weft.config.server import ServerConfig

MCP_ORIGIN = "http://tools.test:8000"  # a server that only routes of a test answer for
SMALL = ("--kv-tokens", "8192", "--max-running-requests", "4", "--threads", "1")

Look = Callable[..., Watched]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that looks at pages runs in the browser's thread."""
    thread = pyfuncitem.funcargs.get("browser")
    if not isinstance(thread, BrowserThread):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    thread.do(lambda: pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="session")
def browser() -> Iterator[BrowserThread]:
    path = find()
    if path is None or find_spec("playwright") is None:
        pytest.skip("there is no browser: apt install chromium, pip install playwright")
    thread = BrowserThread(path)
    yield thread
    thread.end()


@pytest.fixture(scope="package")
def server(browser: BrowserThread) -> Iterator[Server]:
    """The bundled model, with four rows."""
    server = Server("weft-nano", small=SMALL)
    yield server
    server.stop()


@pytest.fixture(scope="package")
def film(browser: BrowserThread) -> Iterator[str]:
    """The page over a simulated run."""
    command = [sys.executable, "-m", "weft", "sim", "--requests", "30", "--rate", "20", "--page"]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        found = re.search(r"pictures, of each step: (http://\S+)", line)
        if found is not None:
            url = found[1]
            break
    yield url
    process.terminate()
    process.wait()
    process.stdout.close()


@pytest.fixture
def look(browser: BrowserThread) -> Iterator[Look]:
    """Opens a page of a server; at the end none has complained, or asked anybody else."""
    opened: list[Watched] = []

    def look(url: str, size: dict[str, int] = SIZE, scheme: str = "light") -> Watched:
        tab = browser.tab()
        tab.set_viewport_size(size)
        tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        opened.append(Watched(tab, url))
        return opened[-1].open()

    def leave() -> None:
        for page in opened:
            page.leave()
            browser.tabs.append(page.page)

    yield look
    browser.do(leave)
    for page in opened:
        page.check()


@pytest.fixture(scope="package")
def quick(browser: BrowserThread) -> Iterator[RunningServer]:
    """A server whose engine answers at once, for tests of the page alone."""
    with running(ServerConfig(drain_s=1.0, page_mcp_origins=MCP_ORIGIN)) as server:
        pictured(server)
        yield server
