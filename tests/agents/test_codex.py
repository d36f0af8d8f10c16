"""Requests like those of Codex, one fact at a time: kinds of tools, items of the history, streams,
and what is wrong with them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.agents.model import scripted_model
from tests.agents.shapes import Body, Codex, codex_tools, events
from tests.server.fake import HANG_S, RunningServer, eventually
from weft.config.limits import Limits
from weft.server.chat.sealed import Opener, sealed
from weft.server.errors import ApiError
from weft.server.openai.responses.models import ResponseItem
from weft.server.openai.responses.translate import messages

PATCH = "*** Begin Patch\n*** Delete File: a\n*** End Patch"
GRAMMAR = {
    "type": "grammar",
    "syntax": "lark",
    "definition": 'start: "*** Begin Patch" /\\n/ /(.|\\n)+/',
}
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": GRAMMAR,
}


class Model:
    """A server, what its model says, and the prompts that it got."""

    def __init__(self) -> None:
        self.says = "Done."
        self.server: RunningServer
        self.prompts: list[str]

    def ask(self, **changes: Any) -> httpx.Response:
        body = {**Codex().body(), **changes}
        self.prompts.clear()
        self.server.engine.seen.clear()
        body = {name: value for name, value in body.items() if value is not None}
        return httpx.post(f"{self.server.url}/v1/responses", json=body, timeout=HANG_S)

    def items(self, **changes: Any) -> list[Body]:
        answer = self.ask(**changes)
        assert answer.status_code == 200, answer.text
        return [
            event["item"]
            for event in events(answer.text)
            if event["type"] == "response.output_item.done"
        ]

    def refused(self, **changes: Any) -> Body:
        answer = self.ask(**changes)
        assert answer.status_code == 400, answer.text
        error: Body = answer.json()["error"]
        return error


@pytest.fixture(scope="module")
def served() -> Iterator[Model]:
    model = Model()
    with scripted_model(lambda prompt: model.says, context=4_000_000) as (server, prompts):
        model.server, model.prompts = server, prompts
        yield model


@pytest.fixture
def model(served: Model) -> Model:
    served.says = "Done."
    return served


def call(name: str, arguments: Any) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


def message(role: str, text: str) -> Body:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


USER = message("user", "Hi")


# ---- tools


def test_a_tool_of_a_namespace_is_offered_and_called_by_both_names(model: Model) -> None:
    model.says = call("multi_agent_v1.spawn_agent", {"message": "go"})
    [item] = model.items()
    assert (item["type"], item["namespace"], item["name"]) == (
        "function_call",
        "multi_agent_v1",
        "spawn_agent",
    )
    assert json.loads(item["arguments"]) == {"message": "go"}
    assert '"name": "multi_agent_v1.spawn_agent"' in model.prompts[0]
    assert model.prompts[0].count("Other agents that help.") == 1


def test_the_added_item_of_a_stream_has_the_namespace_too(model: Model) -> None:
    model.says = call("multi_agent_v1.wait", {"target": "a"})
    told = events(model.ask().text)
    [added] = [event["item"] for event in told if event["type"] == "response.output_item.added"]
    assert (added["namespace"], added["name"]) == ("multi_agent_v1", "wait")


def test_tools_outside_of_namespaces_have_none(model: Model) -> None:
    model.says = call("exec_command", {"cmd": "ls"})
    [item] = model.items()
    assert "namespace" not in item


def test_a_call_of_a_namespace_comes_back_as_it_was_written(model: Model) -> None:
    model.says = call("multi_agent_v1.wait", {"target": "a"})
    [item] = model.items()
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
    model.items(input=[USER, item, output])
    assert model.says in model.prompts[0]


def test_deferred_tools_are_offered_without_the_mark(model: Model) -> None:
    model.items()
    assert '"name": "multi_agent_v1.wait"' in model.prompts[0]
    assert "defer_loading" not in model.prompts[0]


@pytest.mark.parametrize(
    "kind",
    [
        "web_search",
        "image_generation",
        "code_interpreter",
        "file_search",
        "computer_use",
        "local_shell",
        "mcp",
        "tool_search",
        "web_search_preview_2025_03_11",
    ],
)
def test_hosted_tools_are_left_out_with_a_warning(model: Model, kind: str) -> None:
    answer = model.ask(tools=[*codex_tools()[:1], {"type": kind}])
    assert answer.status_code == 200, answer.text
    assert kind in answer.headers["x-weft-warnings"]
    assert kind not in model.prompts[0]
    assert (
        model.refused(tools=[{"type": kind}], tool_choice={"type": kind})["param"] == "tool_choice"
    )
    assert model.refused(tools=[{"type": kind}], tool_choice="required")["param"] == "tool_choice"


def test_hosted_tools_among_allowed_ones_are_left_out(model: Model) -> None:
    allowed = [{"type": "function", "name": "view_image"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    assert model.ask(tool_choice=choice).status_code == 200
    demanded = {"type": "allowed_tools", "mode": "required", "tools": allowed[1:]}
    assert model.refused(tool_choice=demanded)["param"] == "tool_choice"


def test_a_tool_of_a_namespace_can_be_forced(model: Model) -> None:
    model.says = '[{"name": "multi_agent_v1.wait", "parameters": {"target": "a"}}]'
    [item] = model.items(
        tool_choice={"type": "function", "namespace": "multi_agent_v1", "name": "wait"}
    )
    assert (item["namespace"], item["name"]) == ("multi_agent_v1", "wait")


def test_a_custom_tool_is_told_as_text_and_its_grammar_goes_to_the_engine(model: Model) -> None:
    model.says = call("apply_patch", {"input": PATCH})
    [item] = model.items(tools=[*codex_tools(), APPLY_PATCH])
    assert (item["type"], item["input"]) == ("custom_tool_call", PATCH)
    grammar = model.server.engine.seen[0].sampling.grammar
    assert grammar.kind == "structural_tag"
    assert "*** Begin Patch" in grammar.text
    assert "The input follows this lark grammar" in model.prompts[0]


def test_a_custom_tool_in_a_namespace_keeps_its_kind(model: Model) -> None:
    model.says = call("edits.apply_patch", {"input": PATCH})
    [item] = model.items(tools=[{"type": "namespace", "name": "edits", "tools": [APPLY_PATCH]}])
    assert (item["type"], item["namespace"], item["name"]) == (
        "custom_tool_call",
        "edits",
        "apply_patch",
    )


def test_a_regex_is_a_grammar_too(model: Model) -> None:
    format = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    model.items(tools=[{**APPLY_PATCH, "format": format}])
    assert '"syntax":"regex"' in model.server.engine.seen[0].sampling.grammar.text


def test_a_custom_call_and_its_result_come_back(model: Model) -> None:
    model.says = f"I edit.\n{call('apply_patch', {'input': PATCH})}"
    found = model.items(tools=[APPLY_PATCH])
    output = {"type": "custom_tool_call_output", "call_id": found[-1]["call_id"], "output": "Done!"}
    model.items(tools=[APPLY_PATCH], input=[USER, *found, output])
    assert f"{model.says}\nuser" in model.prompts[0]


# ---- items


def test_reasoning_is_sealed_only_for_those_who_ask(model: Model) -> None:
    model.says = "<think>\nHm, ä.\n</think>\n\nDone."
    reasoning, _ = model.items()
    assert opened(reasoning["encrypted_content"]) == "Hm, ä.\n"
    reasoning, _ = model.items(include=None)
    assert "encrypted_content" not in reasoning


@pytest.mark.parametrize("part", ["content", "encrypted_content"])
def test_reasoning_comes_back_by_its_text_or_by_its_seal(model: Model, part: str) -> None:
    model.says = f"<think>\nHm.\n</think>\n\n{call('exec_command', {'cmd': 'ls'})}"
    reasoning, command = model.items()
    del reasoning[part]
    output = {"type": "function_call_output", "call_id": command["call_id"], "output": "a"}
    model.items(input=[USER, reasoning, command, output])
    assert model.says in model.prompts[0]


def test_reasoning_that_another_server_sealed_is_left_out_with_a_warning(model: Model) -> None:
    foreign = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "So."}],
        "encrypted_content": "gAAAAAB",
    }
    answer = model.ask(input=[USER, foreign, message("assistant", "Yes."), USER])
    assert answer.status_code == 200, answer.text
    assert "1 x reasoning of another server" in answer.headers["x-weft-warnings"]


def opened(text: str) -> str | None:
    return Opener(Limits()).opened(text, "")


def test_a_seal_that_was_changed_is_not_opened() -> None:
    text = "a thought " * 50
    assert opened(sealed(text)) == text
    assert opened(sealed(text)[:-1] + "x") is None
    assert opened(sealed(text)[:40]) is None
    for wrong in ("", "weft1", "weft1..", "weft1.!!.0", "weft2.a.b"):
        assert opened(wrong) is None


def test_all_seals_of_a_request_hold_as_much_as_a_body_and_nothing_is_inflated_beyond() -> None:
    opener = Opener(Limits(max_body_mb=0.01))
    assert opener.opened(sealed("a" * 9_000), "input[0]") == "a" * 9_000
    assert opener.opened(sealed("b" * 900)[:-1] + "x", "input[1]") is None, "counts all the same"
    assert opener.opened(sealed("c" * 100), "input[2]") == "c" * 100
    bomb = sealed("d" * 20_000_000)
    tracemalloc.start()
    try:
        for text in (bomb, sealed("e")):
            with pytest.raises(ApiError, match=r"input\[3\]: .* more than 10,000 bytes") as caught:
                opener.opened(text, "input[3]")
            assert caught.value.status == 400
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_reasoning_that_opens_to_more_than_a_body_is_refused_by_its_place(model: Model) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    thought["encrypted_content"] = sealed("a" * 4_000_000)
    error = model.refused(input=[USER, *[thought] * 5, USER])
    assert error["param"] == "input[5].encrypted_content"
    assert "16,000,000 bytes" in error["message"]


def test_signatures_that_open_to_more_than_a_body_are_refused_by_their_place(model: Model) -> None:
    block = {"type": "thinking", "thinking": "", "signature": sealed("a" * 4_000_000)}
    body = {
        "model": Codex().body()["model"],
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [block] * 5},
            {"role": "user", "content": "And?"},
        ],
    }
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = httpx.post(f"{model.server.url}{path}", json=body, timeout=HANG_S)
        assert answer.status_code == 400, answer.text
        assert "messages[1].content[4].signature" in answer.json()["error"]["message"]


def test_the_many_items_of_one_answer_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_joined = 0
    replace = msgspec.structs.replace

    def counted(*args: Any, **changes: Any) -> Any:
        nonlocal num_joined
        num_joined += 1
        return replace(*args, **changes)

    monkeypatch.setattr(msgspec.structs, "replace", counted)
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"},
    ]
    given = msgspec.convert(items * 100, list[ResponseItem])
    [answer] = messages(given, Opener(Limits()))
    assert answer.reasoning_content == "a" * 100
    assert answer.content == "b" * 100
    assert answer.tool_calls is not None
    assert len(answer.tool_calls) == 100
    assert num_joined == 1


@pytest.mark.parametrize(
    "kind",
    ["web_search_call", "tool_search_call", "local_shell_call", "ghost_snapshot", "mcp_call"],
)
def test_items_of_hosted_tools_are_left_out_with_a_warning(model: Model, kind: str) -> None:
    item = {
        "type": kind,
        "id": "x",
        "status": "completed",
        "action": {"type": "search"},
        "output": {"a": 1},
    }
    answer = model.ask(input=[USER, item, USER])
    assert answer.status_code == 200, answer.text
    assert f"1 x {kind}" in answer.headers["x-weft-warnings"]


def test_the_result_of_a_failed_call_is_an_object_in_early_clients(model: Model) -> None:
    asked = {"type": "function_call", "call_id": "c1", "name": "exec_command", "arguments": "{}"}
    for output, text in [
        ({"content": "no such file", "success": False}, "no such file"),
        ({"code": 7}, '{"code":7}'),
    ]:
        model.items(
            input=[USER, asked, {"type": "function_call_output", "call_id": "c1", "output": output}]
        )
        assert text in model.prompts[0]


def test_late_developer_messages_keep_their_place(model: Model) -> None:
    model.items(input=[USER, message("developer", "Be short."), message("assistant", "Ok."), USER])
    prompt = model.prompts[0]
    assert prompt.index("Hi") < prompt.index("Be short.") < prompt.index("Ok.")


@pytest.mark.parametrize(
    "swap", [lambda items: items[::-1], lambda items: [items[1], items[0]], lambda items: items[1:]]
)
def test_items_out_of_order_are_served(
    model: Model, swap: Callable[[list[Body]], list[Body]]
) -> None:
    asked = {"type": "function_call", "call_id": "c1", "name": "exec_command", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
    assert model.ask(input=[*swap([asked, output]), USER]).status_code == 200


def test_broken_arguments_of_the_history_do_not_end_the_conversation(model: Model) -> None:
    for arguments in ('{"cmd": "l', "[]", "null", "ls", ""):
        asked = {
            "type": "function_call",
            "call_id": "c1",
            "name": "exec_command",
            "arguments": arguments,
        }
        assert model.ask(input=[USER, asked, USER]).status_code == 200


# ---- streams


def test_several_calls_beside_a_text_are_items_in_order(model: Model) -> None:
    model.says = (
        f"I look.\n{call('exec_command', {'cmd': 'a'})}\n{call('view_image', {'path': 'b'})}"
    )
    found = model.items()
    assert [item["type"] for item in found] == ["message", "function_call", "function_call"]
    assert [item.get("name") for item in found[1:]] == ["exec_command", "view_image"]
    assert len({item["call_id"] for item in found[1:]}) == 2


def test_parallel_calls_can_be_switched_off(model: Model) -> None:
    one = call("exec_command", {"cmd": "a"})
    model.says = f"{one}\n{one}"
    assert len(model.items(parallel_tool_calls=False)) == 1
    assert len(model.items()) == 2


def test_a_cut_call_ends_incomplete(model: Model) -> None:
    model.says = call("exec_command", {"cmd": "a" * 200})
    told = events(model.ask(max_output_tokens=100).text)
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_arguments_that_are_no_json_end_where_they_break_and_the_rest_is_text(model: Model) -> None:
    model.says = call("exec_command", '{"cmd": nope}')
    broken, rest = model.items()
    assert (broken["type"], broken["arguments"]) == ("function_call", '{"cmd": n')
    assert rest["content"][0]["text"] == "ope}}\n</tool_call>"
    output = {"type": "function_call_output", "call_id": broken["call_id"], "output": "no JSON"}
    assert model.ask(input=[USER, broken, rest, output]).status_code == 200


def test_calls_of_unknown_tools_are_text(model: Model) -> None:
    model.says = call("spawn_agent", {"message": "without its namespace"})
    [item] = model.items()
    assert item["type"] == "message"


def test_stop_strings_end_the_text(model: Model) -> None:
    model.says = "one STOP two"
    [item] = model.items(stop=["STOP"])
    assert item["content"][0]["text"] == "one "


def test_a_client_that_leaves_ends_its_turn_and_the_next_is_served(model: Model) -> None:
    model.says = "a" * 100_000
    with httpx.stream(
        "POST", f"{model.server.url}/v1/responses", json=Codex().body(), timeout=HANG_S
    ) as answer:
        next(answer.iter_bytes())
    assert eventually(lambda: not model.server.engine.running)
    model.says = "Done."
    assert model.items()[0]["content"][0]["text"] == "Done."


def test_usage_has_what_codex_counts(model: Model) -> None:
    last = events(model.ask().text)[-1]
    usage = last["response"]["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert {"cached_tokens"} <= usage["input_tokens_details"].keys()
    assert "reasoning_tokens" in usage["output_tokens_details"]


# ---- what is wrong

SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
WRONG_TOOLS: dict[str, tuple[list[Any], str]] = {
    "two names alike": ([SPAWN, {"type": "web_search"}, SPAWN], "tools[2].name"),
    "a name like one of a namespace": (
        [{"type": "namespace", "name": "a", "tools": [SPAWN]}, {**SPAWN, "name": "a.spawn"}],
        "tools[1].name",
    ),
    "one name twice in a namespace": (
        [SPAWN, {"type": "namespace", "name": "a", "tools": [SPAWN, SPAWN]}],
        "tools[1].tools[1].name",
    ),
    "a namespace in a namespace": (
        [
            {
                "type": "namespace",
                "name": "a",
                "tools": [{"type": "namespace", "name": "b", "tools": []}],
            }
        ],
        "tools[0].tools[0]",
    ),
    "a hosted tool in a namespace": (
        [{"type": "namespace", "name": "a", "tools": [{"type": "web_search"}]}],
        "tools[0].tools[0]",
    ),
    "a namespace without a name": ([{"type": "namespace", "tools": []}], "tools[0].name"),
    "a namespace without tools": ([SPAWN, {"type": "namespace", "name": "a"}], "tools[1].tools"),
    "a number in a namespace": (
        [{"type": "namespace", "name": "a", "tools": [7]}],
        "tools[0].tools[0]",
    ),
    "a tool without a name": (
        [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}],
        "tools[0].tools[0].name",
    ),
    "a name that is too long": (
        [{"type": "namespace", "name": "a" * 100, "tools": [{**SPAWN, "name": "b" * 60}]}],
        "tools[0].tools[0].name",
    ),
    "no type": ([{"name": "a"}], "tools[0]"),
    "an unknown type": ([SPAWN, {"type": "telepathy"}], "tools[1]"),
    "a type that is no text": ([{"type": 7}], "tools[0]"),
    "an unknown syntax": (
        [{**APPLY_PATCH, "format": {**GRAMMAR, "syntax": "gbnf"}}],
        "tools[0].format.syntax",
    ),
    "no definition": (
        [{**APPLY_PATCH, "format": {"type": "grammar", "syntax": "lark"}}],
        "tools[0].format.definition",
    ),
    "a grammar as a number": (
        [{**APPLY_PATCH, "format": {"type": "grammar", "grammar": 7}}],
        "tools[0].format.grammar.syntax",
    ),
    "parameters that are a list": (
        [{"type": "image_generation"}, {**SPAWN, "parameters": []}],
        "tools[1].parameters",
    ),
    "a grammar without a definition in a namespace": (
        [
            {
                "type": "namespace",
                "name": "a",
                "tools": [{**APPLY_PATCH, "format": {"type": "grammar", "syntax": "lark"}}],
            }
        ],
        "tools[0].tools[0].format.definition",
    ),
}


@pytest.mark.parametrize("name", WRONG_TOOLS)
def test_wrong_tools_are_refused_by_their_place(model: Model, name: str) -> None:
    tools, param = WRONG_TOOLS[name]
    assert model.refused(tools=tools)["param"] == param


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "telepathy_call"}, "input[1]"),
        ({"type": "message", "content": "no role"}, "input[1].role"),
        ({"type": "compaction", "encrypted_content": "gAAAA"}, "input[1]"),
        (
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_file", "file_id": "f"}],
            },
            "input[1].content[0]",
        ),
        ({"type": "function_call", "arguments": {"a": 1}}, "input[1].arguments"),
    ],
)
def test_wrong_items_are_refused_by_their_place(model: Model, item: Body, param: str) -> None:
    error = model.refused(input=[USER, item])
    assert error["param"] == param or f"{param}" in error["message"]


def test_a_tool_list_of_two_megabytes_is_served(model: Model) -> None:
    long = "A tool. " * 2_500
    many = [
        {
            "type": "function",
            "name": f"f{number}",
            "description": long,
            "parameters": {"type": "object"},
        }
        for number in range(100)
    ]
    assert model.ask(tools=many).status_code == 200


def test_an_error_within_a_chat_names_no_place_of_another_api(model: Model) -> None:
    error = model.refused(input=[USER], chat_template_kwargs={"messages": []})
    assert error["param"] == "chat_template_kwargs"
