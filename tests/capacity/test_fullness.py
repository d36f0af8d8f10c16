"""How full a server is, of its knee."""

from __future__ import annotations

import pytest

from weft.cli.doctor import capacity_line
from weft.config.server import ServerConfig
from weft.server.admin.loads import fullness, shared_fullness

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


def test_models_that_share_a_machine_fill_it_by_parts_of_their_knees() -> None:
    idle = [{"gen_throughput": 9.0, "num_running_reqs": 0}]
    busy = [{"gen_throughput": 15.0, "num_running_reqs": 1}]
    assert shared_fullness([(LOADS, 60.0), (busy, 30.0), (idle, 0.0)]) == {
        "output_per_s": 45.0,
        "knee_output_per_s": 60.0,  # of this mix
        "full": 0.75,
    }
    assert shared_fullness([(idle, 60.0)])["full"] == 0.0
    for unknown in ([(LOADS, 60.0), (busy, 0.0)], [(idle, 0.0)], []):
        found = shared_fullness(unknown)
        assert (found["full"], found["knee_output_per_s"]) == (None, None)


def test_doctor_names_the_knee_or_the_command_that_finds_it() -> None:
    assert "weft plan MODEL" in capacity_line(ServerConfig())
    assert "120 output tokens" in capacity_line(ServerConfig(knee_output_per_s=120.0))
