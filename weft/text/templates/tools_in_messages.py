"""Tools, calls and results as text in messages, for a chat template that knows none of them.

    system      You can call these tools: ...      after the system message's own text
    assistant   <tool_call> ... </tool_call>       as the model wrote it
    user        <tool_response> ... </tool_response>

A template without a role for the system gets that text before the first text of the user. What the
model wrote comes back character by character, so that its prompt's prefix stays cached. Templates
that insist on turns of user and assistant get them: results join each other, and what the user says
after them. Knows the form of calls (`parsers/generic.py`), and no template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from weft.json_types import JsonObject
from weft.text.parsers.generic import ANSWER, AROUND, CALL, CALL_END
from weft.text.templates.turns import (
    RESULT_ROLES,
    SYSTEM_ROLES,
    Message,
    Turn,
    joined_turns,
    put_together,
)

RESULT, RESULT_END = "<tool_response>", "</tool_response>"


def with_tools_in_messages(
    messages: Sequence[Message], tools: Sequence[JsonObject] | None, *, has_system: bool
) -> list[Message]:
    """The conversation as texts of system, user and assistant alone.

    With `tools`, it describes them, and texts of the assistant have the mark of an answer.
    `has_system`: the template has a role for the system.
    """
    ordered = _in_order_of_calls(messages)
    turns = _with_texts(ordered, has_answers=bool(tools))
    if not tools:
        return turns
    return _with_system(turns, described(tools), has_system=has_system)


def described(tools: Sequence[JsonObject]) -> str:
    """The tools, and how to call them, for the model."""
    functions = [tool.get("function", tool) for tool in tools]
    shown = "\n".join(json.dumps(one, ensure_ascii=False) for one in functions)
    example = json.dumps({"name": "tool_name", "arguments": {"arg1": "some_value"}})
    return (
        f"You can call these tools:\n{shown}\n\n"
        "Answer either with a call of a tool or with a reply to the user, for example:\n"
        f"{CALL}\n{example}\n{CALL_END}\nor\n{ANSWER}some text\n\n"
        f"After a {RESULT}, or if no tool is needed, reply with {ANSWER}."
    )


def _in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """The results of several calls in the order of the calls, because they show no ids."""
    ordered: list[Message] = []
    run: list[Message] = []  # results since the last message of another role
    calls: Sequence[JsonObject] = ()
    for message in messages:
        if message.get("role") in RESULT_ROLES:
            run.append(message)
            continue
        ordered += sorted(run, key=partial(_index_of_call, calls))
        run = []
        calls = message.get("tool_calls") or ()
        ordered.append(message)
    return ordered + sorted(run, key=partial(_index_of_call, calls))


def _index_of_call(calls: Sequence[JsonObject], result: Message) -> int:
    """The position of the call that a result belongs to, by its id, or its name if it has no id;
    after all calls if it belongs to none."""
    id = result.get("tool_call_id")
    name = result.get("name")
    for index, call in enumerate(calls):
        if id and call.get("id") == id:
            return index
        if not id and name and (call.get("function") or {}).get("name") == name:
            return index
    return len(calls)


def _with_texts(messages: Sequence[Message], *, has_answers: bool) -> list[Message]:
    """Each message as text; those with calls and results join neighbours of the same role."""
    turns: list[Turn] = []
    for message in messages:
        merges = bool(message.get("tool_calls")) or message.get("role") in RESULT_ROLES
        turn = _as_text(message, has_answers=has_answers)
        last = turns[-1] if turns else None
        goes_on = last is not None and (merges or last.merges) and _is_answer(last.message, turn)
        if goes_on and isinstance(turn["content"], str):
            turn = {**turn, "content": turn["content"].removeprefix(ANSWER)}
        turns.append(Turn(turn, merges))
    return joined_turns(turns)


def _is_answer(*messages: Message) -> bool:
    """Whether all are texts of the assistant."""
    return all(one.get("role") == "assistant" and one.get("content") for one in messages)


def _as_text(message: Message, *, has_answers: bool) -> Message:
    """A message of the assistant or of a tool as text; others unchanged."""
    role = message.get("role")
    content = message.get("content")
    if role in RESULT_ROLES:
        result = put_together(f"{RESULT}\n", "", content or "", f"\n{RESULT_END}")
        return {"role": "user", "content": result}
    if role != "assistant":
        return message
    calls = message.get("tool_calls") or ()
    text = "\n".join(_written_call(call.get("function") or {}) for call in calls)
    mark = ANSWER if has_answers and content else ""
    if not calls and not mark:
        return message
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": put_together(mark, "", content or "", text)}


def _written_call(function: JsonObject) -> str:
    before, after = AROUND
    name = json.dumps(str(function.get("name")), ensure_ascii=False)
    return before.replace('"NAME"', name) + _written_arguments(function.get("arguments")) + after


def _written_arguments(arguments: Any) -> str:
    """Arguments as the client sent them, if they are a JSON object; as JSON of what they are,
    if not."""
    if isinstance(arguments, str):
        try:
            if not arguments or isinstance(json.loads(arguments), dict):
                return arguments.strip() or "{}"
        except (ValueError, RecursionError):
            pass  # a text that was cut off, for example
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _with_system(messages: list[Message], text: str, *, has_system: bool) -> list[Message]:
    """The conversation with `text` after its first system message, or before the user's."""
    first: Message = {"role": "system"}
    rest = messages
    if messages and messages[0].get("role") in SYSTEM_ROLES:
        first = messages[0]
        rest = messages[1:]
    own = first.get("content") or ""
    content = put_together(own, "\n\n" if own else "", text)
    if has_system:
        return [{**first, "content": content}, *rest]
    if not rest or rest[0].get("role") != "user":
        return [{"role": "user", "content": content}, *rest]
    content = put_together(content, "\n\n", rest[0].get("content") or "")
    return [{**rest[0], "content": content}, *rest[1:]]
