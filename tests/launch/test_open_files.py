"""Connections and open files, in a process of its own: limits cannot be raised again."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "connections", "left"),
    [
        (256, 10_000, 1_000, 1_000, 1_570),  # raised as far as is needed
        (256, 1_024, 4_096, 563, 1_024),  # raised as far as can be: 704 files are left for connections
        (100, 300, 4_096, 1, 300),
        (5_000, 5_000, 1_000, 1_000, 5_000),
    ],
)
def test_case_31_connections_leave_room_for_open_files(
    soft: int, hard: int, wanted: int, connections: int, left: int
) -> None:
    code = (
        "import resource\n"
        "from weft.config.limits import Limits\n"
        "from weft.launch.open_files import fit\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        f"print(fit(Limits(max_connections={wanted})).max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(connections), str(left)]
