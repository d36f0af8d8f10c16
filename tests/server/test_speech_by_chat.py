"""Transcripts of models that hear and talk, a tiny Qwen2-Audio, Gemma 3n, Gemma 4 and
Voxtral: a chat about the sound."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.media_models import MediaModel, gemma3n_sounds, gemma4_sounds, qwen2_audio, voxtral
from tests.models import speaking
from tests.server.real_engine import RealServer, serving


@pytest.fixture(scope="module", params=[qwen2_audio, gemma3n_sounds, gemma4_sounds, voxtral])
def hearing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MediaModel:
    found: MediaModel = request.param(tmp_path_factory.mktemp("hearing"))
    return found


@pytest.fixture(scope="module")
def server(hearing: MediaModel) -> Iterator[RealServer]:
    with serving(hearing.folder, dtype="float32", context_length=512) as made:
        yield made


def ask(
    server: RealServer, raw: bytes, path: str = "transcriptions", **fields: Any
) -> httpx.Response:
    files = {"file": ("sound.wav", raw)}
    return server.wait(server.http.post(f"/v1/audio/{path}", files=files, data=fields))


RAW = speaking.wav(speaking.sound(12_000))


def test_the_answer_is_that_of_a_chat_about_the_sound(server: RealServer) -> None:
    answer = ask(server, RAW, language="de", prompt="Good morning.")
    assert answer.status_code == 200, answer.text
    task = (
        "Write down what is said, word for word, and nothing else. The language is german. This "
        "was said before: Good morning."
    )
    data = base64.b64encode(RAW).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": task},
    ]
    chat = server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": parts}],
        temperature=0,
    ).json()
    assert answer.json()["text"] == chat["choices"][0]["message"]["content"].strip()
    usage = chat["usage"]
    assert answer.json()["usage"] == {
        "type": "tokens",
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
    }


def test_a_stream_has_the_same_text(server: RealServer) -> None:
    whole = ask(server, RAW, "translations").json()["text"]
    answer = ask(server, RAW, "translations", stream="true")
    lines = [line for line in answer.text.split("\n\n") if line]
    *deltas, done = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(one["delta"] for one in deltas).strip() == done["text"] == whole
    assert done["usage"]["type"] == "tokens"


def test_what_it_cannot_answer_is_refused(server: RealServer, hearing: MediaModel) -> None:
    srt = ask(server, RAW, response_format="srt")
    assert srt.status_code == 400
    assert "response_format is 'srt', which has times" in srt.json()["error"]["message"]
    long = ask(server, speaking.wav(speaking.sound(500_000)))
    assert long.status_code == 400
    error = long.json()["error"]
    if hearing.model.config.model_type == "voxtral":  # it takes as many windows as a context has
        assert "sounds (the first 1 of 1) have 800 tokens; the context has 512" in error["message"]
        return
    assert error["message"].startswith("file: the sound lasts 31.2 s")
    assert error["param"] == "file"
