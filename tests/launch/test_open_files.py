"""Connections and open files, on systems that allow this many."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import pytest

from weft.config.limits import Limits
from weft.launch import open_files


@dataclass
class System:
    """The module `resource` of a system with these limits."""

    soft: int
    hard: int
    RLIM_INFINITY = resource.RLIM_INFINITY
    RLIMIT_NOFILE = resource.RLIMIT_NOFILE

    def getrlimit(self, what: int) -> tuple[int, int]:
        assert what == self.RLIMIT_NOFILE
        return self.soft, self.hard

    def setrlimit(self, what: int, limits: tuple[int, int]) -> None:
        assert what == self.RLIMIT_NOFILE
        assert limits[0] <= limits[1] == self.hard, "only root can do that"
        self.soft = limits[0]


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
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int, connections: int, left: int
) -> None:
    system = System(soft, hard)
    monkeypatch.setattr(open_files, "resource", system)
    assert open_files.fit(Limits(max_connections=wanted)).max_connections == connections
    assert (system.soft, system.hard) == (left, hard)
