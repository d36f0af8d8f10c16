"""Texts go on while pictures, videos and sounds are read: measured in steps of the engine, which
takes the next one only when the client has what the last one gave."""

from __future__ import annotations

import base64
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.server.endless_media import begin, endless_readers
from tests.server.fake import HANG_S, RunningServer, eventually, running
from tests.text.media_fakes import READING_WITHOUT_END, animation, picture, saved, wav
from tests.text.tokens import infill_tokenizer

NUM_TOKENS = 60
NUM_CLIENTS = 2


def url_of(data: bytes, type: str) -> dict[str, str]:
    return {"url": f"data:{type};base64,{base64.b64encode(data).decode()}"}


PARTS: dict[str, dict[str, Any]] = {
    "picture": {"type": "image_url", "image_url": url_of(saved(picture()), "image/png")},
    "video": {"type": "video_url", "video_url": url_of(animation(3), "video/gif")},
    "sound": {"type": "audio_url", "audio_url": url_of(wav(3_000), "audio/wav")},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(processor=READING_WITHOUT_END, tokenizer=infill_tokenizer("<pad>")) as server:
        server.engine.hold = True  # it steps when a test says so
        server.engine.script = lambda ids: [97] * NUM_TOKENS
        yield server


class Stream:
    """A client that reads a stream of text."""

    def __init__(self, server: RunningServer) -> None:
        self._url = server.url
        self.events: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        body = {"prompt": "x", "max_tokens": NUM_TOKENS, "stream": True}
        with (
            httpx.Client(base_url=self._url, timeout=HANG_S) as web,
            web.stream("POST", "/v1/completions", json=body) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.put(line.removeprefix("data: "))

    def text(self) -> str:
        """The text of the next event."""
        told = json.loads(self.events.get(timeout=HANG_S))
        return str(told["choices"][0]["text"])

    def end(self) -> None:
        self._thread.join(HANG_S)


@pytest.mark.parametrize("kind", PARTS)
def test_each_step_is_delivered_before_the_next_one_whatever_is_read(
    server: RunningServer, kind: str
) -> None:
    body = {"messages": [{"role": "user", "content": [PARTS[kind]]}]}
    engine = server.engine
    with ExitStack() as stack:
        for _ in range(NUM_CLIENTS):
            stack.enter_context(begin(server, "/v1/chat/completions", body))
        assert eventually(endless_readers)
        stream = Stream(server)
        assert eventually(lambda: len(engine.running) == 1)
        for step in range(NUM_TOKENS):
            server.call(lambda: engine.answer(engine.step()))
            assert stream.text() == "a", step
        stream.end()
        assert endless_readers(), "it is still being read"
    assert eventually(lambda: not endless_readers())
