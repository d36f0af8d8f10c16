"""Routes beside chat and completions: native, tokens, administration, health, metrics."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake import CONTEXT, MODEL, READY, RunningServer, as_bytes, eventually, running
from tests.text.tokens import EOS
from weft.messages.status import EngineFailed
from weft.observe.metrics import Metrics
from weft.server.app import OPERATIONS

HI = [{"role": "user", "content": "Hi"}]


def test_generate_answers_as_sglang_does(http: httpx.Client, server: RunningServer) -> None:
    server.engine.script = lambda ids: as_bytes("ab")
    answer = http.post(
        "/generate", json={"text": "xyz", "sampling_params": {"temperature": 0}, "rid": "r1"}
    ).json()
    assert answer["text"] == "ab"
    assert answer["output_ids"] == [97, 98, EOS]
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "default",
    }
    assert server.engine.seen[0].sampling.max_new_tokens == 128


def test_generate_takes_ids_and_put(http: httpx.Client, server: RunningServer) -> None:
    server.engine.script = lambda ids: ids
    body = {"input_ids": [97, 98], "sampling_params": {"max_new_tokens": 2}}
    answer = http.put("/generate", json=body).json()
    assert answer["text"] == "ab"
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


def test_generate_answers_a_batch_with_a_list(http: httpx.Client, server: RunningServer) -> None:
    server.engine.script = lambda ids: ids
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 9, "n": 2}]
    body = {"text": ["one", "two"], "sampling_params": params, "rid": ["a", "b"]}
    answers = http.post("/generate", json=body).json()
    assert [answer["text"] for answer in answers] == ["o", "two", "two"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "b"]
    answers = http.post("/generate", json={"input_ids": [[97], [98]], "rid": "c"}).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["c-0", "c-1"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_extra_key_keeps_caches_apart_as_cache_salt_does(
    http: httpx.Client, server: RunningServer, path: str
) -> None:
    server.engine.script = lambda ids: as_bytes("a")
    prompt = {"text": "x"} if path == "/generate" else {"prompt": "x"}
    keys: list[dict[str, str]] = [
        {},
        {"cache_salt": "a"},
        {"extra_key": "a"},
        {"extra_key": "b"},
        {"cache_salt": "a", "extra_key": "b"},
    ]
    for key in keys:
        assert http.post(path, json=prompt | key).status_code == 200
    salts = [request.cache_salt for request in server.engine.seen[-len(keys) :]]
    assert salts[0] == ""
    assert len(set(salts)) == len(keys)
    assert http.post(path, json=prompt | {"extra_key": "x" * 1000}).status_code == 400


def test_generate_returns_logprobs(http: httpx.Client, server: RunningServer) -> None:
    server.engine.script = lambda ids: as_bytes("a")
    body = {
        "text": "x",
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    meta = http.post("/generate", json=body).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 97, "a"], [-0.5, EOS, "<eos>"]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 97, "a"], [-1.5, 98, "b"]]
    assert meta["input_token_logprobs"] == []


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(http: httpx.Client, prefix: str) -> None:
    answer = http.post(
        f"{prefix}/tokenize", json={"prompt": "hö", "return_token_strs": True}
    ).json()
    ids = as_bytes("hö")
    strs = ["h", "bytes:\\xc3", "bytes:\\xb6"]
    assert answer == {"tokens": ids, "count": 3, "max_model_len": CONTEXT, "token_strs": strs}
    back = http.post(f"{prefix}/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": "hö", "text": "hö"}


def test_tokenize_lists_and_messages(http: httpx.Client, server: RunningServer) -> None:
    answer = http.post("/tokenize", json={"prompt": ["a", "bc"]}).json()
    assert answer["tokens"] == [[97], [98, 99]]
    assert answer["count"] == [1, 2]
    assert http.post("/detokenize", json={"tokens": [[97], [98, 99]]}).json()["text"] == ["a", "bc"]
    assert http.post("/detokenize", json={"tokens": []}).json()["text"] == ""
    count = http.post("/tokenize", json={"messages": HI}).json()["count"]
    http.post("/v1/chat/completions", json={"messages": HI})
    assert len(server.engine.seen[0].input_ids) // 4 == count


def test_cache_is_flushed_only_while_idle(http: httpx.Client, server: RunningServer) -> None:
    assert http.post("/flush_cache").status_code == 200
    server.engine.busy = True
    answer = http.post("/flush_cache?timeout=0.1")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "busy"
    for wrong in ("x", "-1", "nan", "inf", "1e9"):
        assert http.post(f"/flush_cache?timeout={wrong}").status_code == 400


def test_abort_of_unknown_and_of_all(http: httpx.Client, server: RunningServer) -> None:
    assert http.post("/abort_request", json={"rid": "unknown"}).json() == {"aborted": 0}
    assert http.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 0}
    assert http.post("/abort_request", json={}).status_code == 400


def test_information_holds_no_secrets_and_no_paths(http: httpx.Client) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = http.get(path).json()
        assert info["version"] == "0.1.0"
        assert info["engine"] == {"dtype": "auto"}
        assert info["internal_states"][0]["max_total_num_tokens"] == 8_000
        assert not {"api_key", "admin_api_key", "chat_template"} & info["server"].keys()
    for path in ("/model_info", "/get_model_info"):
        info = http.get(path).json()
        assert (info["model_path"], info["context_length"], info["is_generation"]) == (
            MODEL,
            CONTEXT,
            True,
        )
    [load] = http.get("/v1/loads").json()["loads"]
    assert load["num_running_reqs"] == 0
    assert load["token_usage"] == 0


def test_health_answers_while_the_engine_is_busy(http: httpx.Client, server: RunningServer) -> None:
    for path in ("/health", "/ready", "/health_generate"):
        assert http.get(path).status_code == 200
    assert http.head("/health").status_code == 200
    server.engine.hold = True
    assert http.get("/health").status_code == 200


def test_version_and_hello(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": "0.1.0"}
    assert MODEL in http.get("/").text


def test_draining_server_is_alive_but_not_ready() -> None:
    with running() as server, httpx.Client(base_url=server.url) as http:
        server.engine.script = lambda ids: [97] * 50
        server.engine.step_s = 0.01
        with http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 50, "stream": True}
        ) as answer:
            server.call(server.readiness.drain)
            assert httpx.get(f"{server.url}/health").status_code == 200
            ready = httpx.get(f"{server.url}/ready")
            assert ready.status_code == 503
            assert ready.headers["retry-after"] == "1"
            assert httpx.get(f"{server.url}/v1/models").status_code == 503
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            assert refused.headers["x-weft-not-begun"] == "1"
            assert answer.read().endswith(b"data: [DONE]\n\n")


def test_a_server_whose_engine_loads_is_neither_well_nor_has_a_model() -> None:
    with running() as server, httpx.Client(base_url=server.url) as http:
        paths = ("/health", "/ping", "/ready", "/v1/models", f"/v1/models/{MODEL}")
        server.client.state.ready = None
        for path in paths:
            answer = http.get(path)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert "not ready yet" in answer.json()["error"]["message"]
        assert http.get("/metrics").status_code == 200
        server.call(lambda: server.client.deliver(READY))
        assert [http.get(path).status_code for path in paths] == [200] * len(paths)


def test_stopped_engine_is_reported_everywhere() -> None:
    with running() as server, httpx.Client(base_url=server.url) as http:
        server.call(lambda: server.client.deliver(EngineFailed(message="out of memory")))
        for path in ("/health", "/ready", "/health_generate", "/server_info"):
            answer = http.get(path)
            assert answer.status_code == 503
            assert "out of memory" in answer.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        assert http.get("/metrics").status_code == 200


def test_stopping_server_lets_open_requests_end() -> None:
    with running() as server, httpx.Client(base_url=server.url) as http:
        server.engine.script = lambda ids: [97] * 30
        server.engine.step_s = 0.01
        with http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 30, "stream": True}
        ) as answer:
            server.server.should_exit = True
            assert answer.read().endswith(b"data: [DONE]\n\n")


def test_openapi_describes_every_route(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for operation in OPERATIONS:
        path = operation.path.replace(":path", "")
        described = document["paths"][path][operation.method.lower()]
        assert described["summary"] == operation.summary
        assert ("requestBody" in described) == (operation.body is not None)
    names = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(names) == len(set(names))
    chat = document["components"]["schemas"]["ChatRequest"]
    assert {"messages", "max_completion_tokens", "no_stop_trim"} <= chat["properties"].keys()
    assert chat["required"] == ["messages"]
    references = [
        part.split('"')[0] for part in http.get("/openapi.json").text.split('"$ref":"')[1:]
    ]
    schemas = document["components"]["schemas"]
    assert {
        reference.removeprefix("#/components/schemas/") for reference in references
    } <= schemas.keys()


def test_metrics_count_requests_tokens_and_latencies() -> None:
    with running(metrics=Metrics("m")) as server, httpx.Client(base_url=server.url) as http:
        server.engine.script = lambda ids: as_bytes("abc")
        http.post("/v1/completions", json={"prompt": "xy", "n": 2})
        http.post("/v1/completions", json={"prompt": ""})
        http.get("/no/such/path/quagga")
        http.get("/v1/models/a/b")
        server.engine.hold = True
        server.leave("/v1/completions", {"prompt": "x"})
        assert eventually(lambda: server.client.num_open == 0)
        text = http.get("/metrics").text
        families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name.removeprefix("weft:"), *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["num_requests_total", "m", "stop"] == 2
    assert (
        values["num_requests_total", "abort", "m"] == values["num_aborted_requests_total", "m"] == 1
    )
    assert values["http_requests_total", "/v1/completions", "POST"] == 3
    assert values["http_responses_total", "/v1/completions", "200"] == 1
    assert values["http_responses_total", "/v1/completions", "400"] == 1
    assert values["http_responses_total", "/v1/completions", "499"] == 1
    assert values["http_responses_total", "404", "other"] == 1
    assert values["http_responses_total", "/v1/models/{id:path}", "404"] == 1
    assert values["http_requests_active",] == 1  # this one
    assert values["max_total_num_tokens", "m"] == 8_000
    assert values["prompt_tokens_total", "m"] == 10
    assert values["time_to_first_token_seconds_count", "0", "m"] == 2
    assert values["inter_token_latency_seconds_count", "0", "m"] == 6
    assert values["e2e_request_latency_seconds_count", "0", "m"] == 3
    assert values["prompt_tokens_histogram_sum", "m"] == 2 + 2 + 1
    assert values["generation_tokens_histogram_bucket", "4.0", "m"] == 3
    assert values["generation_tokens_histogram_bucket", "2.0", "m"] == 1
    assert "quagga" not in text


@pytest.mark.parametrize("model", ["sql", f"{MODEL}:sql"])
def test_a_name_is_not_unknown_before_the_adapters_of_the_start_are_loaded(model: str) -> None:
    with running() as server, httpx.Client(base_url=server.url) as http:
        asked = {"model": model, "prompt": "x"}
        assert http.post("/v1/completions", json=asked).status_code == 404
        server.readiness.accepting = False
        answer = http.post("/v1/completions", json=asked)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "not ready yet" in answer.json()["error"]["message"]
