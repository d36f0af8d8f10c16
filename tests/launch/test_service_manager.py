"""States that a service manager is told."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.server_process import ServerProcess
from tests.launch.tiny_model import write_tiny_model
from weft.launch.service_manager import READY, STOPPING, notify


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(100)
        monkeypatch.chdir(tmp_path)
        listening.bind("notify")  # the whole path may be too long for a socket
        monkeypatch.setenv("NOTIFY_SOCKET", "notify")
        yield listening


def test_a_state_reaches_the_socket_that_is_named(manager: socket.socket) -> None:
    notify(READY)
    assert manager.recv(1_000) == READY.encode()


def test_a_name_that_is_no_file_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"weft-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(100)
        listening.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify(STOPPING)
        assert listening.recv(1_000) == STOPPING.encode()


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
def test_nobody_need_listen(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify(READY)


def test_a_server_says_that_it_is_ready_and_that_it_stops(
    manager: socket.socket, tmp_path: Path
) -> None:
    with ServerProcess(write_tiny_model(tmp_path / "tiny")) as server:
        assert manager.recv(1_000) == READY.encode()
        server.process.send_signal(signal.SIGTERM)
        assert manager.recv(1_000) == STOPPING.encode()
