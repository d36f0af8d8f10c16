"""Pictures, videos and sounds over HTTP, in every API, before a fake engine."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import httpx
import numpy as np
import openai
import pytest

from tests.server.fake import HANG_S, RunningServer, eventually, running
from tests.text.media_fakes import HEARING, SEEING, animation, picture, saved, wav
from tests.text.tokens import infill_tokenizer
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.messages.requests import GenerateRequest
from weft.server.media import ServedMedia
from weft.text.media.loader import MediaLoader
from weft.text.media.reader_helper import MediaReaders

PAD = 260
PNG = saved(picture(8, 8))  # 2 tokens
WIDE = saved(picture(20, 8, (0, 255, 0)))  # 5 tokens


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes, type: str = "image/png") -> str:
    return f"data:{type};base64,{text_of(data)}"


def image_part(data: bytes = PNG, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data), **fields}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.fixture(scope="module")
def shared_seeing() -> Iterator[RunningServer]:
    tokenizer = infill_tokenizer("<pad>")
    with running(processor=SEEING, tokenizer=tokenizer) as server:
        yield server


@pytest.fixture
def seeing(shared_seeing: RunningServer) -> RunningServer:
    shared_seeing.reset()
    return shared_seeing


@pytest.fixture
def web(seeing: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=seeing.url, timeout=HANG_S) as client:
        yield client


def prompt_of(server: RunningServer, request: GenerateRequest) -> str:
    ids = np.frombuffer(request.input_ids, dtype=np.int32).tolist()
    return server.tokenizer.decode(ids, skip_special_tokens=False)


def check(server: RunningServer, *lens: int) -> GenerateRequest:
    """The one request that the engine has seen: parts of these lengths, at their placeholders."""
    [request] = server.engine.seen
    ids = np.frombuffer(request.input_ids, dtype=np.int32)
    covered = []
    for item in request.media:
        covered += range(item.start, item.start + item.length)
    assert covered == np.flatnonzero(ids == PAD).tolist()
    assert tuple(item.length for item in request.media) == lens
    assert all(len(item.digest) == 32 and item.values for item in request.media)
    return request


def test_a_picture_in_a_chat_reaches_the_engine(web: httpx.Client, seeing: RunningServer) -> None:
    content = [text_part("What is"), image_part(detail="low"), text_part("?")]
    answer = web.post("/v1/chat/completions", json={"messages": user(*content)})
    assert answer.status_code == 200, answer.text
    request = check(seeing, 2)
    told = "<|im_start|>user\nWhat is\n<<pad><pad>>\n?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(seeing, request) == told
    [item] = request.media
    assert item.kind == "image"
    assert item.grid == (1, 1, 2)
    assert item.shape == (3,)
    assert item.values == np.array([255, 0, 0], dtype="<f4").tobytes()
    usage = answer.json()["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 2
    assert usage["prompt_tokens"] == len(request.input_ids) // 4


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": url_of(PNG)},
        {"type": "image_url", "image_url": {"url": url_of(PNG, "text/plain"), "detail": "high"}},
        {"type": "input_image", "image_url": url_of(PNG), "detail": "auto"},
        {"type": "image", "image": text_of(PNG)},
        {"type": "image", "image": url_of(PNG)},
    ],
)
def test_all_forms_of_a_part_are_taken(
    web: httpx.Client, seeing: RunningServer, part: dict[str, Any]
) -> None:
    answer = web.post("/v1/chat/completions", json={"messages": user(part)})
    assert answer.status_code == 200, answer.text
    check(seeing, 2)


def test_the_clients_of_openai_and_anthropic_send_pictures(seeing: RunningServer) -> None:
    options: Any = {"api_key": "none", "max_retries": 0, "timeout": HANG_S}
    with openai.OpenAI(base_url=f"{seeing.url}/v1", **options) as client:
        messages: Any = user(text_part("a"), image_part(), image_part(WIDE))
        chat = client.chat.completions.create(model="default", messages=messages)
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        check(seeing, 2, 5)
        seeing.engine.seen.clear()
        content = [
            {"type": "input_text", "text": "a"},
            {"type": "input_image", "image_url": url_of(WIDE), "detail": "auto"},
        ]
        items: Any = [{"role": "user", "content": content}]
        first = client.responses.create(model="default", input=items)
        check(seeing, 5)
        assert first.usage is not None
        told: Any = first.usage.input_tokens_details
        assert told.image_tokens == 5
        kept = client.responses.input_items.list(first.id)
        assert kept.data[0].content[1].image_url == url_of(WIDE)  # type: ignore[union-attr,index]
        seeing.engine.seen.clear()
        client.responses.create(model="default", input="And?", previous_response_id=first.id)
        check(seeing, 5)
    seeing.engine.seen.clear()
    with anthropic.Anthropic(base_url=seeing.url, **options) as other:
        source = {"type": "base64", "media_type": "image/jpeg", "data": text_of(WIDE)}
        blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
        system = "Be brief."
        message: Any = {"role": "user", "content": blocks}
        other.messages.create(model="default", max_tokens=5, system=system, messages=[message])
        request = check(seeing, 5)
        counted = other.messages.count_tokens(model="default", system=system, messages=[message])
        assert counted.input_tokens == len(request.input_ids) // 4


def test_a_picture_stands_in_the_result_of_a_tool(web: httpx.Client, seeing: RunningServer) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": text_of(PNG)}
    result = [{"type": "text", "text": "screen:"}, {"type": "image", "source": source}]
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look"}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": result}],
        },
    ]
    answer = web.post("/v1/messages", json={"max_tokens": 5, "messages": messages})
    assert answer.status_code == 200, answer.text
    told = prompt_of(seeing, check(seeing, 2))
    assert "<tool_response>\nscreen:\n<<pad><pad>>\n\n</tool_response><|im_end|>" in told
    seeing.engine.seen.clear()
    call = {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"}
    output = [{"type": "input_image", "image_url": url_of(WIDE)}]
    items = [call, {"type": "function_call_output", "call_id": "t", "output": output}]
    assert web.post("/v1/responses", json={"input": items}).status_code == 200
    check(seeing, 5)
    seeing.engine.seen.clear()
    messages = [*user("x")[:0], {"role": "user", "content": "x"}]
    messages += [{"role": "tool", "tool_call_id": "t", "content": [image_part(WIDE)]}]
    assert web.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    check(seeing, 5)


def test_ollama_has_images_beside_the_text(web: httpx.Client, seeing: RunningServer) -> None:
    message = {"role": "user", "content": "What?", "images": [text_of(PNG), text_of(WIDE)]}
    assert web.post("/api/chat", json={"messages": [message]}).status_code == 200
    told = prompt_of(seeing, check(seeing, 2, 5))
    assert "<<pad><pad>>\n<<pad><pad><pad><pad><pad>>\nWhat?" in told
    seeing.engine.seen.clear()
    body = {"prompt": "What?", "images": [text_of(PNG)]}
    assert web.post("/api/generate", json=body).status_code == 200
    check(seeing, 2)
    refused = web.post("/api/generate", json={**body, "raw": True})
    assert refused.status_code == 400
    assert "chat template" in refused.text
    shown = web.post("/api/show", json={"model": ""}).json()
    assert "vision" in shown["capabilities"]
    assert web.get("/model_info").json()["has_image_understanding"] is True


def test_generate_takes_pictures_at_marks_or_at_placeholders(
    web: httpx.Client, seeing: RunningServer
) -> None:
    few = {"sampling_params": {"max_new_tokens": 3}}
    body = {"text": "see <image> and <image>.", "image_data": [text_of(PNG), url_of(WIDE)], **few}
    answer = web.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    request = check(seeing, 2, 5)
    assert prompt_of(seeing, request) == "see <<pad><pad>> and <<pad><pad><pad><pad><pad>>."
    ids = np.frombuffer(request.input_ids, dtype=np.int32).tolist()
    seeing.engine.seen.clear()
    again = {"input_ids": ids, "image_data": [{"url": url_of(PNG)}, text_of(WIDE)], **few}
    assert web.post("/generate", json=again).status_code == 200
    assert check(seeing, 2, 5).media == request.media
    seeing.engine.seen.clear()
    one = {"text": "<image>", "image_data": text_of(PNG), **few}
    assert web.post("/generate", json=one).status_code == 200
    check(seeing, 2)
    seeing.engine.seen.clear()
    shorter = {**again, "input_ids": ids[1:]}
    assert web.post("/generate", json=shorter).status_code == 200
    check(seeing, 2, 5)
    for wrong, words in [
        ({**again, "input_ids": ids[6:]}, "input_ids: the prompt has 6 tokens"),
        (
            {**body, "text": "no mark"},
            "text: the prompt has the mark '<image>' 0 times for 2 images",
        ),
        ({**body, "truncate_prompt_tokens": 5}, "exclude each other"),
        ({**body, "session_params": {"id": "s"}}, "a session remembers token ids"),
        ({"input_embeds": [[1, 2, 3]], "image_data": "x"}, "exclude each other"),
        ({**one, "image_data": 5}, "neither an address nor base64"),
        ({**one, "audio_data": text_of(PNG)}, "takes no sounds"),
    ]:
        refused = web.post("/generate", json=wrong)
        assert refused.status_code == 400
        assert words in refused.text


def test_a_batch_has_pictures_for_each_prompt(web: httpx.Client, seeing: RunningServer) -> None:
    body = {
        "text": ["<image>", "none", "<image><image>"],
        "image_data": [text_of(PNG), None, [text_of(WIDE), text_of(PNG)]],
        "sampling_params": {"max_new_tokens": 2, "n": 2},
    }
    answer = web.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    lens = [[item.length for item in request.media] for request in seeing.engine.seen]
    assert lens == [[2], [2], [], [], [5, 2], [5, 2]]
    refused = web.post("/generate", json={**body, "image_data": [text_of(PNG)]})
    assert refused.status_code == 400
    assert "has the length 1; 3 is expected, an entry for each prompt" in refused.text


def test_several_completions_share_their_pictures(web: httpx.Client, seeing: RunningServer) -> None:
    messages = user(image_part(), text_part("x"))
    answer = web.post("/v1/chat/completions", json={"messages": messages, "n": 3})
    assert len(answer.json()["choices"]) == 3
    digests = {request.media[0].digest for request in seeing.engine.seen}
    assert len(seeing.engine.seen) == 3
    assert len(digests) == 1


def test_pictures_in_several_turns_keep_their_order(
    web: httpx.Client, seeing: RunningServer
) -> None:
    messages = [
        *user(image_part(WIDE), text_part("first")),
        {"role": "assistant", "content": "green"},
        *user(text_part("second"), image_part(), image_part(WIDE)),
    ]
    assert web.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    request = check(seeing, 5, 2, 5)
    assert request.media[0].digest == request.media[2].digest != request.media[1].digest


def test_a_stream_tells_the_tokens_of_pictures(web: httpx.Client, seeing: RunningServer) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"messages": user(image_part(WIDE)), **options}
    lines = web.post("/v1/chat/completions", json=body).text.strip().split("\n\n")
    usage = json.loads(lines[-2].removeprefix("data: "))["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 5


def test_a_video_has_frames(web: httpx.Client, seeing: RunningServer) -> None:
    part = {"type": "video_url", "video_url": {"url": url_of(animation(3), "video/gif")}}
    answer = web.post("/v1/chat/completions", json={"messages": user(part, image_part())})
    assert answer.status_code == 200, answer.text
    request = check(seeing, 2, 2, 2, 2)
    assert [item.kind for item in request.media] == ["video"] * 3 + ["image"]
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details["video_tokens"] == 6
    assert details["image_tokens"] == 2


ANTHROPIC_WIDE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": text_of(WIDE)},
}
INPUT_WIDE = {"type": "input_image", "image_url": url_of(WIDE)}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": user(image_part(WIDE))}),
        ("/v1/messages", {"messages": user(ANTHROPIC_WIDE), "max_tokens": 4}),
        ("/v1/responses", {"input": user(INPUT_WIDE)}),
        ("/generate", {"text": "<image>", "image_data": text_of(WIDE)}),
    ],
)
def test_a_request_says_how_large_its_pictures_are(
    web: httpx.Client, seeing: RunningServer, route: str, body: dict[str, Any]
) -> None:
    answer = web.post(route, json={**body, "mm_processor_kwargs": {"max_width": 8}})
    assert answer.status_code == 200, answer.text
    check(seeing, 2)
    answer = web.post(route, json={**body, "mm_processor_kwargs": {"depth": 8}})
    assert answer.status_code == 400
    assert "mm_processor_kwargs has 'depth'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "x"}),
        ("/generate", {"text": "x"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
        ("/api/generate", {"prompt": "x", "stream": False}),
    ],
)
def test_wrong_sizes_of_pictures_are_refused_also_without_a_picture(
    web: httpx.Client, seeing: RunningServer, route: str, body: dict[str, Any]
) -> None:
    answer = web.post(route, json={**body, "mm_processor_kwargs": {"max_width": 8}})
    assert answer.status_code == 200, answer.text
    for wrong, words in [
        ({"depth": 8}, "mm_processor_kwargs has 'depth'; "),
        ({"max_width": "wide"}, "max_width is 'wide'; a whole number above 0 is expected"),
    ]:
        answer = web.post(route, json={**body, "mm_processor_kwargs": wrong})
        assert answer.status_code == 400
        assert words in answer.text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "", "images": [text_of(WIDE)]}]}),
        ("/api/generate", {"prompt": "What?", "images": [text_of(WIDE)]}),
    ],
)
def test_ollama_says_how_large_its_pictures_are(
    web: httpx.Client, seeing: RunningServer, route: str, body: dict[str, Any]
) -> None:
    sized = {**body, "stream": False, "mm_processor_kwargs": {"max_width": 8}}
    assert web.post(route, json=sized).status_code == 200
    check(seeing, 2)
    answer = web.post(route, json={**sized, "mm_processor_kwargs": {"depth": 8}})
    assert answer.status_code == 400
    assert "mm_processor_kwargs has 'depth'" in answer.text


def test_tokens_are_counted_with_those_of_pictures(
    web: httpx.Client, seeing: RunningServer
) -> None:
    messages = user(image_part(WIDE), text_part("x"))
    told = web.post("/tokenize", json={"messages": messages}).json()
    assert told["tokens"].count(PAD) == 5
    counted = web.post("/v1/chat/completions/input_tokens", json={"messages": messages}).json()
    assert counted["input_tokens"] == told["count"]
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": url_of(WIDE)}]}]
    counted = web.post("/v1/responses/input_tokens", json={"input": items}).json()
    assert counted["input_tokens"] == told["count"] - 2
    text = web.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert "user\n<image>\nx<|im_end|>" in text
    answer = web.post(
        "/v1/chat/completions", json={"messages": messages, "input_ids": told["tokens"]}
    )
    assert answer.status_code == 200, answer.text
    check(seeing, 5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([image_part(b"hello")], "messages[0].content[0]: its bytes begin like no known format"),
        ([text_part("a"), image_part(b"<svg/>")], "messages[0].content[1]: it is an SVG"),
        ([{"type": "image_url"}], "messages[0].content[0] has no image_url"),
        ([{"type": "image_url", "image_url": {"url": ""}}], "has no image_url"),
        ([{"type": "image_url", "image_url": "http://x/a"}], "--allowed-media-domains"),
        ([{"type": "image_url", "image_url": "file:///etc/passwd"}], "--allowed-local-media-path"),
        ([{"type": "image_url", "image_url": "abc"}], "of the kind 'abc'"),
        ([{"type": "input_image", "file_id": "f"}], "uploaded files serve batches only"),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}], "no sounds"),
        ([image_part(detail="huge")], "'huge'"),
        ([text_part("<image>"), image_part()], "mark '<image>' 2 times for 1 image"),
        ([text_part("<pad>"), image_part()], "has 3 tokens that stand for parts of media"),
        ([image_part()] * 65, "the prompt has 65 images; 64 are allowed"),
        ([{"type": "file", "file": {}}], "messages[0].content[0] is of type 'file', which"),
        ([image_part(saved(picture(1, 9)))], "too narrow for this model"),
    ],
)
def test_impossible_values_are_refused_by_name(
    web: httpx.Client, seeing: RunningServer, content: list[Any], words: str
) -> None:
    answer = web.post("/v1/chat/completions", json={"messages": user(*content)})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert seeing.engine.seen == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"truncate_prompt_tokens": 9}, "a prompt is never cut inside of one"),
        ({"session_params": {"id": "s"}}, "a session remembers token ids"),
        ({"input_ids": [1, 2, 3]}, "input_ids: the prompt has 0 tokens"),
    ],
)
def test_fields_that_exclude_pictures_are_refused(
    web: httpx.Client, seeing: RunningServer, fields: dict[str, Any], words: str
) -> None:
    body = {"messages": user(image_part()), **fields}
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert words in answer.text
    assert seeing.engine.seen == []


def test_a_prompt_that_pictures_make_too_long_is_refused_with_both_numbers(
    web: httpx.Client, seeing: RunningServer
) -> None:
    long = saved(picture(4 * 1_990, 40))
    answer = web.post("/v1/chat/completions", json={"messages": user(image_part(long))})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert "1,990 of them stand for images" in error["message"]
    assert "2,000" in error["message"]
    answer = web.post("/v1/chat/completions", json={"messages": user(*[image_part(long)] * 9)})
    assert answer.status_code == 400
    assert (
        "the prompt's images, videos and sounds (the first 2 of 9) have 3,980 tokens" in answer.text
    )
    assert (
        web.post("/v1/chat/completions", json={"messages": user(image_part())}).status_code == 200
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": user(image_part())}),
        ("/tokenize", {"messages": user(image_part())}),
        ("/v1/responses", {"input": user({"type": "input_image", "image_url": "https://x/y"})}),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": user(
                    {"type": "image", "source": {"type": "url", "url": "https://x/y"}}
                ),
            },
        ),
        ("/api/chat", {"messages": [{"role": "user", "images": ["AAAA"]}]}),
        ("/api/generate", {"prompt": "x", "images": ["AAAA"]}),
        ("/generate", {"text": "<image>", "image_data": "AAAA"}),
    ],
)
def test_a_model_of_texts_takes_no_images(
    http: httpx.Client, server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert "this model takes no images" in answer.text
    assert server.engine.seen == []


def test_sounds_are_taken_in_all_forms_by_a_model_that_hears() -> None:
    sound = wav(3_000)
    parts = [
        {"type": "input_audio", "input_audio": {"data": text_of(sound), "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": url_of(sound, "audio/wav")}},
        {"type": "audio_url", "audio_url": {"url": url_of(sound, "audio/wav")}},
        {"type": "audio", "audio": text_of(sound)},
    ]
    limits = Limits(max_audio_s=0.5)
    tokenizer = infill_tokenizer("<pad>")
    with (
        running(limits=limits, processor=HEARING, tokenizer=tokenizer) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for part in parts:
            answer = http.post("/v1/chat/completions", json={"messages": user(part, part)})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens_details"]["audio_tokens"] == 6
            check(server, 3, 3)
            server.engine.seen.clear()
        item = {"type": "input_audio", "input_audio": {"data": text_of(sound), "format": "wav"}}
        answer = http.post("/v1/responses", json={"input": user(item)})
        assert answer.status_code == 200, answer.text
        check(server, 3)
        server.engine.seen.clear()
        body = {"text": "a<sound>", "audio_data": [text_of(sound)]}
        assert http.post("/generate", json=body).status_code == 200
        check(server, 3)
        server.engine.seen.clear()
        for part, words in [
            (image_part(), "takes no images"),
            (
                {"type": "audio_url", "audio_url": url_of(wav(9_000))},
                "lasts more than 0.5 s, which --max-audio-s allows",
            ),
            ({"type": "audio_url", "audio_url": url_of(PNG)}, "messages[0].content[0]: "),
            ({"type": "audio_url", "audio_url": url_of(sound[:40])}, "messages[0].content[0]: "),
        ]:
            answer = http.post("/v1/chat/completions", json={"messages": user(part)})
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]
        assert 'weft:refused_total{limit="max_audio_s"} 1' in http.get("/metrics").text
        assert server.engine.seen == []


def limited(limits: Limits, config: ServerConfig | None = None) -> Any:
    return running(config, limits=limits, processor=SEEING, tokenizer=infill_tokenizer("<pad>"))


@pytest.mark.parametrize(
    ("limit", "value", "part", "status"),
    [
        ("max_media_mb", 0.02, image_part(bytes(15_000)), 413),
        ("max_media_mb", 0.02, image_part(bytes(20_000)), 413),
        ("max_image_pixels", 50, image_part(), 400),
        ("max_video_frames", 2, {"type": "video_url", "video_url": url_of(animation(3))}, 400),
        ("max_video_pixels", 100, {"type": "video_url", "video_url": url_of(animation(3))}, 400),
    ],
)
def test_limits_of_media_are_kept_and_counted(
    limit: str, value: float, part: dict[str, Any], status: int
) -> None:
    limits = Limits(**{"max_body_mb": 0.001, limit: value})
    with limited(limits) as server, httpx.Client(base_url=server.url) as http:
        parts = [part]
        if limit == "max_media_mb" and len(json.dumps(part)) < 25_000:
            parts = [part, text_part("x" * 1_000)]
        answer = http.post("/v1/chat/completions", json={"messages": user(*parts)})
        assert answer.status_code == status, answer.text
        assert f'weft:refused_total{{limit="{limit}"}} 1' in http.get("/metrics").text
        assert server.engine.seen == []


def test_settings_say_how_many_and_from_where(tmp_path: Any) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    config = ServerConfig(
        limit_mm_per_prompt='{"image": 1}', allowed_local_media_path=str(tmp_path)
    )
    with limited(Limits(), config) as server, httpx.Client(base_url=server.url) as http:
        part = {"type": "image_url", "image_url": f"file://{tmp_path}/a.png"}
        answer = http.post("/v1/chat/completions", json={"messages": user(part)})
        assert answer.status_code == 200, answer.text
        check(server, 2)
        answer = http.post("/v1/chat/completions", json={"messages": user(part, part)})
        assert "2 images; 1 are allowed (--limit-mm-per-prompt)" in answer.text


def test_open_requests_keep_no_more_than_they_may() -> None:
    """The values of a picture are three numbers; its two completions share them."""
    body = {"messages": user(image_part(), image_part(WIDE)), "n": 2}
    with (
        limited(Limits(max_open_embeds_mb=24e-6)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    with (
        limited(Limits(max_open_embeds_mb=23e-6)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "up to messages[0].content[1] have 0.0 MB for the encoder" in answer.text
        few = {"max_new_tokens": 2}
        batch = {"text": ["<image>"] * 2, "image_data": [text_of(PNG)] * 2, "sampling_params": few}
        answer = http.post("/generate", json=batch)
        assert answer.status_code == 400
        assert "up to image_data[1]" in answer.text
        server.engine.hold = True
        one = {"text": "<image>", "image_data": text_of(PNG), "sampling_params": few}
        with ThreadPoolExecutor() as pool:
            held = pool.submit(http.post, "/generate", json=one)
            assert eventually(lambda: server.engine.seen)
            assert http.post("/generate", json=one).status_code == 503
            server.engine.hold = False
            assert held.result().status_code == 200


def test_what_loads_media_has_no_threads_and_no_readers_after_its_end() -> None:
    ended: list[str] = []
    readers = SimpleNamespace(close=lambda: ended.append("readers"))
    media = ServedMedia(cast(MediaLoader, None), cast(MediaReaders, readers), 1.0, 1)

    async def work() -> list[threading.Thread]:
        workers = (media._fetchers, media._threads)
        threads = [await one.run(threading.current_thread) for one in workers]
        media.close()
        return threads

    for thread in asyncio.run(work()):
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert ended == ["readers"]
