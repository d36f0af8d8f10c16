"""Ollama's routes below `/api/`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.json_types import JsonObject
from weft.server.body import json_bytes, json_response, read_json
from weft.server.catalog import CatalogError, CatalogModel, NoSuchModel
from weft.server.chat.conversation import start_chat
from weft.server.context import ModelFacts, ServerContext
from weft.server.errors import ApiError
from weft.server.infill import infill_prompt, infill_tokens, with_stops
from weft.server.model_names import answering_name, require_model
from weft.server.ollama.models import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaShowRequest,
)
from weft.server.ollama.reply import OLLAMA_LINES, OllamaReply
from weft.server.ollama.translate import (
    chat_request,
    generate_request,
)
from weft.server.operation import get, post
from weft.server.prompt_ids import encode_texts
from weft.server.stream import Answer

OLLAMA_VERSION = "0.12.0"


async def chat(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, OllamaChatRequest)
    if not body.messages:
        return _loaded(context, body, {"message": {"role": "assistant", "content": ""}})
    conversation = await start_chat(context, request, chat_request(body), complete_calls=True)
    reply = OllamaReply(context, conversation, model=_asked_for(context, body), kind="chat")
    return Answer(conversation.generation, reply, OLLAMA_LINES)


async def generate(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, OllamaGenerateRequest)
    if not body.prompt and not body.suffix and not body.images:
        return _loaded(context, body, {"response": ""})
    ids: list[int] | None = None
    stops: tuple[int, ...] = ()
    if body.suffix:
        tokens = infill_tokens(context, "suffix")
        ids = await infill_prompt(context, tokens, body.prompt, body.suffix)
        stops = with_stops(context, tokens, context.info.sampling).stop_token_ids
    elif body.raw or context.template is None:
        [ids] = await encode_texts(context, [body.prompt], add_special_tokens=True)
    conversation = await start_chat(context, request, generate_request(body, ids, stops))
    reply = OllamaReply(context, conversation, model=_asked_for(context, body), kind="generate")
    return Answer(conversation.generation, reply, OLLAMA_LINES)


async def tags(context: ServerContext, request: Request) -> ASGIApp:
    """The served model, and the loaded adapters."""
    return json_response({"models": await _models(context)})


async def ps(context: ServerContext, request: Request) -> ASGIApp:
    """Like `tags`, because all models are in memory; with the context length."""
    length = {"context_length": context.info.context_length}
    return json_response({"models": [model | length for model in await _models(context)]})


async def show(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, OllamaShowRequest)
    try:
        require_model(context, body.target)
    except ApiError as exc:
        return json_response(await shown_from_catalog(context, str(body.target), exc))
    ready = context.client.state.ready
    makes_vectors = ready is not None and ready.pools is not None
    capabilities = ["embedding" if makes_vectors else "completion"]
    if context.media is not None and "image" in context.media.marks:
        capabilities.append("vision")
    if context.formats.tools is not None:
        capabilities.append("tools")
    if context.formats.reasoning is not None:
        capabilities.append("thinking")
    return json_response(
        {
            "details": details(context.info.model),
            "model_info": model_numbers(
                context.info.model,
                context.info.context_length,
                answering_name(context, body.target),
            ),
            "template": "\n".join(context.tokenizer.chat_templates.values()),
            "parameters": "",
            "modelfile": "",
            "capabilities": capabilities,
            "modified_at": _started(context),
        }
    )


async def version(context: ServerContext, request: Request) -> ASGIApp:
    """The version of Ollama's API that the server implements: clients refuse versions that are too
    old."""
    return json_response({"version": OLLAMA_VERSION, "weft": context.info.version})


def _loaded(
    context: ServerContext,
    body: OllamaRequest,
    empty: JsonObject,
) -> Response:
    """The answer without text to a request that only loads a model."""
    fields = {
        "model": _asked_for(context, body),
        "created_at": _started(context),
        **empty,
    }
    answer = json_bytes(
        {
            **fields,
            "done": True,
            "done_reason": "load",
        }
    )
    if body.stream is False:
        return Response(answer, media_type="application/json")
    return Response(answer + b"\n", media_type="application/x-ndjson")


def _asked_for(context: ServerContext, body: OllamaRequest) -> str:
    return answering_name(context, body.model)


async def shown_from_catalog(context: ServerContext, name: str, refusal: ApiError) -> JsonObject:
    """The facts of a model that is on this machine, and not served here. Raises `refusal` if there
    is none."""
    catalog = context.catalog
    if catalog is None:
        raise refusal
    try:
        found = await asyncio.to_thread(catalog.show, name)
    except NoSuchModel as exc:
        raise refusal from exc
    except CatalogError as exc:
        raise ApiError(400, str(exc), param="model") from exc
    facts = facts_of(found)
    return {
        "details": details(facts),
        "model_info": model_numbers(facts, found.context_length, found.name),
        "template": found.template,
        "license": found.license,
        "parameters": "",
        "modelfile": "",
        "capabilities": ["completion"],
        "modified_at": _time(found.modified_at),
        "digest": found.digest,
    }


async def _models(context: ServerContext) -> list[JsonObject]:
    names = [context.info.model_name, *context.adapters.by_name]
    digest = ""
    if context.catalog is not None and context.info.model.folder:
        digest = await asyncio.to_thread(context.catalog.digest, context.info.model.folder)
    return [_model(context, name, digest) for name in names]


def _model(context: ServerContext, name: str, digest: str) -> JsonObject:
    return {
        "name": name,
        "model": name,
        "modified_at": _started(context),
        "size": context.info.model.size_bytes,
        "digest": digest,
        "details": details(context.info.model),
    }


def facts_of(found: CatalogModel) -> ModelFacts:
    """The facts of a model of the catalog that its entry in a list has."""
    return ModelFacts(
        family=found.family,
        format=found.format,
        num_parameters=found.num_parameters,
        quantization=found.quantization,
        size_bytes=found.size_bytes,
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        num_layers=found.num_layers,
        num_heads=found.num_heads,
        num_kv_heads=found.num_kv_heads,
    )


def details(model: ModelFacts) -> JsonObject:
    return {
        "parent_model": "",
        "format": model.format,
        "family": model.family,
        "families": [model.family] if model.family else [],
        "parameter_size": _rounded(model.num_parameters),
        "quantization_level": model.quantization,
    }


def _rounded(num: int) -> str:
    """A number of parameters as Ollama writes it: 596.05M, 8.0B; empty if it is not known."""
    if num >= 10**9:
        return f"{num / 1e9:.1f}B"
    return f"{num / 1e6:.2f}M" if num else ""


def model_numbers(model: ModelFacts, context_length: int, name: str) -> JsonObject:
    """The model's numbers, under the keys of GGUF's metadata."""
    family = model.family or "weft"
    found = {
        "general.architecture": family,
        "general.name": name,
        "general.parameter_count": model.num_parameters,
        f"{family}.context_length": context_length,
        f"{family}.embedding_length": model.hidden_size,
        f"{family}.feed_forward_length": model.intermediate_size,
        f"{family}.block_count": model.num_layers,
        f"{family}.attention.head_count": model.num_heads,
        f"{family}.attention.head_count_kv": model.num_kv_heads,
        f"{family}.vocab_size": model.vocab_size,
    }
    return {key: value for key, value in found.items() if value}


def _started(context: ServerContext) -> str:
    return _time(context.info.started_at)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


ROUTES = (
    post("/api/chat", chat, "Continue a conversation (Ollama)", OllamaChatRequest),
    post("/api/generate", generate, "Continue a text (Ollama)", OllamaGenerateRequest),
    get("/api/tags", tags, "The models that are served, and adapters (Ollama)"),
    get("/api/ps", ps, "The models that are loaded, and adapters (Ollama)"),
    post("/api/show", show, "Facts about the model (Ollama)", OllamaShowRequest),
    get("/api/version", version, "Version of weft (Ollama)"),
)
