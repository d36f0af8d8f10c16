"""Translates Anthropic's messages to a chat request. Errors name a part that cannot be
translated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from weft.json_types import JsonObject
from weft.server.anthropic.models import (
    AnthropicBlock,
    AnthropicMessage,
    CountRequest,
    ImageSource,
    Inner,
    MessagesRequest,
    Tool,
    ToolChoice,
)
from weft.server.chat.agents import is_hosted, without_pseudo_headers
from weft.server.chat.models import ChatMessage, ContentPart, PlacedPart, TranslatedChat
from weft.server.chat.sealed import Opener
from weft.server.chat.tool_paths import ToolPath
from weft.server.errors import ApiError
from weft.server.fields.arguments import arguments_text
from weft.server.fields.grammar import RESPONSE_FORMAT
from weft.server.fields.sampling import ThinkingSwitch, copy_sampling, require_one_answer
from weft.server.requests import copy_generation

# What other servers' models and tools have left in the history.
_LEFT_OUT = (
    "redacted_thinking",
    "server_tool_use",
    "mcp_tool_use",
    "mcp_tool_result",
)


def open_signatures(body: CountRequest, opener: Opener) -> None:
    """Give blocks of reasoning their text: some clients keep only the signature, which has it as
    well."""
    for index, message in enumerate(body.messages):
        if isinstance(message.content, str):
            continue
        for number, block in enumerate(message.content):
            if block.type == "thinking" and block.signature and not block.thinking:
                where = f"messages[{index}].content[{number}].signature"
                block.thinking = opener.opened(block.signature, where)


def chat_request(body: CountRequest) -> TranslatedChat:
    """A chat request with the fields that determine the prompt."""
    messages = _system(body.system)
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    request = TranslatedChat(messages=messages)
    copy_generation(body, request)
    request.chat_template_kwargs = body.chat_template_kwargs
    request.stop_in_reasoning = body.stop_in_reasoning
    request.mm_processor_kwargs = body.mm_processor_kwargs
    if body.tools is not None:
        request.tools = []
        for index, tool in enumerate(body.tools):
            if not _is_hosted(tool):
                where = f"tools[{index}]"
                request.tools.append(_tool(tool, where))
                request.tool_paths.append(ToolPath(where, where, "input_schema"))
    if body.thinking is not None:
        request.thinking = ThinkingSwitch(
            type=body.thinking.type, budget_tokens=body.thinking.budget_tokens
        )
    if body.output_config is not None:
        request.reasoning_effort = body.output_config.effort
    if body.tool_choice is not None:
        _choose(request, body.tool_choice)
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and not last.tool_calls:  # continue it
        request.continue_final_message = True
        request.add_generation_prompt = False
    return request


def sampled_request(body: MessagesRequest) -> TranslatedChat:
    """The complete chat request."""
    require_one_answer(body.n)
    request = chat_request(body)
    copy_sampling(body, request)
    formats = _output_formats(body)
    for path, format in formats.items():
        request.response_format = _response_format(format)
        request.format_path = path
    request.max_tokens = body.max_tokens
    if body.metadata is not None and body.metadata.user_id is not None:
        request.user = body.metadata.user_id
    return request


def _output_formats(body: MessagesRequest) -> dict[str, JsonObject]:
    """The form of the answer, by the field that has it: none or one. Raises `ApiError`."""
    formats: dict[str, JsonObject | None] = {
        RESPONSE_FORMAT: body.response_format,
        "output_format": body.output_format,
        "output_config.format": None,
    }
    if body.output_config is not None:
        formats["output_config.format"] = body.output_config.format
    found = {name: format for name, format in formats.items() if format is not None}
    if len(found) > 1:
        *_, last = found
        message = f"{' and '.join(found)} are given; only one may say what the answer must be"
        raise ApiError(400, message, param=last)
    return found


def _system(system: str | list[Inner] | None) -> list[ChatMessage]:
    if not system:
        return []
    if isinstance(system, str):
        text = without_pseudo_headers(system)
    else:
        text = _joined(system, "system", without_pseudo_headers)
    return [ChatMessage(role="system", content=text)] if text else []


def _messages(message: AnthropicMessage, where: str) -> list[ChatMessage]:
    """The chat messages of a message: results of tools become separate messages, before the user's
    own content."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results: list[ChatMessage] = []
    parts: list[ContentPart] = []
    reasoning: list[str] = []
    calls: list[JsonObject] = []
    for number, block in enumerate(message.content):
        param = f"{where}.content[{number}]"
        match block.type:
            case "text":
                parts.append(ContentPart(type="text", text=block.text or ""))
            case "image":
                parts.append(_image(block.source, param))
            case "search_result":
                parts.append(_search_result(block, param))
            case "thinking":
                reasoning.append(block.thinking or "")
            case "tool_use":
                calls.append(_call(block))
            case "tool_result":
                id = block.tool_use_id or ""
                results.append(
                    ChatMessage(
                        role="tool",
                        tool_call_id=id,
                        content=_result(block.content or "", f"{param}.content"),
                    )
                )
            case kind if not _is_left_out(block):
                raise _wrong_block(kind, param)
    if results and not (parts or calls or reasoning):
        return results
    # The texts of an answer are pieces of one text, between which there were other blocks.
    between = "" if message.role == "assistant" else "\n"
    own = ChatMessage(role=message.role, content=_content(parts, between))
    own.tool_calls = calls or None
    own.reasoning_content = between.join(reasoning) or None
    return [*results, own]


