"""The routes below `/api/`, as Ollama's clients expect them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.server.body import json_bytes, read_json
from weft.server.infill import infill_prompt, infill_tokens, with_stops
from weft.server.info import Front
from weft.server.ollama.models import ChatBody, GenerateBody, OllamaRequest, ShowBody
from weft.server.ollama.reply import OLLAMA_LINES, OllamaReply
from weft.server.ollama.translate import chat_request, generate_request, require_model
from weft.server.openai.conversation import start_chat
from weft.server.openai.translate import encode_texts
from weft.server.stream import Answer

OLLAMA_VERSION = "0.12.0"


async def chat(front: Front, request: Request) -> ASGIApp:
    body = await read_json(front, request, ChatBody)
    require_model(front, body.model)
    if not body.messages:
        return _loaded(front, body, {"message": {"role": "assistant", "content": ""}})
    conversation = await start_chat(front, request, chat_request(body), whole_calls=True)
    reply = OllamaReply(front, conversation, kind="chat")
    return Answer(conversation.generation, reply, OLLAMA_LINES)


async def generate(front: Front, request: Request) -> ASGIApp:
    body = await read_json(front, request, GenerateBody)
    require_model(front, body.model)
    if not body.prompt and not body.suffix:
        return _loaded(front, body, {"response": ""})
    ids: list[int] | None = None
    stops: tuple[int, ...] = ()
    if body.suffix:
        tokens = infill_tokens(front, "suffix")
        ids = await infill_prompt(front, tokens, body.prompt, body.suffix)
        stops = with_stops(front, tokens, front.info.sampling).stop_token_ids
    elif body.raw or front.template is None:
        [ids] = await encode_texts(front, [body.prompt], add_special_tokens=True)
    conversation = await start_chat(front, request, generate_request(body, ids, stops))
    reply = OllamaReply(front, conversation, kind="generate")
    return Answer(conversation.generation, reply, OLLAMA_LINES)


async def tags(front: Front, request: Request) -> ASGIApp:
    return _json({"models": [_model(front)]})


async def ps(front: Front, request: Request) -> ASGIApp:
    return _json({"models": [_model(front) | {"context_length": front.info.context_length}]})


async def show(front: Front, request: Request) -> ASGIApp:
    body = await read_json(front, request, ShowBody)
    require_model(front, body.model or body.name)
    ready = front.client.ready
    capabilities = ["completion" if ready is None or ready.pools is None else "embedding"]
    capabilities += ["tools"] * (front.formats.tools is not None)
    capabilities += ["thinking"] * (front.formats.reasoning is not None)
    return _json(
        {
            "details": _details(),
            "model_info": {
                "general.name": front.info.model_name,
                "weft.context_length": front.info.context_length,
            },
            "template": "\n".join(front.tokenizer.chat_templates.values()),
            "parameters": "",
            "modelfile": "",
            "capabilities": capabilities,
            "modified_at": _started(front),
        }
    )


async def version(front: Front, request: Request) -> ASGIApp:
    """The version of Ollama's API that is spoken here: clients refuse one that is too old."""
    return _json({"version": OLLAMA_VERSION, "weft": front.info.version})


def _loaded(front: Front, body: OllamaRequest, empty: dict[str, Any]) -> Response:
    """What clients send to have a model loaded: an answer without an answer."""
    fields = {"model": front.info.model_name, "created_at": _started(front), **empty}
    answer = json_bytes({**fields, "done": True, "done_reason": "load"})
    if body.stream is False:
        return Response(answer, media_type="application/json")
    return Response(answer + b"\n", media_type="application/x-ndjson")


def _model(front: Front) -> dict[str, Any]:
    name = front.info.model_name
    return {
        "name": name,
        "model": name,
        "modified_at": _started(front),
        "size": 0,
        "digest": "",
        "details": _details(),
    }


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _started(front: Front) -> str:
    return datetime.fromtimestamp(front.info.started_at, UTC).isoformat().replace("+00:00", "Z")


def _json(value: dict[str, Any]) -> Response:
    return Response(json_bytes(value), media_type="application/json")
