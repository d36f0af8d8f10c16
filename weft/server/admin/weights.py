"""New weights for a running engine, and its memory back and forth. Field names and defaults are SGLang's.

Tensors come as bytes with a type and a shape, in JSON (base64) or as a body in the format of safetensors. Nothing that
is pickled is ever read.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.messages.codec import ToEngine
from weft.messages.weights import (
    DestroyWeightsUpdateGroup,
    GetWeightsByName,
    GetWeightsByNameReply,
    InitWeightsUpdateGroup,
    ReleaseMemoryOccupation,
    ResumeMemoryOccupation,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightsFromTensor,
    WeightsReply,
)
from weft.observe.log import EventLog
from weft.server.body import json_bytes, json_response, read_body, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError, not_supported

log = EventLog("weights")
TAGS = ("weights", "kv_cache")
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
}
GROUP = "weight_update_group"
MAX_CONTENT_BYTES = 240_000_000  # of tensors in one request: what one message to the engine holds
MAX_VERSION_LEN = 256
UPDATE_TIMEOUT_S = 3_600.0  # for the engine to read, check and keep a model


class Update(msgspec.Struct, kw_only=True):
    """What all updates have."""

    weight_version: str | None = None  # what answers say from then on
    abort_all_requests: bool = False  # end open requests instead of computing them anew
    flush_cache: bool = True  # K and V of the old weights are dropped in any case


class FromDisk(Update, kw_only=True):
    """Take all weights from a folder below --weights-root."""

    model_path: str
    load_format: str | None = None
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False


class NamedTensor(msgspec.Struct, kw_only=True):
    name: str
    dtype: str
    shape: list[int]
    data: str  # base64 of the values, row by row, little-endian


class FromTensor(Update, kw_only=True):
    """Take some weights. The alternative is a body in the format of safetensors, with these fields in the query."""

    named_tensors: list[NamedTensor] = []
    load_format: str | None = None
    serialized_named_tensors: Any = None


class FromDistributed(Update, kw_only=True):
    """Take some weights that rank 0 of a group broadcasts in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = GROUP
    load_format: str | None = None


