"""Every field of every API is served, refused by name, or in the list of those that are ignored."""

from __future__ import annotations

import typing
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.server.fake import MODEL, RunningServer
from weft.server.anthropic.models import CountRequest, MessagesRequest
from weft.server.chat.models import CHAT_FIELDS, ChatRequest, CompletionRequest
from weft.server.fields.known import IGNORED, REFUSED, asks_for_nothing
from weft.server.fields.sampling import ExtraSamplingFields
from weft.server.ollama.models import OllamaChatRequest, OllamaGenerateRequest
from weft.server.openai.responses.models import ResponsesRequest
from weft.server.pooling.models import EmbeddingRequest

HI = [{"role": "user", "content": "Hi"}]


class Api(NamedTuple):
    path: str
    body: dict[str, Any]  # the required fields
    type: type[msgspec.Struct]
    documented: set[str]  # the names of the fields in the API's own documents


def declared(*params: Any) -> set[str]:
    """The fields of an SDK's types of parameters."""
    names: set[str] = set()
    for one in params:
        names |= set(one.__annotations__) | set(typing.get_type_hints(one))
    return names


# Ollama's documents, docs/api.md; its SDK is not installed with weft.
OLLAMA = {"model", "stream", "format", "options", "think", "keep_alive", "logprobs", "top_logprobs"}
OLLAMA_CHAT = OLLAMA | {"messages", "tools"}
OLLAMA_GENERATE = OLLAMA | {"prompt", "suffix", "images", "system", "template", "raw", "context"}
APIS = (
    Api(
        "/v1/chat/completions",
        {"messages": HI},
        ChatRequest,
        declared(
            chat_create_params.CompletionCreateParamsBase,
            chat_create_params.CompletionCreateParamsStreaming,
        ),
    ),
    Api(
        "/v1/completions",
        {"prompt": "Hi"},
        CompletionRequest,
        declared(completion_create_params.CompletionCreateParamsBase),
    ),
    Api(
        "/v1/responses",
        {"input": "Hi"},
        ResponsesRequest,
        declared(
            response_create_params.ResponseCreateParamsBase,
            response_create_params.ResponseCreateParamsStreaming,
        ),
    ),
    Api(
        "/v1/messages",
        {"messages": HI, "max_tokens": 5},
        MessagesRequest,
        declared(
            message_create_params.MessageCreateParamsBase,
            beta_message_create_params.MessageCreateParamsBase,
            beta_message_create_params.OutputFormat,
        )
        - {"schema", "type"},
    ),
    Api(
        "/v1/messages/count_tokens",
        {"messages": HI},
        CountRequest,
        declared(message_count_tokens_params.MessageCountTokensParams),
    ),
    Api("/api/chat", {"messages": HI}, OllamaChatRequest, OLLAMA_CHAT),
    Api("/api/generate", {"prompt": "Hi"}, OllamaGenerateRequest, OLLAMA_GENERATE),
    Api(
        "/v1/embeddings",
        {"input": "Hi"},
        EmbeddingRequest,
        declared(embedding_create_params.EmbeddingCreateParams),
    ),
)
each_api = pytest.mark.parametrize("api", APIS, ids=[api.path for api in APIS])


def own_names(api: Api) -> set[str]:
    return set(api.type.__struct_encode_fields__)


def refused_names(api: Api) -> set[str]:
    names = set(REFUSED)
    if issubclass(api.type, ExtraSamplingFields):
        names |= api.type.refused
    return names - own_names(api)


def post(http: httpx.Client, api: Api, **fields: Any) -> httpx.Response:
    return http.post(api.path, json={"model": MODEL, **api.body, **fields})


def num_unknown(http: httpx.Client) -> float:
    [line] = [
        line
        for line in http.get("/metrics").text.splitlines()
        if line.startswith("weft:unknown_request_fields_total")
    ]
    return float(line.rpartition(" ")[2])


@each_api
def test_each_documented_field_is_served_refused_or_ignored(api: Api) -> None:
    assert api.documented - own_names(api) - refused_names(api) - IGNORED == set()


@each_api
def test_fields_that_are_not_served_are_refused_by_name(
    http: httpx.Client, server: RunningServer, api: Api
) -> None:
    for name in sorted(refused_names(api)):
        answer = post(http, api, **{name: [{"a": 1}]})
        assert answer.status_code == 400, name
        assert f"{name} is not supported" in answer.text
    assert server.engine.seen == []


@each_api
def test_ignored_fields_change_nothing_and_are_not_counted(
    http: httpx.Client, server: RunningServer, api: Api
) -> None:
    if api.type is EmbeddingRequest:
        return  # this server has a model that generates
    before = num_unknown(http)
    ignored = sorted(IGNORED - own_names(api))
    answer = post(http, api, **{name: {"a": 1} for name in ignored})
    assert answer.status_code == 200, answer.text
    assert num_unknown(http) == before
    assert post(http, api, nobody_has_this=1).status_code == 200
    assert num_unknown(http) == before + 1


