from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.shared import KEY, Api
from tests.e2e.server import Server


@pytest.fixture(scope="session")
def api() -> Iterator[Api]:
    """One real server for all clients: the bundled model, behind a key."""
    server = Server("--api-key", KEY, "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    yield Api(server.url)
    server.stop()
