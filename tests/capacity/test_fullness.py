"""How full a server is, of its knee."""

from __future__ import annotations

import pytest

from weft.cli.doctor import capacity_line
from weft.config.server import ServerConfig
from weft.server.admin.loads import fullness

LOADS = [
    {"gen_throughput": 30.0, "num_running_reqs": 2},
    {"gen_throughput": 50.0, "num_running_reqs": 0},  # it has been idle since
]


def test_goodput_is_compared_with_the_knee_of_all_engines() -> None:
    assert fullness(LOADS, knee_output_per_s=60.0) == {
        "output_per_s": 30.0,
        "knee_output_per_s": 120.0,
        "full": pytest.approx(0.25),
    }


def test_without_a_knee_nothing_is_said_of_fullness() -> None:
    found = fullness(LOADS, knee_output_per_s=0.0)
    assert found["full"] is None
    assert found["knee_output_per_s"] is None


def test_doctor_names_the_knee_or_the_command_that_finds_it() -> None:
    assert "weft plan MODEL" in capacity_line(ServerConfig())
    assert "120 output tokens" in capacity_line(ServerConfig(knee_output_per_s=120.0))
