"""Connections and open files, on systems that allow this many."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import pytest

from weft.config.limits import Limits
from weft.config.options import SettingsError
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
        (256, 10_000, 1_000, 1_000, 1_410),  # raised as far as is needed
        (
            256,
            1_024,
            4_096,
            691,
            1_024,
        ),  # raised as far as can be: 864 files are left for connections
        (100, 300, 4_096, 112, 300),
        (180, 180, 4_096, 16, 180),
        (165, 165, 4, 4, 165),  # few are asked for
        (5_000, 5_000, 1_000, 1_000, 5_000),
    ],
)
def test_connections_leave_room_for_open_files(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int, connections: int, left: int
) -> None:
    system = System(soft, hard)
    monkeypatch.setattr(open_files, "resource", system)
    assert open_files.fit(Limits(max_connections=wanted)).max_connections == connections
    assert system.soft == left
    assert system.hard == hard


@pytest.mark.parametrize("hard", [0, 64, 179])
def test_a_system_with_too_few_open_files_is_refused_by_both_numbers(
    monkeypatch: pytest.MonkeyPatch, hard: int
) -> None:
    monkeypatch.setattr(open_files, "resource", System(min(hard, 40), hard))
    with pytest.raises(
        SettingsError, match=rf"allows {hard} open files \(ulimit -n\), .* at least 180"
    ):
        open_files.fit(Limits())
