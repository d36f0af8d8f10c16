"""Is the engine alive, is new work accepted, does it generate: for supervisors, load balancers and people."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from weft.messages.sampling import SamplingParams
from weft.server.body import json_bytes
from weft.server.errors import ApiError, failed
from weft.server.info import Front
from weft.server.limits import HEALTH_TIMEOUT_S
from weft.text.client import EngineUnavailable
from weft.text.generation import Prompt


async def health(front: Front, request: Request) -> ASGIApp:
    """Liveness: 200 as long as the engine has not stopped, also while it loads."""
    if front.client.lost is not None:
        raise EngineUnavailable(f"the engine has stopped: {front.client.lost}")
    return Response()


async def ready(front: Front, request: Request) -> ASGIApp:
    """Readiness: 503 before the first token was generated and while the server drains."""
    _ = front.client.engine
    front.require_accepting()
    return Response()


async def health_generate(front: Front, request: Request) -> ASGIApp:
    """Generate one token, on the way that every request takes."""
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    prompt = Prompt(ids=[front.tokenizer.bos_token_id or 0], params=params, rid=f"health-{request.scope['weft.rid']}")
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            with front.client.submit([prompt], stream=False) as generation:
                deltas = [delta async for batch in generation for delta in batch]
    except TimeoutError as exc:
        raise ApiError(503, f"no token was generated within {HEALTH_TIMEOUT_S:g} s") from exc
    end = deltas[0].end
    if end is None or end.failed or end.completion_tokens < 1:
        raise failed(503, "" if end is None else end.message)
    return Response()


async def version(front: Front, request: Request) -> ASGIApp:
    return Response(json_bytes({"version": front.info.version}), media_type="application/json")


async def hello(front: Front, request: Request) -> ASGIApp:
    return PlainTextResponse(
        f"weft {front.info.version} is running {front.info.model_name}\n\n"
        "API      /v1/chat/completions /v1/completions /v1/models /generate /tokenize /detokenize\n"
        "health   /health /ready /health_generate\n"
        "metrics  /metrics\n"
        "schema   /openapi.json\n"
    )