def _is_left_out(block: AnthropicBlock) -> bool:
    return block.type in _LEFT_OUT or (
        block.type.endswith("_tool_result") and block.type != "tool_result"
    )


def _content(parts: list[ContentPart], between: str = "\n") -> str | list[ContentPart]:
    """Parts that are only texts become one text."""
    if any(part.type != "text" for part in parts):
        return parts
    return between.join(part.text or "" for part in parts)


def _result(content: str | list[Inner], where: str) -> str | list[ContentPart]:
    """The content of a tool result."""
    if isinstance(content, str):
        return content
    parts: list[ContentPart] = []
    for number, block in enumerate(content):
        param = f"{where}[{number}]"
        match block.type:
            case "text":
                parts.append(ContentPart(type="text", text=block.text or ""))
            case "image":
                parts.append(_image(block.source, param))
            case "search_result":
                parts.append(_search_result(block, param))
            case kind:
                raise _wrong_block(kind, param)
    return _content(parts)


def _search_result(block: AnthropicBlock | Inner, param: str) -> ContentPart:
    """A result of a search as text: its title, its source, then its own texts."""
    lines = [block.title or ""]
    if isinstance(block.source, str):
        lines.append(block.source)
    lines.append(_joined(block.content or "", f"{param}.content"))
    return ContentPart(type="text", text="\n".join(filter(None, lines)))


def _image(source: str | ImageSource | None, param: str) -> ContentPart:
    url = None
    if isinstance(source, ImageSource):
        match source.type:
            case "base64":
                url = f"data:;base64,{source.data or ''}"
            case "url":
                url = source.url
            case "file":
                message = f"{param} names a file; uploaded files serve batches only"
                raise ApiError(400, message, param=param, code="unsupported_parameter")
            case kind:
                message = f"{param}.source.type is {kind[:64]!r}; base64 and url are allowed"
                raise ApiError(400, message, param=f"{param}.source.type")
    if not url:
        raise ApiError(400, f"{param} has no source with data or url", param=param)
    return PlacedPart(type="image_url", image_url=url, where=param)


def _call(block: AnthropicBlock) -> JsonObject:
    return {
        "id": block.id or "",
        "type": "function",
        "function": {"name": block.name or "", "arguments": arguments_text(block.input)},
    }


def _joined(
    content: str | list[Inner], where: str, change: Callable[[str], str] | None = None
) -> str:
    """Blocks as the lines of one text; with `change`, those that it leaves empty are left out."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, block in enumerate(content):
        if block.type != "text":
            raise _wrong_block(block.type, f"{where}[{number}]")
        text = block.text or ""
        changed = text if change is None else change(text)
        if changed or not text:
            texts.append(changed)
    return "\n".join(texts)


def _wrong_block(kind: str, param: str) -> ApiError:
    message = f"{param} is of type {kind[:64]!r}, which this model does not support"
    return ApiError(400, message, param=param)


def warnings_of(body: CountRequest) -> tuple[str, ...]:
    """Warnings about tools and blocks of the history that are left out."""
    kinds = dict.fromkeys(tool.type for tool in body.tools or () if _is_hosted(tool) and tool.type)
    found: list[str] = []
    if kinds:
        names = ", ".join(kind[:64] for kind in kinds)
        found.append(f"tools of these types do not run here and were left out: {names}")
    blocks = Counter(
        block.type
        for message in body.messages
        if isinstance(message.content, list)
        for block in message.content
        if _is_left_out(block)
    )
    if blocks:
        listed = ", ".join(f"{number} x {kind}" for kind, number in blocks.items())
        found.append(f"blocks that only their own server knows were left out: {listed}")
    return tuple(found)


def _is_hosted(tool: Tool) -> bool:
    return tool.type is not None and is_hosted(tool.type)


def _tool(tool: Tool, where: str) -> JsonObject:
    if tool.type not in (None, "custom"):
        message = f"{where} is of type {tool.type[:64]!r}; the type custom is allowed"
        raise ApiError(400, message, param=where)
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema or {},
    }
    return {"type": "function", "function": function}


def _choose(request: TranslatedChat, choice: ToolChoice) -> None:
    if choice.type == "tool":
        request.tool_choice = {"type": "function", "function": {"name": choice.name or ""}}
    elif choice.type == "any":
        request.tool_choice = "required"
    else:
        request.tool_choice = choice.type
    request.parallel_tool_calls = False if choice.disable_parallel_tool_use else None


def _response_format(format: JsonObject) -> JsonObject:
    """The response format of chat requests, where a schema is one level deeper."""
    if format.get("type") != "json_schema" or "json_schema" in format:
        return format
    return {
        "type": "json_schema",
        "json_schema": {
            "name": "answer",
            "schema": format.get("schema"),
            "strict": True,
        },
    }
