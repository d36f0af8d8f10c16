"""A real server with the bundled model, as a user sees it."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import random
import signal
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from tests.e2e.server import Server, wait_until

CODE = "import os\n\ndef read_lines(path):\n"
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # In float32, for in bfloat16 a prompt that is found in the cache may round otherwise and turn a
    # near tie.
    server = Server("--overlap", "on", "--dtype", "float32", "--drain-s", "600")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def model_name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


# The OpenAI SDK


def test_a_chat_turn_gives_text_and_stops(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=model_name(client),
        messages=[{"role": "user", "content": "Who are you?"}],
        temperature=0,
        max_tokens=400,
    )
    choice = answer.choices[0]
    assert choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_turn_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    name = model_name(client)
    whole = client.chat.completions.create(
        model=name, messages=QUESTION, temperature=0, max_tokens=60
    )
    stream = client.chat.completions.create(
        model=name,
        messages=QUESTION,
        temperature=0,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_take_strings_token_ids_and_lists(
    client: openai.OpenAI, server: Server
) -> None:
    name = model_name(client)
    ids = server.post("/tokenize", prompt=CODE)["tokens"]
    as_text = client.completions.create(model=name, prompt=CODE, temperature=0, max_tokens=12)
    as_ids = client.completions.create(model=name, prompt=ids, temperature=0, max_tokens=12)
    as_list = client.completions.create(
        model=name, prompt=[CODE, "class A:\n"], temperature=0, max_tokens=12
    )
    assert as_text.choices[0].text == as_ids.choices[0].text == as_list.choices[0].text
    assert [choice.index for choice in as_list.choices] == [0, 1]
    echoed = client.completions.create(
        model=name, prompt=CODE, temperature=0, max_tokens=12, echo=True
    )
    assert echoed.choices[0].text == CODE + as_text.choices[0].text


def test_several_completions_share_the_prompt_and_differ(
    client: openai.OpenAI, server: Server
) -> None:
    server.post("/flush_cache")
    before = server.load()["stats"].get("total_prefilled_tokens", 0)
    answer = client.completions.create(
        model=model_name(client), prompt=CODE * 8, n=4, seed=7, max_tokens=16
    )
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) > 1
    assert answer.usage is not None
    prefilled = server.load()["stats"]["total_prefilled_tokens"] - before
    assert prefilled < 2 * answer.usage.prompt_tokens
    again = client.completions.create(
        model=model_name(client), prompt=CODE * 8, n=4, seed=7, max_tokens=16
    )
    assert [choice.text for choice in again.choices] == texts


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = "# " + "weft " * 60
    for cached in (False, True):
        usage = client.completions.create(
            model=model_name(client), prompt=prompt, max_tokens=2
        ).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) is cached


def test_logprobs_of_a_greedy_token_are_the_highest(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=model_name(client),
        messages=QUESTION,
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content
    for entry in content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert entry.logprob <= 0


def test_a_stop_string_ends_the_text_and_the_request(client: openai.OpenAI, server: Server) -> None:
    name = model_name(client)
    text = (
        client.completions.create(model=name, prompt=CODE, temperature=0, max_tokens=40)
        .choices[0]
        .text
    )
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = client.completions.create(
        model=name, prompt=CODE, temperature=0, max_tokens=40, stop=[middle]
    )
    assert stopped.choices[0].text == text[: text.index(middle)]
    assert stopped.choices[0].finish_reason == "stop"
    assert wait_until(lambda: server.load()["num_used_tokens"] == 0)


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    name = model_name(client)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=name, prompt="x", temperature=9)
    with pytest.raises(openai.BadRequestError, match=r"2,?048"):
        client.completions.create(model=name, prompt="x", max_tokens=100_000)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")


# Behaviour


def test_a_forced_call_is_valid_however_weak_the_model(client: openai.OpenAI) -> None:
    city = {
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    parameters = {"type": "object", **city}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    options = {
        "model": model_name(client),
        "messages": QUESTION,
        "tools": tools,
        "tool_choice": "required",
    }
    for seed in range(3):
        answer = client.chat.completions.create(
            **options, parallel_tool_calls=False, seed=seed, max_tokens=200
        )
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        assert answer.choices[0].finish_reason == "tool_calls"


def test_greedy_text_does_not_depend_on_the_batch(client: openai.OpenAI) -> None:
    name = model_name(client)
    prompts = [f"def function_{i}(a, b):\n" for i in range(12)]

    def complete(prompt: str) -> str:
        answer = client.completions.create(model=name, prompt=prompt, temperature=0, max_tokens=10)
        return answer.choices[0].text

    alone = [complete(prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        together = list(pool.map(complete, prompts))
    assert together == alone


def raw_stream(
    server: Server, **body: object
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=240)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    return connection, connection.getresponse()


def test_a_client_that_leaves_frees_its_memory(server: Server) -> None:
    with server.slowed(1.0):
        connection, answer = raw_stream(
            server, prompt=CODE, max_tokens=1900, stream=True, ignore_eos=True
        )
        answer.readline()
        assert wait_until(lambda: server.load()["num_used_tokens"] > 0)
        answer.close()
        connection.close()
        assert wait_until(lambda: server.load()["num_used_tokens"] == 0)


def test_abort_by_name_ends_that_request_only(server: Server) -> None:
    with server.slowed():
        streams = [
            raw_stream(server, prompt=CODE, max_tokens=1500, stream=True, ignore_eos=True, rid=rid)
            for rid in ("req-1", "req-10")
        ]
        for _, answer in streams:
            answer.readline()
        server.post("/abort_request", rid="req-1")
        ended = streams[0][1].read().decode()
        assert '"abort"' in ended
        assert ended.rstrip().endswith("[DONE]")
        assert server.load()["num_total_reqs"] == 1
        server.post("/abort_request", abort_all=True)
        assert '"abort"' in streams[1][1].read().decode()
    for connection, answer in streams:
        answer.close()
        connection.close()
    assert wait_until(lambda: server.load()["num_used_tokens"] == 0)


def test_an_abort_storm_ends_with_no_slot_in_use(server: Server) -> None:
    rng = random.Random(0)
    golden = server.post(
        "/generate", text=CODE, sampling_params={"temperature": 0, "max_new_tokens": 12}
    )["text"]

    def one(index: int) -> None:
        body: dict[str, object] = {
            "prompt": CODE * rng.randrange(1, 20),
            "max_tokens": rng.randrange(1, 200),
            "stream": rng.random() < 0.7,
            "rid": f"storm-{index % 40}",
        }
        connection, answer = raw_stream(server, **body) if body["stream"] else (None, None)
        if answer is None or connection is None:
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=240)
            headers = {"Content-Type": "application/json"}
            connection.request(
                "POST", "/v1/completions", json.dumps(body).encode(), headers=headers
            )
            time.sleep(rng.random() * 0.1)
        else:
            for _ in range(rng.randrange(0, 6)):
                answer.readline()
        if rng.random() < 0.3:
            server.post("/abort_request", rid=f"storm-{rng.randrange(40)}")
        if answer is not None:
            if rng.random() < 0.1:
                answer.read()
            answer.close()
        connection.close()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(100)))
    assert wait_until(lambda: server.load()["num_total_reqs"] == 0)
    assert wait_until(lambda: server.load()["num_used_tokens"] == 0)
    again = server.post(
        "/generate", text=CODE, sampling_params={"temperature": 0, "max_new_tokens": 12}
    )["text"]
    assert again == golden


def test_an_idle_server_uses_no_cpu(server: Server) -> None:
    def cpu_s() -> float:
        times = [
            process.cpu_times() for process in (psutil.Process(server.process.pid), server.engine)
        ]
        return sum(t.user + t.system for t in times)

    def is_at_rest() -> bool:
        before = cpu_s()
        time.sleep(2.0)
        return cpu_s() - before < 0.1

    assert wait_until(lambda: server.load()["num_total_reqs"] == 0)
    assert wait_until(is_at_rest)


# Ends


def test_when_the_engine_is_killed_every_client_gets_an_error_and_the_front_says_why() -> None:
    server = Server()
    connection, answer = raw_stream(
        server, prompt=CODE, max_tokens=1900, stream=True, ignore_eos=True
    )
    answer.readline()
    server.engine.kill()
    ended = answer.read().decode()
    answer.close()
    connection.close()
    assert '"error"' in ended
    assert ended.rstrip().endswith("[DONE]")
    assert server.process.wait(240) != 0
    server.stop()
    assert "kill" in server.lines[-1]


def test_the_engine_ends_with_its_parent() -> None:
    server = Server()
    server.process.kill()
    assert wait_until(
        lambda: not server.engine.is_running() or server.engine.status() == psutil.STATUS_ZOMBIE
    )
    server.stop(signal.SIGKILL)


def test_a_stopped_server_finishes_what_is_open(server: Server) -> None:
    engine = server.engine
    connection, answer = raw_stream(
        server, prompt=CODE, max_tokens=60, stream=True, ignore_eos=True
    )
    answer.readline()
    server.process.send_signal(signal.SIGINT)
    ended = answer.read().decode()
    answer.close()
    connection.close()
    assert '"length"' in ended
    assert server.stop() == 0
    assert not engine.is_running()
