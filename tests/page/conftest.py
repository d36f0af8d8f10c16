"""A browser and a server for all tests of the live page; without a browser they are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.page.browser import Watched, find, started

SMALL = ("--kv-tokens", "8192", "--max-running-requests", "4", "--threads", "1")

Look = Callable[..., Watched]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = find()
    if path is None or find_spec("playwright") is None:
        pytest.skip("there is no browser: apt install chromium, pip install playwright")
    with started(path) as browser:
        yield browser


@pytest.fixture(scope="package")
def server(browser: Any) -> Iterator[Server]:
    """The bundled model, with four rows."""
    server = Server("weft-nano", small=SMALL)
    yield server
    server.stop()


@pytest.fixture
def look(browser: Any) -> Iterator[Look]:
    """Opens a page of a server; at the end none has complained, or asked anybody else."""
    opened: list[Watched] = []
    contexts: list[Any] = []

    def look(url: str, **options: Any) -> Watched:
        values = {"viewport": {"width": 1380, "height": 900}, "reduced_motion": "reduce", **options}
        contexts.append(browser.new_context(**values))
        opened.append(Watched(contexts[-1], url))
        return opened[-1].open()

    yield look
    for page in opened:
        page.check()
    for context in contexts:
        context.close()
