"""The shapes of coding agents' requests, as released clients send them, in words of our own.

A shape makes the body of each turn, and takes the stream of an answer as its client does: it keeps
what the client
keeps, sends results of tools, and changes what the client changes (headers, dates, counters).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

Body = dict[str, Any]
MANY_WORDS = "Look before you change. Change little. Run the tests. Say what you did. " * 40


def events(text: str) -> list[Body]:
    """The events of a stream."""
    lines = (
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")
    )
    return [json.loads(line) for line in lines]


def schema(**properties: str) -> Body:
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties)[:1],
        "additionalProperties": False,
    }


class Shape(ABC):
    path: str
    tool: str  # that the scripted model calls
    num_turns = 0
    headers: dict[str, str] = {}  # noqa: RUF012 (never changed)

    @abstractmethod
    def body(self) -> Body:
        """The request of the next turn."""

    @abstractmethod
    def take(self, stream: str) -> None:
        """Keep the answer, and add the results of its calls."""

    def result(self) -> str:
        self.num_turns += 1
        return f"line {self.num_turns} of the file\nchunk {self.num_turns * 7919 % 1000}\n"


class Codex(Shape):
    """Codex CLI 0.171: items, a namespace, a hosted tool, `store: false`, sealed reasoning."""

    path = "/v1/responses"
    tool = "exec_command"
    headers = {"originator": "codex_exec", "session-id": "s1"}  # noqa: RUF012

    def __init__(self) -> None:
        self.items: list[Body] = [
            self._message("developer", MANY_WORDS),
            self._message("developer", "<skills>\nNone is here.\n</skills>"),
            self._message(
                "user", "<environment>\n<cwd>/w</cwd>\n<date>2026-11-28</date>\n</environment>"
            ),
            self._message("user", "Change the greeting."),
        ]

    def body(self) -> Body:
        return {
            "model": "tiny/byte-model",
            "stream": True,
            "input": list(self.items),
            "tools": codex_tools(),
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k1",
            "client_metadata": {"turn": f"t{self.num_turns}"},
        }

    def take(self, stream: str) -> None:
        for event in events(stream):
            if event["type"] != "response.output_item.done":
                continue
            item = event["item"]
            self.items.append(item)
            if item["type"] in ("function_call", "custom_tool_call"):
                output = {
                    "type": f"{item['type']}_output",
                    "call_id": item["call_id"],
                    "output": self.result(),
                }
                self.items.append(output)

    @staticmethod
    def _message(role: str, text: str) -> Body:
        return {
            "type": "message",
            "id": "msg_1",
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }


def codex_tools() -> list[Body]:
    return [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": schema(cmd="string", yield_time_ms="number"),
        },
        {
            "type": "function",
            "name": "view_image",
            "description": "Shows a picture.",
            "parameters": schema(path="string"),
        },
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Other agents that help.",
            "tools": [
                {
                    "type": "function",
                    "name": "spawn_agent",
                    "description": "Starts one.",
                    "strict": False,
                    "parameters": schema(message="string"),
                },
                {
                    "type": "function",
                    "name": "wait",
                    "description": "Waits for one.",
                    "parameters": schema(target="string"),
                    "defer_loading": True,
                },
            ],
        },
        {"type": "web_search", "external_web_access": True},
    ]


class ClaudeCode(Shape):
    """Claude Code 2.1: a header that changes in the first system block, system messages behind the
    user's."""

    path = "/v1/messages?beta=true"
    tool = "Bash"

    def __init__(self) -> None:
        self.messages: list[Body] = [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<reminder>\nToday is 2026-11-28.\n</reminder>"},
                    {"type": "text", "text": "Change the greeting."},
                ],
            },
            {"role": "system", "content": "Tools can be called beside each other."},
        ]

    def body(self) -> Body:
        version = f"cc_version=2.1.{self.num_turns}; cc_entrypoint=cli"
        counter = f"cch={self.num_turns * 7919 % 65_536:05x};"
        head = f"x-anthropic-billing-header: {version}; {counter}"
        mark = {"type": "ephemeral"}
        last = self.messages[-1]
        content = last["content"]
        if isinstance(content, list):  # the mark moves on with each turn
            content = [*content[:-1], {**content[-1], "cache_control": mark}]
        return {
            "model": "tiny/byte-model",
            "max_tokens": 32_000,
            "stream": True,
            "system": [
                {"type": "text", "text": head},
                {"type": "text", "text": "You help in a terminal."},
                {"type": "text", "text": MANY_WORDS, "cache_control": mark},
            ],
            "messages": [*self.messages[:-1], {**last, "content": content}],
            "tools": [
                {
                    "name": "Bash",
                    "description": "Runs a command.",
                    "input_schema": {
                        "$schema": "https://json-schema.org/draft/2020-12/schema",
                        **schema(command="string"),
                    },
                },
                {
                    "name": "Read",
                    "description": "Reads a file.",
                    "input_schema": schema(file_path="string"),
                },
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            ],
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": "u1"},
        }

    def take(self, stream: str) -> None:
        blocks: list[Body] = []
        written = ""
        for event in events(stream):
            match event["type"]:
                case "content_block_start":
                    blocks.append(dict(event["content_block"]))
                    written = ""
                case "content_block_delta":
                    delta = event["delta"]
                    for name in ("text", "thinking", "signature"):
                        if name in delta:
                            blocks[-1][name] = blocks[-1].get(name, "") + delta[name]
                    written += delta.get("partial_json", "")
                case "content_block_stop" if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(written or "{}")
        self.messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": self.result()}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        self.messages.append(
            {"role": "user", "content": results or [{"type": "text", "text": "More."}]}
        )
        if self.num_turns % 3 == 0:
            self.messages.append(
                {"role": "system", "content": f"{self.num_turns} files have changed."}
            )