@each_api
def test_a_refused_field_may_ask_for_nothing(http: httpx.Client, api: Api) -> None:
    if api.type is EmbeddingRequest:
        return
    nothing = {name: None for name in refused_names(api)}
    assert post(http, api, **nothing).status_code == 200


def test_the_lists_do_not_overlap_and_zero_is_a_wish() -> None:
    assert not REFUSED & IGNORED
    assert not asks_for_nothing("length_penalty", 0)
    assert asks_for_nothing("length_penalty", 1)


def test_false_is_a_wish_where_chat_requests_do_it_anyway() -> None:
    for name in ("parallel_tool_calls", "include_reasoning", "separate_reasoning"):
        assert asks_for_nothing(name, True)
        assert not asks_for_nothing(name, False)
    assert not asks_for_nothing("thinking", False)
    assert not asks_for_nothing("web_search_options", {})


# ---- fields that all APIs serve alike

CONSTRAINTS: dict[str, Any] = {
    "structured_outputs": {"regex": "a"},
    "regex": "a",
    "guided_regex": "a",
    "grammar": 'root ::= "a"',
    "choice": ["a"],
    "json_schema": {"type": "object"},
    "response_format": {"type": "json_object"},
}
GENERATING = [api for api in APIS[:4] if api.path != "/v1/completions"]
each_generating = pytest.mark.parametrize("api", GENERATING, ids=[api.path for api in GENERATING])


@each_generating
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_constraint_is_served_in_every_api(
    http: httpx.Client, server: RunningServer, api: Api, name: str
) -> None:
    assert post(http, api, **{name: CONSTRAINTS[name]}).status_code == 200
    [request] = server.engine.seen
    assert request.sampling.grammar is not None


@each_generating
def test_sampling_is_served_in_every_api(
    http: httpx.Client, server: RunningServer, api: Api
) -> None:
    fields = {
        "bad_words": ["no"],
        "stop_regex": "x+y",
        "stop": "end",
        "allowed_token_ids": [5],
        "seed": 7,
        "min_tokens": 2,
        "priority": 3,
        "custom_logit_processor": "mine",
    }
    answer = post(http, api, **fields)
    assert answer.status_code == 200, answer.text
    [request] = server.engine.seen
    sampling = request.sampling
    assert sampling.seed == 7
    assert sampling.min_new_tokens == 2
    assert request.priority == 3
    assert sampling.allowed_token_ids == (5,)
    assert sampling.processors[0].name == "mine"
    assert sampling.bad_word_ids


@pytest.mark.parametrize("api", GENERATING[1:], ids=[api.path for api in GENERATING[1:]])
def test_an_api_with_one_answer_refuses_more(http: httpx.Client, api: Api) -> None:
    assert post(http, api, n=1).status_code == 200
    answer = post(http, api, n=2)
    assert (answer.status_code, "n is 2; only 1 is allowed" in answer.text) == (400, True)


def test_a_missing_adapter_is_named_in_every_api(http: httpx.Client) -> None:
    for api in GENERATING:
        answer = post(http, api, lora_path="none")
        assert answer.status_code == 404
        assert "none" in answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": {}}}),
    ],
)
def test_the_own_place_of_a_constraint_excludes_others(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    [api] = [api for api in APIS if api.path == path]
    assert post(http, api, **fields).status_code == 200
    for others in ({"response_format": {"type": "json_object"}}, {"regex": "a"}):
        assert post(http, api, **fields, **others).status_code == 400


def test_a_conversation_that_is_too_long_is_cut_only_on_request(
    http: httpx.Client, server: RunningServer
) -> None:
    body = {"model": MODEL, "input": "x" * 3_000, "max_output_tokens": 5}
    assert http.post("/v1/responses", json=body).status_code == 400
    answer = http.post("/v1/responses", json={**body, "truncation": "auto"})
    assert answer.status_code == 200
    assert answer.json()["truncation"] == "auto"
    assert http.post("/v1/responses", json={**body, "truncation": "all"}).status_code == 400


def test_a_server_with_one_engine_refuses_a_request_for_another(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}

    def asked(rank: str) -> httpx.Response:
        return http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": rank})

    assert asked("0").status_code == 200
    for wrong in ("1", "one"):
        assert asked(wrong).status_code == 400
        assert asked(wrong).json()["error"]["param"] == "routed_dp_rank"
    for field in ("routed_dp_rank", "data_parallel_rank"):
        error = http.post("/v1/completions", json={**body, field: 1}).json()["error"]
        assert error["param"] == field
        assert error["message"].startswith(f"{field} is 1; only 0 is allowed")


def test_the_fields_of_chat_requests_are_known_to_apis_that_translate_to_them() -> None:
    for api in GENERATING[1:]:
        assert own_names(api) | refused_names(api) >= CHAT_FIELDS