class InitGroup(msgspec.Struct, kw_only=True):
    """Join a group whose rank 0 is at this address."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = GROUP
    backend: str = "gloo"
    timeout_s: float = 120.0  # for all to come together, and for each tensor afterwards


class DestroyGroup(msgspec.Struct, kw_only=True):
    group_name: str = GROUP


class ByName(msgspec.Struct, kw_only=True):
    name: str
    truncate_size: int = 100  # rows that are told


class Tags(msgspec.Struct, kw_only=True):
    """Which memory: weights, kv_cache; not given: both."""

    tags: list[str] | None = None


async def update_weights_from_disk(context: ServerContext, request: Request) -> ASGIApp:
    """Load other weights of the same model. 400, and nothing has changed, if anything is wrong with them."""
    body = await read_json(context, request, FromDisk)
    if body.load_format not in (None, "auto", "safetensors"):
        raise ApiError(
            400, f"load_format is {body.load_format[:64]!r}; auto is expected", param="load_format"
        )
    if body.is_async:
        raise not_supported("is_async")
    _check_update(body)
    return await _done(
        context,
        request,
        lambda call: UpdateWeightsFromDisk(
            call=call,
            model_path=body.model_path,
            weight_version=body.weight_version,
            abort_all_requests=body.abort_all_requests,
        ),
        UPDATE_TIMEOUT_S,
    )


async def update_weights_from_tensor(context: ServerContext, request: Request) -> ASGIApp:
    """Take tensors from the body: all of them, or with a 400 none."""
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        == "application/octet-stream"
    ):
        query = request.query_params
        body = FromTensor(
            weight_version=query.get("weight_version"),
            abort_all_requests=query.get("abort_all_requests", "false").lower() in ("1", "true"),
        )
        limit = min(int(context.limits.max_body_mb * 1_000_000), MAX_CONTENT_BYTES)
        content = await read_body(request, limit, context.limits.body_timeout_s)
    else:
        body = await read_json(context, request, FromTensor)
        if body.serialized_named_tensors is not None:
            raise ApiError(
                400,
                "pickled tensors are never read; send named_tensors",
                param="serialized_named_tensors",
            )
        if body.load_format is not None:
            raise not_supported("load_format")
        content = as_safetensors(body.named_tensors)
    _check_update(body)
    return await _done(
        context,
        request,
        lambda call: UpdateWeightsFromTensor(
            call=call,
            content=content,
            weight_version=body.weight_version,
            abort_all_requests=body.abort_all_requests,
        ),
        UPDATE_TIMEOUT_S,
    )


async def update_weights_from_distributed(context: ServerContext, request: Request) -> ASGIApp:
    """Receive tensors from rank 0 of a group: all of them, or with a 400 none."""
    body = await read_json(context, request, FromDistributed)
    if body.load_format is not None:
        raise not_supported("load_format")
    _check_update(body)
    return await _done(
        context,
        request,
        lambda call: UpdateWeightsFromDistributed(
            call=call,
            names=body.names,
            dtypes=body.dtypes,
            shapes=body.shapes,
            group_name=body.group_name,
            weight_version=body.weight_version,
            abort_all_requests=body.abort_all_requests,
        ),
        UPDATE_TIMEOUT_S,
    )


async def init_weights_update_group(context: ServerContext, request: Request) -> ASGIApp:
    """Join a group, when all others have come. 400 if they do not."""
    body = await read_json(context, request, InitGroup)
    if not body.rank_offset < body.world_size:
        message = f"rank_offset is {body.rank_offset} of {body.world_size}; rank 0 sends, so 1 or more is expected"
        raise ApiError(400, message, param="rank_offset")
    return await _done(
        context,
        request,
        lambda call: InitWeightsUpdateGroup(
            call=call,
            master_address=body.master_address,
            master_port=body.master_port,
            rank=body.rank_offset,
            world_size=body.world_size,
            group_name=body.group_name,
            backend=body.backend,
            timeout_s=body.timeout_s,
        ),
        UPDATE_TIMEOUT_S + body.timeout_s,
    )


async def destroy_weights_update_group(context: ServerContext, request: Request) -> ASGIApp:
    """Leave a group."""
    body = await read_json(context, request, DestroyGroup) if _has_body(request) else DestroyGroup()
    return await _done(
        context,
        request,
        lambda call: DestroyWeightsUpdateGroup(call=call, group_name=body.group_name),
        UPDATE_TIMEOUT_S,
    )


async def get_weights_by_name(context: ServerContext, request: Request) -> ASGIApp:
    """The first rows of a weight as it is kept, as nested lists."""
    body = await read_json(context, request, ByName)
    reply = await context.client.call(
        lambda call: GetWeightsByName(call=call, name=body.name, truncate_size=body.truncate_size),
        GetWeightsByNameReply,
        UPDATE_TIMEOUT_S,
    )
    if not reply.success:
        raise ApiError(reply.status, reply.message, param="name")
    return json_response(
        np.frombuffer(reply.values, dtype=np.float32).reshape(reply.shape).tolist()
    )


async def release_memory_occupation(context: ServerContext, request: Request) -> ASGIApp:
    """Give memory back to the system; new requests get 503 until it is resumed."""
    tags = await _tags(context, request)
    return await _done(
        context,
        request,
        lambda call: ReleaseMemoryOccupation(call=call, tags=tags),
        UPDATE_TIMEOUT_S,
    )


async def resume_memory_occupation(context: ServerContext, request: Request) -> ASGIApp:
    """Use it again, with an empty cache and the weights of the last folder."""
    tags = await _tags(context, request)
    return await _done(
        context,
        request,
        lambda call: ResumeMemoryOccupation(call=call, tags=tags),
        UPDATE_TIMEOUT_S,
    )


def as_safetensors(tensors: Sequence[NamedTensor]) -> bytes:
    """Tensors one after the other behind a header. Raises `ApiError` for bytes that are not those of a shape."""
    header: dict[str, Any] = {}
    data: list[bytes] = []
    at = 0
    for index, tensor in enumerate(tensors):
        param = f"named_tensors[{index}]"
        dtype, item_bytes = DTYPES.get(tensor.dtype.removeprefix("torch."), ("", 0))
        if not dtype:
            allowed = ", ".join(DTYPES)
            raise ApiError(
                400, f"dtype is {tensor.dtype[:64]!r}; one of {allowed} is expected", param=param
            )
        if tensor.name in header:
            raise ApiError(400, f"{tensor.name[:200]!r} is given twice", param=param)
        expected = math.prod(tensor.shape) * item_bytes
        if len(tensor.data) != -(-expected // 3) * 4:
            message = f"data has {len(tensor.data):,} characters; base64 of {expected:,} bytes has another length"
            raise ApiError(400, message, param=param)
        try:
            data.append(base64.b64decode(tensor.data, validate=True))
        except binascii.Error as exc:
            raise ApiError(400, "data is no base64", param=param) from exc
        end = at + len(data[-1])
        header[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    encoded = json_bytes(header)
    return b"".join([len(encoded).to_bytes(8, "little"), encoded, *data])


async def _tags(context: ServerContext, request: Request) -> list[str]:
    body = await read_json(context, request, Tags) if _has_body(request) else Tags()
    return list(TAGS) if body.tags is None else body.tags


async def _done(
    context: ServerContext, request: Request, make: Callable[[int], ToEngine], timeout_s: float
) -> Response:
    """Let the engine do it. Raises `ApiError` if it could not."""
    reply = await context.client.call(make, WeightsReply, timeout_s)
    log.info(
        "device_request",
        path=request.url.path,
        success=reply.success,
        weight_version=reply.weight_version,
        message=reply.message or "-",
    )
    if not reply.success:
        raise ApiError(reply.status, reply.message)
    return json_response(
        {
            "success": True,
            "message": reply.message,
            "weight_version": reply.weight_version,
            "num_tensors": reply.num_tensors,
            "num_bytes": reply.num_bytes,
            "num_paused_requests": reply.num_requests,
            "released": reply.released,
        }
    )


def _check_update(body: Update) -> None:
    if body.weight_version is not None and not 0 < len(body.weight_version) <= MAX_VERSION_LEN:
        raise ApiError(
            400,
            f"weight_version must have 1 to {MAX_VERSION_LEN} characters",
            param="weight_version",
        )


def _has_body(request: Request) -> bool:
    return (
        request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    )
