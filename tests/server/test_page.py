"""The live page over HTTP: its files, who may have them, and the stream of pictures."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.fake import HANG_S, MODEL, RunningServer, eventually, running
from tests.server.pictured import HOSTILE, pictured
from weft.client.feed import MAX_VIEWERS
from weft.config.server import ServerConfig
from weft.messages.status import EngineFailed
from weft.server.page.files import FOLDER, POLICY

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def watched() -> Iterator[RunningServer]:
    """A server of one test, which may end it, whose engine makes pictures; `asked` has the
    questions."""
    with running(ServerConfig(drain_s=1.0)) as server:
        server.asked = pictured(server)  # type: ignore[attr-defined]
        yield server


def events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_browsers_get_the_page_and_others_a_greeting(server: RunningServer) -> None:
    page = httpx.get(server.url, headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == POLICY
    greeting = httpx.get(server.url)
    assert greeting.headers["content-type"] == "text/plain; charset=utf-8"
    assert MODEL in greeting.text
    assert page.headers["vary"] == greeting.headers["vary"] == "accept"


def test_every_file_that_the_page_names_is_there_and_is_kept_by_its_digest(
    server: RunningServer,
) -> None:
    page = httpx.get(server.url, headers=BROWSER).text
    named = set(re.findall(r'(?:src|href)="(page/[^"]+)"', page))
    for path in FOLDER.glob("*.js"):
        named |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert {f"page/{path.name}" for path in FOLDER.iterdir()} == {*named, "page/index.html"}
    for name in named:
        first = httpx.get(f"{server.url}/{name}")
        assert (first.status_code, first.headers["cache-control"]) == (200, "no-cache")
        again = httpx.get(
            f"{server.url}/{name}", headers={"if-none-match": f"W/{first.headers['etag']}, x"}
        )
        assert (again.status_code, again.content) == (304, b"")
    missing = httpx.get(f"{server.url}/page/nothing.js")
    assert (missing.status_code, "nothing.js" in missing.text) == (404, True)


def test_the_page_asks_nobody_else_and_has_no_code_in_its_markup() -> None:
    markup = (FOLDER / "index.html").read_text()
    assert not re.findall(r"\son\w+=|\sstyle=|<style|<script(?![^>]*src=)", markup)
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text)


def test_the_files_of_the_page_take_no_more_than_67_kilobytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 67_000


def test_a_server_without_the_page_greets_browsers_too() -> None:
    with running(ServerConfig(page=False, drain_s=1.0)) as server:
        assert MODEL in httpx.get(server.url, headers=BROWSER).text
        assert httpx.get(f"{server.url}/page/page.css").status_code == 404


def test_with_keys_the_page_is_open_and_tells_nothing() -> None:
    with running(ServerConfig(api_key="k", admin_api_key="a", drain_s=1.0)) as server:
        assert httpx.get(server.url, headers=BROWSER).status_code == 200
        greeting = httpx.get(server.url).text
        assert "weft is running" in greeting
        assert MODEL not in greeting
        assert MODEL in httpx.get(server.url, headers={"x-api-key": "k"}).text
        events = f"{server.url}/events"
        assert httpx.get(events).status_code == 401
        assert httpx.get(events, headers={"x-api-key": "k"}).status_code == 403


def test_pictures_come_as_events_with_text_as_text(watched: RunningServer) -> None:
    with httpx.stream("GET", f"{watched.url}/events") as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        told = events(answer)
        name, hello = next(told)
        assert (name, hello["model"], hello["has_chat"]) == ("hello", MODEL, True)
        name, first = next(told)
        assert name == "picture"
        assert first["rows"]["rid"] == [HOSTILE]
        assert first["steps"]["ms"] == [2.1]
        assert first["stats"]["num_waiting"] == 0
        assert first["tree"]["text"][0].startswith("<b>")
        name, second = next(told)
        assert (name, second["steps"]["number"]) == ("picture", [1])
    # The engine is told what has been seen.
    asked = watched.asked  # type: ignore[attr-defined]
    assert [one.since_step for one in asked[:2]] == [-1, 0]
    assert [one.since_round for one in asked[:2]] == [0, 1]


def test_ten_viewers_cost_the_engine_as_much_as_one_and_nobody_nothing(
    watched: RunningServer,
) -> None:
    asked = watched.asked  # type: ignore[attr-defined]
    assert not asked
    with httpx.Client(base_url=watched.url) as http:
        streams = []
        for _ in range(10):
            stream = http.stream("GET", "/events")
            told = events(stream.__enter__())
            assert next(told)[0] == "hello"
            streams.append((stream, told))
        seen = [[next(told) for _ in range(2)] for _, told in streams]
        # Who comes later sees the steps of before, too.
        assert all(name == "picture" for pictures in seen for name, _ in pictures)
        assert all(pictures[-1][1]["steps"]["number"] for pictures in seen)
        last = max(pictures[-1][1]["steps"]["number"][-1] for pictures in seen)
        assert len(asked) <= last + 3
        for stream, _ in streams:
            stream.__exit__(None, None, None)


def test_a_thousand_viewers_are_served_or_refused_at_once(
    watched: RunningServer,
) -> None:
    """Nobody is kept waiting, and who leaves makes room."""
    request = b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n"
    viewers = []
    statuses: Counter[bytes] = Counter()
    for _ in range(1_000):
        viewer = socket.create_connection(("127.0.0.1", watched.port), timeout=HANG_S)
        viewer.sendall(request)
        statuses[viewer.recv(64).split(b" ", 2)[1]] += 1
        viewers.append(viewer)
    assert statuses == {b"200": MAX_VIEWERS, b"503": 1_000 - MAX_VIEWERS}
    with httpx.Client(base_url=watched.url, timeout=HANG_S) as http:
        assert http.get("/health").status_code == 200
        for viewer in viewers:
            viewer.close()
        assert eventually(lambda: len(watched.connections) <= 1)
        with http.stream("GET", "/events") as answer:
            assert next(events(answer))[0] == "hello"


def test_an_engine_that_is_gone_is_shown_to_viewers(watched: RunningServer) -> None:
    with httpx.stream("GET", f"{watched.url}/events") as answer:
        told = events(answer)
        assert [next(told)[0] for _ in range(2)] == ["hello", "picture"]
        watched.call(lambda: watched.client.deliver(EngineFailed(message="it broke")))
        while True:
            name, fields = next(told)
            if name == "away":
                break
        assert "it broke" in fields["why"]


def test_a_server_that_stops_does_not_wait_for_pages(watched: RunningServer) -> None:
    with httpx.stream("GET", f"{watched.url}/events") as answer:
        told = events(answer)
        assert next(told)[0] == "hello"
        watched.call(watched.readiness.drain)
        assert [name for name, _ in told][-1] == "away"
