"""Whatever weft answers can be sent back in every API, and gives the same prompt however it was
read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from tests.server.fake import HANG_S, RunningServer, running
from tests.server.scripted import say
from tests.server.turns import BY_ID, CHAT, CLIENTS, ITEMS, MESSAGES, Body, Client
from tests.text.tokens import byte_backend
from weft.config.server import ServerConfig
from weft.text.tokenizer import Tokenizer

_TURNS = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }} CALL</call>{% endfor -%}
<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_ARGUMENTS = "c.function.arguments"
_AS_TEXT = f"{{{{ {_ARGUMENTS} if {_ARGUMENTS} is string else {_ARGUMENTS} | tojson }}}}"
_WALKED = (
    f"{{% for key, value in {_ARGUMENTS}.items() %}}{{{{ key }}}}={{{{ value }}}};{{% endfor %}}"
)
STEP = 88  # bytes between the places at which one template cuts an answer
TEMPLATES = {"text": _TURNS.replace("CALL", _AS_TEXT), "walked": _TURNS.replace("CALL", _WALKED)}


def called(arguments: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ANSWERS = {
    "nothing": "",
    "text": "Hello, wörld! \U0001f600",
    "spaces": "\n\n ",
    "reasoning": "<think>\nHm. Rain?\n</think>\n\nYes.",
    "reasoning without end": "<think>\nHm. Rain?",
    "call": called('{"city": "Oslo"}'),
    "text, calls, text": "\n".join(["Well.", called("{}"), called("{}", "news"), "Bye."]),
    "reasoning and call": "<think>Hm.</think>Ok." + called('{"a": [1, {"b": null}], "c": true}'),
    "half a pair": called(r'{"city": "\ud83d"}'),
    "halves": called(r'{"\ude00": ["\ud83d\ude00", "\ud83dx", "\\ud83d"]}'),
    "large numbers": called('{"a": 1180334356853624923, "b": 123456789012345678901234567890}'),
    "broken": called('{"a": tru}'),
    "no object": called("[1, 2]"),
    "of no tool": called("{}", "unknown"),
}


@pytest.fixture(scope="module", params=TEMPLATES)
def called_server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = Tokenizer(byte_backend(), special, {"default": TEMPLATES[request.param]})
    config = ServerConfig(drain_s=1.0, tool_call_parser="hermes", reasoning_parser="qwen3")
    with running(config, tokenizer=tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def called_http(called_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=called_server.url, timeout=HANG_S) as client:
        yield client


def next_prompts(
    server: RunningServer, http: httpx.Client, client: Client, said: str, most: int
) -> set[str]:
    """The prompts of the turn after the answer `said`, read as a whole and as a stream."""
    prompts = set()
    for stream in (False, True):
        say(server, said)
        first = client.first()
        answer = client.ask(http, first, stream=stream, most=most)
        server.engine.seen.clear()
        client.ask(http, client.follow(first, answer), stream=stream, most=1)
        [request] = server.engine.seen
        ids = memoryview(request.input_ids).cast("i").tolist()
        prompts.add(server.tokenizer.decode(ids, skip_special_tokens=False))
    return prompts


def places(said: str, request: pytest.FixtureRequest) -> list[int]:
    """After how many tokens the answer is cut; the last is the end. The two templates share the
    places: each cuts where the other does not."""
    whole = len(said.encode())
    first = STEP // 2 if request.node.callspec.params["called_server"] == "text" else STEP
    return [*range(first, whole, STEP), whole + 1]


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_can_be_sent_back_and_gives_the_same_prompt(
    called_server: RunningServer,
    called_http: httpx.Client,
    said: str,
    request: pytest.FixtureRequest,
) -> None:
    for most in places(said, request):
        found: dict[str, set[str]] = {}
        for client in CLIENTS:
            found[client.name] = next_prompts(called_server, called_http, client, said, most)
            assert len(found[client.name]) == 1, (most, client.name, found[client.name])
        assert found["chat"] == found["items"] == found["by id"], most
        # Only where arguments are text can a client send back what is no object.
        if most > len(said.encode()) and said != ANSWERS["broken"]:
            assert found["chat"] == found["messages"] == found["ollama"]


FORCED = [
    '[{"name": "weather", "parameters": {"city": "Oslo"}}, {"name": "news", "parameters": {}}]',
    '[{"name": "weather", "parameters": {"city": "\\ud83d"}}]',
]


@pytest.mark.parametrize("said", FORCED)
def test_forced_calls_can_be_sent_back_wherever_they_are_cut(
    called_server: RunningServer,
    called_http: httpx.Client,
    said: str,
    request: pytest.FixtureRequest,
) -> None:
    for most in places(said, request):
        found: dict[str, set[str]] = {}
        for client in (CHAT, ITEMS, BY_ID, MESSAGES):
            forced = client._replace(first=partial(_forced, client))
            found[client.name] = next_prompts(called_server, called_http, forced, said, most)
            assert len(found[client.name]) == 1, (most, client.name, found[client.name])
            [prompt] = found[client.name]
            assert "name" not in prompt  # a fragment of the list is no text of the answer
        assert found["chat"] == found["items"] == found["by id"], most
        if most > len(said.encode()):
            assert found["chat"] == found["messages"]


def _forced(client: Client) -> Body:
    choice = {"type": "any"} if client == MESSAGES else "required"
    return {**client.first(), "tool_choice": choice}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/responses"])
def test_a_body_may_have_a_byte_order_mark_and_half_of_a_surrogate_pair(
    called_server: RunningServer, called_http: httpx.Client, path: str
) -> None:
    message = r'[{"role": "user", "content": "a\ud83d \ud83d\ude00 \\ud83d"}]'
    name = "input" if path == "/v1/responses" else "messages"
    body = f'\ufeff{{"{name}": {message}}}'
    answer = called_http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    ids = answer.json().get("tokens")
    if ids is None:
        ids = memoryview(called_server.engine.seen[-1].input_ids).cast("i").tolist()
    assert "a\ufffd \U0001f600 \\ud83d" in called_server.tokenizer.decode(ids)
