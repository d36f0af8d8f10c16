"""Libraries that panic, which is no Exception, and bytes that are no HTTP: each is answered in the
form of all errors, with one line in the log."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.fake import HANG_S, RunningServer, eventually
from weft.text.detokenizer import ByteDetokenizer

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


class PanicException(BaseException):
    """As libraries in Rust raise it."""


def panic(*args: Any, **kwargs: Any) -> Any:
    raise PanicException("called `Option::unwrap()` on a `None` value")


@pytest.mark.parametrize("length", [10, 3_000], ids=["on the loop", "in a thread"])
def test_a_panic_of_the_tokenizer_is_an_error_in_form_and_one_line(
    server: RunningServer,
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    length: int,
) -> None:
    monkeypatch.setattr(server.tokenizer, "encode_all", panic)
    with caplog.at_level(logging.WARNING):
        answer = http.post(TEXT, json={"prompt": "x" * length})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal server error"
    assert answer.headers["content-type"] == "application/json"
    assert [record.exc_info is not None for record in caplog.records] == [True]
    monkeypatch.undo()
    assert http.post(TEXT, json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_panic_while_an_answer_is_decoded_ends_that_answer_alone(
    server: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    push: Callable[[ByteDetokenizer, int], str] = ByteDetokenizer.push

    def pushed(self: ByteDetokenizer, token: int) -> str:
        return panic() if token == ord("!") else push(self, token)

    server.engine.script = lambda ids: list(b"no" if ids == [ord("a")] else b"n!o")
    monkeypatch.setattr(ByteDetokenizer, "push", pushed)
    answer = http.post(TEXT, json={"prompt": ["a", "b"], "stream": stream, "max_tokens": 9})
    if stream:
        events = [
            json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
        ]
        assert "could not be decoded" in events[-1]["error"]["message"]
    else:
        assert answer.status_code == 500
        assert "could not be decoded (PanicException)" in answer.json()["error"]["message"]
    assert (
        http.post(TEXT, json={"prompt": "a", "max_tokens": 9}).json()["choices"][0]["text"] == "no"
    )
    assert eventually(lambda: not server.engine.running)
    assert server.client.num_open == 0


@pytest.mark.parametrize(
    "sent", [b"GARBAGE\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"]
)
def test_invalid_http_is_refused_in_the_form_of_all_errors(
    server: RunningServer, sent: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as client:
        client.sendall(sent)
        answer = b"".join(iter(lambda: client.recv(65_536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == 400
