"""The input of a server opens with a ramp after its start."""

from __future__ import annotations

import pytest

from tests.e2e.server import Server, wait_until
from tests.seeds import slow

RAMP_S = 3600.0  # no test waits for its end


@pytest.mark.parametrize("num_engines", [2, *slow([1])])
def test_a_server_starts_with_a_ramp(num_engines: int) -> None:
    server = Server("--start-ramp-s", str(RAMP_S), "--dp-size", str(num_engines))
    try:
        wait_until(lambda: server.get("/requests")["queue"]["input_state"] == "ramping")
        told = server.get("/requests")["queue"]
        assert told["input_state"] == "ramping"
        assert RAMP_S - 600 < told["ramp_left_s"] <= RAMP_S
        server.post("/unblock")
        assert wait_until(lambda: server.get("/requests")["queue"]["input_state"] == "unblocked")
    finally:
        server.stop()
