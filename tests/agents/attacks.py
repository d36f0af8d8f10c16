"""Bodies of agents in which one thing is wrong, for each of their APIs.

Each value of a sound body is replaced by values of other kinds; beside these there are faults of a
whole: names twice, namespaces in namespaces, items in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

Body = dict[str, Any]
WRONG: tuple[Any, ...] = (None, 7, "", "\x00", [], {}, [None], {"a": 1}, -1e308, True)
PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}

RESPONSES: Body = {
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "message", "role": "user", "content": "Hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "So."}],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": "gAAAAAB",
        },
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"cmd": "ls"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
        {
            "type": "custom_tool_call",
            "call_id": "c2",
            "name": "patch",
            "namespace": "edits",
            "input": "aaa",
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "parameters": PARAMETERS},
        {"type": "web_search"},
        {
            "type": "namespace",
            "name": "edits",
            "description": "Changes.",
            "tools": [{"type": "custom", "name": "patch", "format": GRAMMAR}],
        },
    ],
}
MESSAGES: Body = {
    "max_tokens": 8,
    "system": [{"type": "text", "text": "You help."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "Er8C"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "shell", "input": {"cmd": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "a.txt"}],
                }
            ],
        },
        {"role": "system", "content": "Be short."},
    ],
    "tools": [
        {"type": "bash_20250124", "name": "bash"},
        {"name": "shell", "description": "Runs.", "input_schema": PARAMETERS},
    ],
}
CHAT: Body = {
    "max_tokens": 8,
    "messages": [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "shell", "arguments": '{"cmd": "ls"}'},
                },
                {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "aaa"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        {"role": "tool", "tool_call_id": "c2", "content": "Done"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "shell", "description": "Runs.", "parameters": PARAMETERS},
        },
        {
            "type": "custom",
            "custom": {
                "name": "patch",
                "format": {
                    "type": "grammar",
                    "grammar": {"syntax": "lark", "definition": "start: /a+/"},
                },
            },
        },
    ],
}
SOUND = {
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/chat/completions": CHAT,
}


class Attack(NamedTuple):
    name: str
    body: Body
    item: str  # that an error has to name: tools[2]


def replaced(sound: Body) -> Iterator[Attack]:
    """The body with each of its values inside of a list replaced by each of `WRONG`, one at a
    time."""
    for field, items in sound.items():
        if not isinstance(items, list):
            continue
        for path in _paths(items, ()):
            for wrong in WRONG:
                body = copy.deepcopy(sound)
                _put(body[field], path, wrong)
                where = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path)
                yield Attack(f"{field}{where} = {wrong!r}", body, f"{field}[{path[0]}]")


def _paths(value: Any, path: tuple[int | str, ...]) -> Iterator[tuple[int | str, ...]]:
    """The paths of all values inside a value."""
    inside = enumerate(value) if isinstance(value, list) else value.items()
    for key, one in inside:
        yield (*path, key)
        if isinstance(one, list | dict):
            yield from _paths(one, (*path, key))


def _put(value: Any, path: tuple[int | str, ...], wrong: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = wrong
