from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from weft.text.media.errors import MediaError, MediaTooLarge
from weft.text.media.fetch import Fetcher, MediaAccess, is_public

MOST = 1_000


class _Handler(BaseHTTPRequestHandler):
    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["host"]))
        path = self.path.partition("?")[0]
        if path == "/redirect":
            self.send_response(302)
            self.send_header("location", "http://127.0.0.1:1/secret")
            self.end_headers()
            return
        if path == "/drip":  # a byte now and then, without an end
            self.send_response(200)
            self.end_headers()
            while not self.server.over.wait(0.02):  # type: ignore[attr-defined]
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return
            return
        if path == "/missing":
            self.send_error(404)
            return
        length = {"/large": MOST + 1, "/endless": 50_000_000, "/short": 10}.get(path, 5)
        self.send_response(200)
        if path != "/endless":
            self.send_header("content-length", str(length))
        self.end_headers()
        try:
            self.wfile.write(b"x" * (5 if path == "/short" else min(length, 200_000)))
        except OSError:
            return

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[tuple[int, list[tuple[str, str | None]]]]:
    _Handler.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.over = threading.Event()  # type: ignore[attr-defined]
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1], _Handler.seen
        server.over.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


def fetcher(*hosts: str, timeout_s: float = 30.0, **others: Any) -> Fetcher:
    """One for which 127.0.0.1 is a public address, and every name stands for that."""
    options: dict[str, Any] = {
        "resolve": lambda host, port: ["127.0.0.1"],
        "is_public": lambda address: address == "127.0.0.1",
        **others,
    }
    return Fetcher(MediaAccess(hosts=frozenset(hosts), timeout_s=timeout_s), **options)


def test_a_host_that_is_named_is_fetched_from(web: Any) -> None:
    port, seen = web
    seen.clear()
    fetch = fetcher(f"pictures.example:{port}").fetch
    assert fetch(f"http://pictures.example:{port}/a/b.png?x=1#part", MOST) == b"xxxxx"
    assert fetch(f"HTTP://Pictures.Example:{port}", MOST) == b"xxxxx"
    host = f"pictures.example:{port}"
    assert seen == [("/a/b.png?x=1", host), ("/", host)]


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/a",
        "http://pictures.example.evil/a",
        "http://xpictures.example/a",
        "http://pictures.example:81/a",
        "http://pictures.example:0/a",
        "http://pictures.example:99999/a",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://127.1/",
        "http://[::1]/",
        "http://pictures.example@127.0.0.1/",
        "http://user:password@pictures.example/",
        "http://a\\@pictures.example/",
        "http://127.0.0.1\\@pictures.example/",
        "http://pictures.example\\.evil/",
        "http://pictures.example /",
        "http://pictures.example\r\nhost: x/",
        "http:///pictures.example/",
        "http:pictures.example",
        "http://pictures.exämple/",
        "http://pictures.example/\x00",
        "http://pictures.example/a b",
        "http://pictures.example/" + "a" * 9_000,
        "https:/pictures.example/",
        "gopher://pictures.example/",
        "",
    ],
)
def test_no_other_address_is_dialled(url: str) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("it was looked up")

    with pytest.raises(MediaError):
        fetcher("pictures.example", resolve=never).fetch(url, MOST)


