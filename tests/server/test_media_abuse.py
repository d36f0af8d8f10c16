"""Hostile pictures and addresses over HTTP: each is one refusal that names its field, nothing is
fetched, memory stays where it was, and a stream beside them goes on."""

from __future__ import annotations

import base64
import gc
import json
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.server.endless_media import begin, endless_readers
from tests.server.fake import HANG_S, RunningServer, eventually, running
from tests.text.media_fakes import (
    ENDLESS,
    SEEING,
    TROUBLED,
    animation,
    packed_zeros,
    picture,
    png_chunk,
    png_of_size,
    saved,
)
from tests.text.scanned_pictures import scanned
from tests.text.tokens import infill_tokenizer
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.text.media.loader import MediaRefusal

CHAT = "/v1/chat/completions"
HOST = "pictures.example"
MAX_GROWTH = 200_000_000  # bytes


@pytest.fixture(scope="module")
def seeing() -> Iterator[RunningServer]:
    config = ServerConfig(drain_s=1.0, allowed_media_domains=HOST, media_timeout_s=20.0)
    tokenizer = infill_tokenizer("<pad>")
    with running(config, processor=SEEING, tokenizer=tokenizer) as server:
        yield server


@pytest.fixture
def web(seeing: RunningServer) -> Iterator[httpx.Client]:
    seeing.reset()
    with httpx.Client(base_url=seeing.url, timeout=HANG_S) as client:
        yield client


def data_url(data: bytes, type: str = "image/png") -> str:
    return f"data:{type};base64,{base64.b64encode(data).decode()}"


def ask(web: httpx.Client, *urls: str, kind: str = "image_url") -> httpx.Response:
    content = [{"type": kind, kind: {"url": url}} for url in urls]
    return web.post(CHAT, json={"messages": [{"role": "user", "content": content}]})


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert error["message"]
    assert "Traceback" not in error["message"]
    return str(error["message"])


def noisy(mode: str, format: str, **options: Any) -> bytes:
    return saved(Image.effect_noise((64, 64), 90).convert(mode), format, **options)


def exif_bomb() -> bytes:
    """A block of EXIF with 4,000 entries, each of which claims 4 GB, and one that points at
    itself."""
    entry = struct.pack("<HHII", 0x9000, 2, 0xFFFFFFFF, 8)
    block = b"II*\0\x08\0\0\0" + struct.pack("<H", 4_000) + entry * 4_000
    return saved(picture(), "JPEG", exif=b"Exif\0\0" + block)


