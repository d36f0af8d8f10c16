"""The verb `tune` with a server that answers from a list, and a machine that was never measured."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.capacity.machines import MACHINE, SETTINGS, USERS
from weft.cli.capacity import tune as command
from weft.config.options import SettingsError
from weft.sim.gaps import Gaps
from weft.sim.journal import Journal
from weft.sim.run import BackgroundTokens, RequestColumns

STATE = {"max_running_requests": 1, "chunked_prefill_size": 512, "log_level": "info"}


class Server:
    """What it was asked, and where it answers."""

    def __init__(self) -> None:
        self.changes: list[Any] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found: dict[str, Any] = {"/get_internal_state": {"server_args": STATE}}
                self.answer(found[self.path])

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                server.changes.append(json.loads(self.rfile.read(length)))
                self.answer({"updated": True})

            def answer(self, body: Any) -> None:
                content = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.http.serve_forever)
    thread.start()
    arrivals = USERS.arrivals(8)
    record = RequestColumns().record(Gaps(), Gaps(), [], BackgroundTokens())
    journal = Journal(SETTINGS, arrivals, 0, 0, 0, [], [], False, [], record)
    monkeypatch.setattr(command, "journal_in", lambda name: journal)
    monkeypatch.setattr(command, "machine_of", lambda journal, model, options: MACHINE)
    yield found
    found.http.shutdown()
    thread.join()
    found.http.server_close()


def test_what_should_change_is_said_and_not_done(server, capsys) -> None:
    words = ["--url", server.url, "--trace", "a.journal", "--slo-ttft", "0.5", "--slo-itl", "0.03"]
    assert command.tune(words) == 0
    text = capsys.readouterr().out
    assert "max_running_requests: 1 -> " in text
    assert "weft tune --apply" in text
    assert server.changes == []


def test_it_changes_only_what_may_change_live(server) -> None:
    # Up to what the server was started with, however low the value of now is.
    words = ["--url", server.url, "--trace", "a.journal", "--slo-ttft", "0.5", "--slo-itl", "0.03"]
    assert command.tune([*words, "--apply"]) == 0
    (change,) = server.changes
    assert set(change["server_args"]) <= set(STATE)
    assert 2 < change["server_args"]["max_running_requests"] <= SETTINGS.max_running_requests


def test_nothing_changes_where_most_requests_are_late_with_any_settings(server, capsys) -> None:
    words = ["--url", server.url, "--trace", "a.journal", "--slo-ttft", "0.0125"]
    assert command.tune([*words, "--apply"]) == 0
    assert "no other setting that was tried brings more than" in capsys.readouterr().out
    assert server.changes == []


def test_without_a_journal_it_says_what_is_expected(server, monkeypatch) -> None:
    monkeypatch.setattr(command, "journal_in", lambda name: None)
    with pytest.raises(SettingsError, match="the server's journal is expected"):
        command.tune(["--url", server.url])


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(SettingsError, match="no server answers"):
        command.tune(["--url", "http://127.0.0.1:9"])


def test_nothing_is_raised_above_the_start() -> None:
    state: dict[str, Any] = {"max_running_requests": 4, "chunked_prefill_size": 512}
    axes = {axis.name: axis for axis in command.live_axes(SETTINGS, state)}
    assert set(axes) == set(state)
    lowered = replace(SETTINGS, max_running_requests=4)
    assert axes["max_running_requests"].values(MACHINE, lowered) == [2, 8]
    assert 1_024 not in axes["chunked_prefill_size"].values(MACHINE, SETTINGS)
