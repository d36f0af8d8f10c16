"""Large bodies are measured before they are decoded, and decoded where they do not hold up
others."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import httpx
import msgspec
import pytest

from tests.server.fake import HANG_S, RunningServer
from weft.observe import garbage
from weft.observe.garbage import Trim
from weft.server import body, stream
from weft.server.fields import json_parts
from weft.server.fields.json_parts import has_more_parts, num_parts
from weft.server.openai import chat, completions
from weft.server.sglang import reply as native

TEXT = "/v1/completions"
CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 20, "max_tokens": 100}
NATIVE_PARAMS = {"sampling_params": {"max_new_tokens": 100, "n": 4}}
CHANGES = {"id", "created", "e2e_latency"}


def without_names(answer: Any) -> Any:
    """Without what is different in every answer."""
    if isinstance(answer, dict):
        return {name: without_names(value) for name, value in answer.items() if name not in CHANGES}
    return [without_names(one) for one in answer] if isinstance(answer, list) else answer


def parts_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts_of, value.values()))
    return 1 + sum(map(parts_of, value)) if isinstance(value, list) else 0


def drawn(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 4)
    if kind == 0:
        return rng.choice([1, -2.5, None, True])
    if kind < 4:
        return "".join(rng.choice('a"\\[{:]},é\n') for _ in range(rng.randrange(12)))
    if kind == 4:
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(5))]
    names = ["".join(rng.choice('"\\:[k') for _ in range(3)) for _ in range(rng.randrange(4))]
    return {name: drawn(rng, depth - 1) for name in names}


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
def test_parts_are_counted_as_a_decoder_finds_them(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        json_parts, "CHUNK", chunk
    )  # strings and escapes that begin in one and end in another
    rng = random.Random(chunk)
    for _ in range(150):
        value = drawn(rng, 4)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        assert num_parts(text) == parts_of(value), text
        for most in (0, parts_of(value) - 1, parts_of(value)):
            assert has_more_parts(text, most) == (parts_of(value) > most)


@pytest.mark.parametrize(
    "inside",
    [
        ",".join(f'"k{number}":1' for number in range(200_000)),
        '"tools":[' + ",".join(["{}"] * 400_000) + "]",
        '"json_schema":[' + ",".join(["[]"] * 400_000) + "]",
        '"json_schema":' + '{"a":[' * 150_000,
    ],
    ids=["unknown fields", "objects", "lists", "broken"],
)
def test_a_body_of_very_many_parts_is_refused_before_it_is_decoded(
    http: httpx.Client, server: RunningServer, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "_decoder", None)
    content = (
        '{"prompt":"x","max_tokens":1,"other":[' + ",".join(["[]"] * 100_000) + "]," + inside + "}"
    )
    answer = http.post(TEXT, content=content.encode(), headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "more than 300,000 lists, objects and members" in answer.json()["error"]["message"]


def test_text_that_only_looks_like_many_parts_is_served(
    http: httpx.Client, server: RunningServer
) -> None:
    assert (
        http.post(
            "/tokenize", json={"prompt": '[{":"}]' * 100, "ignored": '[{":"}]' * 200_000}
        ).status_code
        == 200
    )


def test_only_small_bodies_are_decoded_on_the_event_loop(
    http: httpx.Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    decoded = body._decoded

    def seen(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return decoded(*args)

    monkeypatch.setattr(body, "_decoded", seen)
    loop = server.call(threading.get_ident)
    for size, is_on_loop in ((10, True), (body.INLINE_LEN * 2, False), (body.LARGE_LEN * 2, False)):
        assert http.post(TEXT, json={"prompt": "x", "ignored": "a" * size}).status_code == 200
        assert (threads.pop() == loop) == is_on_loop


def test_the_log_names_few_unknown_fields(
    http: httpx.Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(body.log, "debug", lambda event, names: told.append(names))
    fields = {f"field{number}" + "x" * 1_000: 1 for number in range(1_000)}
    assert http.post(TEXT, json={"prompt": "x", **fields}).status_code == 200
    [names] = told
    assert names.count(",") == body.MAX_NAMES - 1
    assert len(names) <= body.MAX_NAMES * (body.MAX_NAME_LEN + 1)


def test_memory_is_given_back_behind_large_bodies_and_once_for_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "TRIM_AFTER_S", 0.0)
    trimmed: list[int] = []

    async def main() -> None:
        trim = Trim(lambda: trimmed.append(1))
        for _ in range(5):
            trim.soon()
        while not trimmed:
            await asyncio.sleep(0.001)
        trim.soon()
        while len(trimmed) < 2:
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert len(trimmed) == 2


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (TEXT, {"prompt": ["a", "b"], "n": 4, "logprobs": 20, "max_tokens": 100}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "n": 8, **CHAT_LOGPROBS},
        ),
        (
            "/generate",
            {"text": ["a", "b"], "return_logprob": True, "top_logprobs_num": 20, **NATIVE_PARAMS},
        ),
    ],
)
def test_large_answers_are_written_off_the_event_loop_and_are_the_same(
    http: httpx.Client,
    server: RunningServer,
    path: str,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.engine.script = lambda ids: [97] * 100
    threads: list[int] = []

    def seen(value: Any) -> Any:
        threads.append(threading.get_ident())
        return body.written(value)

    for module in (chat, completions, native):
        monkeypatch.setattr(module, "written", seen)
    loop = server.call(threading.get_ident)
    large = http.post(path, json=asked).json()
    assert threads
    assert loop not in threads
    monkeypatch.setattr(stream, "INLINE_VALUES", 10**9)
    threads.clear()
    small = http.post(path, json=asked).json()
    assert set(threads) == {loop}
    assert without_names(large) == without_names(small)


entered = threading.Event()  # a thread has begun to make the decoder of a body
other_ended = threading.Event()


def slow_type() -> type[int]:
    """The type of a field, for a decoder whose making takes long."""
    entered.set()
    other_ended.wait(0.3)
    return int


def test_two_threads_that_meet_a_type_of_body_first_decode_it_one_after_the_other() -> None:
    # Without that, the second thread reads what msgspec has of the type so far, and crashes.
    part = msgspec.defstruct("Part", [("number", "slow_type()")], module=__name__)
    whole = msgspec.defstruct("Whole", [("parts", list[part])], module=__name__)  # type: ignore[valid-type]
    numbers: list[int] = []

    def decode() -> None:
        decoded: Any = body._decoder(whole).decode(b'{"parts": [{"number": 7}]}')
        numbers.append(decoded.parts[0].number)

    first = threading.Thread(target=decode)
    first.start()
    assert entered.wait(HANG_S)
    second = threading.Thread(target=decode)
    second.start()
    second.join(0.1)
    other_ended.set()
    first.join()
    second.join()
    assert numbers == [7, 7]