def test_nothing_is_fetched_where_no_host_is_named() -> None:
    with pytest.raises(MediaError, match="--allowed-media-domains"):
        fetcher().fetch("http://pictures.example/", MOST)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1"),
        *("2002:7f00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "nonsense", ""),
    ],
)
def test_addresses_that_are_not_of_the_public_internet(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_of_the_public_internet(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::ffff:169.254.169.254"], []]
)
def test_a_name_that_stands_for_a_private_address_is_refused(addresses: list[str]) -> None:
    fetch = Fetcher(MediaAccess(frozenset(["a.example"])), lambda host, port: addresses).fetch
    with pytest.raises(MediaError, match="not one of the public internet"):
        fetch("http://a.example/", MOST)


def test_a_name_is_looked_up_once_and_that_address_dialled(web: Any) -> None:
    """As for a name server that answers first with a public address, and then with an inner one."""
    port, _ = web
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    fetch = fetcher(f"a.example:{port}", resolve=lambda *_: next(answers)).fetch
    assert fetch(f"http://a.example:{port}/", MOST) == b"xxxxx"
    assert next(answers) == ["10.0.0.1"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/redirect", r"a redirect \(302\), which is not followed"),
        ("/missing", "status 404"),
        ("/short", "broke off"),
        ("/large", "0.0 MB; 0.001 MB are allowed"),
        ("/endless", "MB are allowed"),
    ],
)
def test_answers_that_are_not_taken(web: Any, path: str, words: str) -> None:
    port, seen = web
    seen.clear()
    with pytest.raises(MediaError, match=words) as caught:
        fetcher(f"a.example:{port}").fetch(f"http://a.example:{port}{path}", MOST)
    assert len(seen) == 1
    assert isinstance(caught.value, MediaTooLarge) == ("MB" in words)


def test_a_host_that_sends_too_slowly_is_left(web: Any) -> None:
    port, _ = web
    with pytest.raises(MediaError, match=r"did not arrive within 1 s"):
        fetcher(f"a.example:{port}", timeout_s=1.0).fetch(f"http://a.example:{port}/drip", MOST)


def test_a_host_that_cannot_be_reached_is_reported_without_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    fetch = fetcher(f"a.example:{port}").fetch
    with pytest.raises(MediaError, match="did not send it") as caught:
        fetch(f"http://a.example:{port}/", MOST)
    assert "127.0.0.1" not in str(caught.value)

    def unknown(host: str, port: int) -> list[str]:
        raise socket.gaierror("unknown")

    with pytest.raises(MediaError, match="has no address"):
        fetcher("a.example", resolve=unknown).fetch("http://a.example/", MOST)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "media"
    (inside / "below").mkdir(parents=True)
    (inside / "a b.png").write_bytes(b"picture")
    (inside / "below" / "c.png").write_bytes(b"deeper")
    (inside / "large").write_bytes(bytes(MOST + 1))
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "x").write_bytes(b"secret")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "good").symlink_to(inside / "below" / "c.png")
    os.mkfifo(inside / "pipe")
    return inside


def test_files_below_the_folder_are_read(folder: Path) -> None:
    fetch = Fetcher(MediaAccess(folder=folder)).fetch
    assert fetch(f"file://{folder}/a%20b.png", MOST) == b"picture"
    assert fetch(f"file://localhost{folder}/below/c.png", MOST) == b"deeper"
    assert fetch(f"file://{folder}/good", MOST) == b"deeper"
    assert fetch(f"file://{folder}/below/../a b.png", MOST) == b"picture"


@pytest.mark.parametrize(
    "path",
    [
        *("/../secret", "/below/../../secret", "/%2e%2e/secret", "/link", "2/x", "/pipe"),
        *("/below", "/none", "/large", "/a%00b", "/a b.png?x=1", "/.."),
    ],
)
def test_no_other_file_is_read(folder: Path, path: str) -> None:
    with pytest.raises(MediaError) as caught:
        Fetcher(MediaAccess(folder=folder)).fetch(f"file://{folder}{path}", MOST)
    assert str(folder) not in str(caught.value)


def test_files_are_read_where_a_folder_is_named_or_all_are_allowed(folder: Path) -> None:
    url = f"file://{folder}/below/c.png"
    with pytest.raises(MediaError, match="--allowed-local-media-path"):
        Fetcher(MediaAccess()).fetch(url, MOST)
    with pytest.raises(MediaError, match="of the form"):
        Fetcher(MediaAccess(folder=folder)).fetch("file://other.example/etc/passwd", MOST)
    assert Fetcher(MediaAccess(any_file=True)).fetch(url, MOST) == b"deeper"