SVG = b"""<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/passwd">]>
<svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1/"/>&x;</svg>"""
PLAIN = saved(picture())
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "text": b"hello",
    "svg": SVG,
    "html": b"<!DOCTYPE html><script>alert(1)</script>",
    "pdf": b"%PDF-1.7\n" + bytes(100),
    "zip": b"PK\x03\x04" + bytes(100),
    "heic": b"\0\0\0\x18ftypheic" + bytes(100),
    "50,000 x 50,000": png_of_size(50_000, 50_000),
    "2^31 x 2^31": png_of_size(2**31 - 1, 2**31 - 1),
    "0 x 0": png_of_size(0, 0),
    "lies about its size": png_of_size(5_000, 5_000, 10),
    "37 million black pixels": png_of_size(6_100, 6_100, 6_100 * 18_301),
    "cut png": noisy("RGB", "PNG")[:900],
    "cut jpeg": noisy("RGB", "JPEG")[:900],
    "cut webp": noisy("RGB", "WEBP")[:900],
    "cut gif": noisy("P", "GIF")[:900],
    "zeros behind a head": PLAIN[:40] + bytes(5_000),
    "wrong sum": PLAIN[:-20] + b"\xff" + PLAIN[-19:],
    "text that grows": PLAIN[:33]
    + png_chunk(b"zTXt", b"a\0\0" + packed_zeros(90_000_000))
    + PLAIN[33:],
    "profile that grows": PLAIN[:33]
    + png_chunk(b"iCCP", b"a\0\0" + packed_zeros(90_000_000))
    + PLAIN[33:],
    "too narrow": saved(picture(1, 5_000)),
    "36,000,000 x 1": png_of_size(36_000_000, 1, 36_000_001),
    "1 x 1,000,000": png_of_size(1, 1_000_000, 2_000_000),
    "20,000 scans": scanned(20_000),
}
# Odd files that are pictures all the same.
HARMLESS: dict[str, bytes] = {
    "cmyk": noisy("CMYK", "JPEG"),
    "16 bit": saved(picture(mode="I;16", colour=40_000)),
    "alpha": noisy("RGBA", "PNG"),
    "palette": noisy("P", "PNG"),
    "one bit": noisy("1", "PNG"),
    "animated gif": animation(300),
    "animated png": animation(20, format="PNG"),
    "animated webp": animation(20, format="WEBP"),
    "exif bomb": exif_bomb(),
    "png that is a zip, too": PLAIN + b"PK\x05\x06" + bytes(18),
    "gif that is javascript, too": saved(picture(), "GIF") + b"*/=alert(1)//",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_refusal(web: httpx.Client, seeing: RunningServer, name: str) -> None:
    message = refused(ask(web, data_url(PLAIN), data_url(HOSTILE[name])))
    assert message.startswith("messages[0].content[1]: ")
    assert seeing.engine.seen == []


@pytest.mark.filterwarnings("ignore::UserWarning")  # as the server sets it, for pytest unsets it
@pytest.mark.parametrize("name", HARMLESS)
def test_an_odd_file_is_a_picture(web: httpx.Client, seeing: RunningServer, name: str) -> None:
    for claimed in ("image/png", "image/svg+xml", "text/html", ""):
        assert ask(web, data_url(HARMLESS[name], claimed)).status_code == 200
    digests = {request.media[0].digest for request in seeing.engine.seen}
    assert len(digests) == 1


def test_hostile_videos_are_refused(web: httpx.Client, seeing: RunningServer) -> None:
    frames = [
        animation(800),
        b"\0\0\0\x20ftypmp42" + bytes(99),
        b"\x1a\x45\xdf\xa3" + bytes(99),
        SVG,
    ]
    for data in frames:
        refused(ask(web, data_url(data, "video/mp4"), kind="video_url"))
    many = "data:video/jpeg;base64," + ",".join([base64.b64encode(PLAIN).decode()] * 800)
    assert "800 frames; 768 are allowed" in refused(ask(web, many, kind="video_url"))
    assert seeing.engine.seen == []


def test_ten_thousand_pictures_are_refused_before_any_is_read(
    web: httpx.Client, seeing: RunningServer
) -> None:
    message = refused(ask(web, *[data_url(b"x")] * 10_000))
    assert "10,000 images; 64 are allowed" in message
    body = {"text": "<image>", "image_data": ["AAAA"] * 10_000}
    assert "64 are allowed" in refused(web.post("/generate", json=body))


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts that are looked up, each of which stands for this machine."""
    found: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host in ("127.0.0.1", "localhost"):
            return real(host, *args, **kwargs)
        found.append(str(host))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return found


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://169.254.169.254/latest/meta-data/",
        f"http://a\\@{HOST}/",
        f"http://127.0.0.1\\@{HOST}/",
        f"http://{HOST}@127.0.0.1/",
        f"http://{HOST}.evil.example/",
        f"http://{HOST}:22/",
        f"http://{HOST}#@127.0.0.1/\r\nx: y",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "ftp://127.0.0.1/",
        "gopher://127.0.0.1/",
        "//127.0.0.1/",
        "/etc/passwd",
        "javascript:alert(1)",
        "data:image/png;base64,",
        "data:image/png,abc",
        "data:image/png;base64,%%%%",
    ],
)
def test_a_hostile_address_is_neither_looked_up_nor_dialled(
    web: httpx.Client, seeing: RunningServer, dialled: list[str], url: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        refused(ask(web, url.replace("127.0.0.1/", f"127.0.0.1:{trap.getsockname()[1]}/")))
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert dialled == []
    assert seeing.engine.seen == []


def test_a_name_that_stands_for_this_machine_is_not_dialled(
    web: httpx.Client, seeing: RunningServer, dialled: list[str]
) -> None:
    message = refused(ask(web, f"http://{HOST}/a.png"))
    assert "is not one of the public internet" in message
    assert dialled == [HOST]
    assert seeing.engine.seen == []


def test_a_body_that_is_too_large_is_refused_by_its_head(seeing: RunningServer) -> None:
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", seeing.port), timeout=HANG_S) as client:
        client.sendall(head % CHAT.encode())
        assert client.recv(1_000).startswith(b"HTTP/1.1 413")


def test_memory_stays_and_a_stream_goes_on(web: httpx.Client, seeing: RunningServer) -> None:
    """All of it again and again, from several clients, while one reads a stream."""
    corpus = [*HOSTILE.values(), *HARMLESS.values()]
    for data in corpus:  # whatever is imported or kept once
        ask(web, data_url(data))

    def attack() -> None:
        with httpx.Client(base_url=seeing.url, timeout=HANG_S) as client:
            for data in corpus:
                assert ask(client, data_url(data)).status_code in (200, 400)

    seeing.engine.script = lambda ids: [97] * 300
    seeing.engine.step_s = 0.001
    body = {"prompt": "x", "max_tokens": 300, "stream": True}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with web.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        attackers = [threading.Thread(target=attack) for _ in range(2)]
        for thread in attackers:
            thread.start()
        told = [line for line in lines if line.startswith("data: ")]
        for thread in attackers:
            thread.join(HANG_S)
    assert told[-1] == "data: [DONE]"
    grown = 1_024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < MAX_GROWTH
    assert eventually(lambda: seeing.client.num_open == 0)


def test_the_bytes_of_a_refused_picture_do_not_wait_for_the_collector(
    web: httpx.Client, seeing: RunningServer
) -> None:
    """Many of them would fill the memory before it comes round."""

    def refusals() -> list[MediaRefusal]:
        return [one for one in gc.get_objects() if type(one) is MediaRefusal]

    earlier = refusals()  # other tests of this process may have left some
    gc.disable()
    try:
        refused(ask(web, data_url(HOSTILE["lies about its size"])))

        def is_gone() -> bool:
            return all(any(one is old for old in earlier) for one in refusals())

        # A thread forgets its last piece of work when it gets another.
        assert eventually(lambda: ask(web, data_url(PLAIN)).status_code == 200 and is_gone())
    finally:
        gc.enable()


@pytest.fixture
def troubled() -> Iterator[RunningServer]:
    tokenizer = infill_tokenizer("<pad>")
    with running(processor=TROUBLED, tokenizer=tokenizer) as server:
        yield server


ENDLESS_PICTURE = data_url(saved(picture(colour=ENDLESS)))
ENDLESS_CHAT = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": ENDLESS_PICTURE}}],
        }
    ]
}


def test_the_work_for_a_client_that_has_left_is_ended_at_once(troubled: RunningServer) -> None:
    """Nothing but the end of its client ends this work: it has no limit."""
    clients = [begin(troubled, CHAT, ENDLESS_CHAT) for _ in range(2)]
    assert eventually(lambda: len(endless_readers()) == 2)
    for client in clients:
        client.close()
    with httpx.Client(base_url=troubled.url, timeout=HANG_S) as web:
        assert ask(web, data_url(PLAIN)).status_code == 200
    assert eventually(lambda: not endless_readers())
    assert troubled.client.num_open == 0


@pytest.mark.parametrize(
    ("path", "body", "form"),
    [
        (CHAT, ENDLESS_CHAT, ("error", "type", "service_unavailable_error")),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": ENDLESS_PICTURE.partition(",")[2],
                                },
                            }
                        ],
                    }
                ],
            },
            ("error", "type", "overloaded_error"),
        ),
        (
            "/api/generate",
            {"prompt": "x", "images": [ENDLESS_PICTURE.partition(",")[2]]},
            ("error",),
        ),
    ],
)
def test_a_server_that_stops_ends_what_it_reads_and_says_so_in_the_form_of_the_api(
    troubled: RunningServer, path: str, body: dict[str, Any], form: tuple[str, ...]
) -> None:
    with begin(troubled, path, body) as client:
        assert eventually(endless_readers)
        troubled.call(troubled.readiness.drain)
        answer = client.recv(10_000).decode()
    head, _, text = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 503 ")
    assert "content-type: application/json" in head.lower()
    told: Any = json.loads(text)
    for name in form[:-1]:
        told = told[name]
    if len(form) == 1:
        assert "shutting down" in told["error"]
    else:
        assert told == form[-1]
    assert eventually(lambda: not endless_readers())


def test_a_picture_up_to_the_limit_is_taken() -> None:
    limits = Limits(max_image_pixels=9_000_000)
    tokenizer = infill_tokenizer("<pad>")
    with (
        running(limits=limits, processor=SEEING, tokenizer=tokenizer) as server,
        httpx.Client(base_url=server.url, timeout=HANG_S) as http,
    ):
        assert ask(http, data_url(png_of_size(3_000, 3_000, 3_000 * 9_001))).status_code == 200
        assert "9,003,000; 9,000,000 are allowed" in refused(
            ask(http, data_url(png_of_size(3_001, 3_000, 3_000 * 9_004)))
        )
