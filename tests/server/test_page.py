"""The live page over HTTP: its files, who may have them, and the stream of pictures."""

from __future__ import annotations

import hashlib
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
from weft.config.origins import why_no_origins
from weft.config.server import ServerConfig
from weft.messages.status import EngineFailed
from weft.server.page.files import FOLDER, policy

VENDORED = [path for path in (FOLDER / "vendor").iterdir() if path.is_file()]
OWN = [path for path in FOLDER.rglob("*") if path.is_file() and path not in VENDORED]
# Names of languages and examples in fields, which nobody asks.
NAMES_ALONE = (
    "http://www.w3.org/2000/svg",
    "http://www.w3.org/1998/Math/MathML",
    "http://127.0.0.1:8000/mcp",
)
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def watched() -> Iterator[RunningServer]:
    """A server of one test, which may end it, whose engine makes pictures; `asked` has the
    questions."""
    with running(ServerConfig(drain_s=1.0)) as server:
        server.asked = pictured(server)  # type: ignore[attr-defined]
        yield server


SSE = "text/event-stream; charset=utf-8"


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
    assert page.headers["content-security-policy"] == policy()
    greeting = httpx.get(server.url)
    assert greeting.headers["content-type"] == "text/plain; charset=utf-8"
    assert MODEL in greeting.text
    assert page.headers["vary"] == "accept, accept-encoding"
    assert greeting.headers["vary"] == "accept"


def test_every_file_that_the_page_names_is_there_and_is_kept_by_its_digest(
    server: RunningServer,
) -> None:
    page = httpx.get(server.url, headers=BROWSER).text
    named = set(re.findall(r'(?:src|href)="(page/[^"]+)"', page))
    for path in OWN:
        if path.suffix == ".js":
            for name in re.findall(r'(?:from |import\(|URL\()"(\.[^"]+)"', path.read_text()):
                file = (path.parent / name).resolve()
                named.add(f"page/{file.relative_to(FOLDER.resolve()).as_posix()}")
    there = {f"page/{path.relative_to(FOLDER).as_posix()}" for path in (*OWN, *VENDORED)}
    assert there == {*named, "page/index.html", "page/vendor/LICENSES.txt"}
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
    for path in OWN:
        text = path.read_text()
        for name in NAMES_ALONE:
            text = text.replace(name, "")
        assert "http://" not in text
        assert "https://" not in text
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text)
        assert "<style" not in text


def test_the_own_files_of_the_page_are_small() -> None:
    """The limit and its reason are in docs/understand/shape.md."""
    assert sum(path.stat().st_size for path in OWN) <= 166_000
    assert max(path.stat().st_size for path in OWN) <= 13_000


def test_the_whole_page_takes_no_more_than_400_kilobytes_compressed(server: RunningServer) -> None:
    size = 0
    for path in (*OWN, *VENDORED):
        name = path.relative_to(FOLDER).as_posix()
        with httpx.stream("GET", f"{server.url}/page/{name}") as answer:  # as a browser gets it
            assert answer.headers["content-encoding"] == "gzip"
            size += len(b"".join(answer.iter_raw()))
        plain = httpx.get(f"{server.url}/page/{name}", headers={"accept-encoding": "identity"})
        assert plain.content == path.read_bytes()
        assert plain.headers["vary"] == "accept, accept-encoding"
    assert size <= 400_000


def test_libraries_are_those_that_their_list_names() -> None:
    licences = (FOLDER / "vendor" / "LICENSES.txt").read_text()
    for path in VENDORED:
        if path.suffix == ".js":
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            assert re.search(rf"^{path.name} +\S+ \d+\.\d+\.\d+, .*\n +{digest}$", licences, re.M)


def test_the_page_reaches_only_the_origins_that_the_operator_names() -> None:
    origin = "http://127.0.0.1:8000"
    with running(ServerConfig(page_mcp_origins=origin, drain_s=1.0)) as server:
        answer = httpx.get(server.url, headers=BROWSER)
        assert answer.headers["content-security-policy"] == policy([origin])
        assert f"connect-src 'self' {origin};" in answer.headers["content-security-policy"]
    for wrong in ("tools.test", "http://a/mcp", "http://a; script-src *", "*"):
        assert why_no_origins(f"http://b, {wrong}")
    assert not why_no_origins("https://tools.example.com, http://[::1]:8000")


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
        assert answer.headers["content-type"] == SSE
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


def test_the_head_of_events_has_an_end(watched: RunningServer) -> None:
    answer = httpx.head(f"{watched.url}/events")
    assert (answer.status_code, answer.headers["content-type"]) == (200, SSE)
    assert answer.headers["content-length"] == "0"


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
    for _ in range(MAX_VIEWERS + 20):
        viewer = socket.create_connection(("127.0.0.1", watched.port), timeout=HANG_S)
        viewer.sendall(request)
        statuses[viewer.recv(64).split(b" ", 2)[1]] += 1
        viewers.append(viewer)
    assert statuses == {b"200": MAX_VIEWERS, b"503": 20}
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