class Chat(Shape):
    """Clients of chat completions: opencode, Qwen Code, Continue, mini-swe-agent, crush, goose."""

    path = "/v1/chat/completions"
    tool = "bash"

    def __init__(
        self, *, keeps_reasoning: bool, stream: bool = True, in_parts: bool = False
    ) -> None:
        self._keeps_reasoning = keeps_reasoning
        self._stream = stream
        user: Any = "Change the greeting."
        if in_parts:
            user = [
                {"type": "text", "text": "Today is 2026-11-28."},
                {"type": "text", "text": user},
            ]
        self.messages: list[Body] = [
            {"role": "system", "content": MANY_WORDS},
            {"role": "user", "content": user},
        ]

    def body(self) -> Body:
        functions = [
            {
                "name": "bash",
                "description": "Runs a command.",
                "parameters": schema(command="string"),
            },
            {
                "name": "edit",
                "description": "Edits a file.",
                "parameters": schema(filePath="string"),
            },
        ]
        body: Body = {
            "model": "tiny/byte-model",
            "messages": list(self.messages),
            "tools": [{"type": "function", "function": one} for one in functions],
            "tool_choice": "auto",
            "max_tokens": 8_000,
        }
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def take(self, stream: str) -> None:
        answer: Body = {"role": "assistant", "content": "", "reasoning_content": ""}
        calls: list[Body] = []
        deltas = [json.loads(stream)["choices"][0]["message"]] if not self._stream else []
        for event in events(stream) if self._stream else ():
            deltas += [choice["delta"] for choice in event["choices"]]
        for delta in deltas:
            answer["content"] += delta.get("content") or ""
            answer["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    calls.append(
                        {
                            "id": call["id"],
                            "type": "function",
                            "function": {"name": call["function"]["name"], "arguments": ""},
                        }
                    )
                calls[-1]["function"]["arguments"] += call["function"].get("arguments") or ""
        if not self._keeps_reasoning:
            del answer["reasoning_content"]
        self.messages.append({**answer, "tool_calls": calls} if calls else answer)
        for call in calls:
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": self.result()}
            )
        if not calls:
            self.messages.append({"role": "user", "content": "More."})


class Aider(Shape):
    """Aider: no tools, files as messages, and the rules again at the end."""

    path = "/v1/chat/completions"
    tool = ""

    def __init__(self) -> None:
        self.messages: list[Body] = []

    def body(self) -> Body:
        rules = [{"role": "system", "content": MANY_WORDS}]
        file = [
            {"role": "user", "content": "hello.txt\n```\nhello\n```"},
            {"role": "assistant", "content": "Ok."},
        ]
        task = {"role": "user", "content": f"Change the greeting.\n\n{MANY_WORDS[:200]}"}
        return {
            "model": "tiny/byte-model",
            "messages": [*rules, *file, *self.messages, task],
            "stream": True,
            "temperature": 0,
        }

    def take(self, stream: str) -> None:
        said = "".join(
            choice["delta"].get("content") or ""
            for event in events(stream)
            for choice in event["choices"]
        )
        self.messages += [
            {"role": "user", "content": "Change the greeting."},
            {"role": "assistant", "content": said},
        ]
        self.num_turns += 1


def all_shapes() -> dict[str, Shape]:
    return {
        "codex": Codex(),
        "claude code": ClaudeCode(),
        "opencode": Chat(keeps_reasoning=True),
        "qwen code": Chat(keeps_reasoning=False, in_parts=True),
        "mini-swe-agent": Chat(keeps_reasoning=False, stream=False),
        "aider": Aider(),
    }
