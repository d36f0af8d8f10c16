"""Updates of a running engine's weights, and release and resumption of its memory.

Field names and defaults are SGLang's. The bodies are the engine's own messages; only tensors in
JSON have their own struct.

Tensors are sent as bytes with a dtype and a shape, in JSON (base64) or as a body in the safetensors
format. Pickled data is never read.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.json_types import JsonObject
from weft.messages.by_name import plain
from weft.messages.calls import ControlRequest
from weft.messages.weights import (
    DestroyWeightsUpdateGroup,
    GetWeightsByName,
    InitWeightsUpdateGroup,
    ReleaseMemoryOccupation,
    ResumeMemoryOccupation,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightsFromTensor,
    WeightsReply,
)
from weft.observe.log import EventLog
from weft.server.body import has_body, json_bytes, json_response, read_body, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.operation import post

log = EventLog("weights")
M = TypeVar("M", bound=ControlRequest[WeightsReply])


class SafetensorsType(NamedTuple):
    name: str
    item_bytes: int


DTYPES = {
    "float64": SafetensorsType("F64", 8),
    "float32": SafetensorsType("F32", 4),
    "float16": SafetensorsType("F16", 2),
    "bfloat16": SafetensorsType("BF16", 2),
}
MAX_CONTENT_BYTES = 240_000_000  # bytes of tensors per request: one message to the engine
MAX_VERSION_LEN = 256
UPDATE_TIMEOUT_S = 3_600.0  # for the engine to read, check and store a model


class NamedTensor(msgspec.Struct, kw_only=True):
    name: str
    dtype: str
    shape: list[int]
    data: str  # base64 of the values, row by row, little-endian


class TensorsBody(msgspec.Struct, kw_only=True):
    """Replace some weights.

    The alternative is a body in the safetensors format, with these fields in the query.
    """

    named_tensors: list[NamedTensor] = []
    serialized_named_tensors: Any = None
    weight_version: str | None = None  # later answers contain it
    abort_all_requests: bool = False  # end open requests instead of recomputing them


# ---- weights


async def update_weights_from_disk(context: ServerContext, request: Request) -> ASGIApp:
    """Load other weights of the same model. On any error, the answer is a 400 and nothing has
    changed."""
    body = await read_json(context, request, UpdateWeightsFromDisk)
    if body.load_format not in (None, "auto", "safetensors"):
        message = f"load_format is {body.load_format[:64]!r}; auto is expected"
        raise ApiError(400, message, param="load_format")
    _check_version(body.weight_version)
    return await _done(context, request, body)


async def update_weights_from_tensor(context: ServerContext, request: Request) -> ASGIApp:
    """Replace weights by the tensors of the body: all of them, or none and a 400."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/octet-stream":
        message = await _from_safetensors(context, request)
    else:
        message = await _from_json(context, request)
    _check_version(message.weight_version)
    return await _done(context, request, message)


async def _from_safetensors(context: ServerContext, request: Request) -> UpdateWeightsFromTensor:
    limits = context.limits
    limit = min(int(limits.max_body_mb * 1_000_000), MAX_CONTENT_BYTES)
    content = await read_body(request, limit, limits.body_timeout_s)
    query = request.query_params
    aborts = query.get("abort_all_requests", "false").lower()
    return UpdateWeightsFromTensor(
        content,
        weight_version=query.get("weight_version"),
        abort_all_requests=aborts in ("1", "true"),
    )


async def _from_json(context: ServerContext, request: Request) -> UpdateWeightsFromTensor:
    body = await read_json(context, request, TensorsBody)
    if body.serialized_named_tensors is not None:
        message = "pickled tensors are never read; send named_tensors"
        raise ApiError(400, message, param="serialized_named_tensors")
    return UpdateWeightsFromTensor(
        as_safetensors(body.named_tensors),
        weight_version=body.weight_version,
        abort_all_requests=body.abort_all_requests,
    )


async def update_weights_from_distributed(context: ServerContext, request: Request) -> ASGIApp:
    """Receive tensors from rank 0 of a group: all of them, or none and a 400."""
    body = await read_json(context, request, UpdateWeightsFromDistributed)
    _check_version(body.weight_version)
    return await _done(context, request, body)


async def init_weights_update_group(context: ServerContext, request: Request) -> ASGIApp:
    """Join a group; waits for all other members. 400 if they do not join in time."""
    body = await read_json(context, request, InitWeightsUpdateGroup)
    if not body.rank_offset < body.world_size:
        message = (
            f"rank_offset is {body.rank_offset} of {body.world_size}; "
            "rank 0 sends, so 1 or more is expected"
        )
        raise ApiError(400, message, param="rank_offset")
    if not body.master_address.strip():
        message = "master_address is empty; the address of rank 0 is needed"
        raise ApiError(400, message, param="master_address")
    return await _done(context, request, body, UPDATE_TIMEOUT_S + body.timeout_s)


async def destroy_weights_update_group(context: ServerContext, request: Request) -> ASGIApp:
    """Leave a group."""
    body = await _body_or(context, request, DestroyWeightsUpdateGroup())
    return await _done(context, request, body)


async def get_weights_by_name(context: ServerContext, request: Request) -> ASGIApp:
    """The first rows of a weight as stored, as nested lists."""
    body = await read_json(context, request, GetWeightsByName)
    reply = await context.client.call(body, UPDATE_TIMEOUT_S)
    if not reply.success:
        raise ApiError(reply.status, reply.message, param="name")
    values = np.frombuffer(reply.values, dtype=np.float32)
    return json_response(values.reshape(reply.shape).tolist())


# ---- memory


async def release_memory_occupation(context: ServerContext, request: Request) -> ASGIApp:
    """Return memory to the system; new requests get a 503 until the memory is resumed."""
    body = await _body_or(context, request, ReleaseMemoryOccupation())
    return await _done(context, request, body)


async def resume_memory_occupation(context: ServerContext, request: Request) -> ASGIApp:
    """Take the memory again, with an empty cache and the weights of the last folder."""
    body = await _body_or(context, request, ResumeMemoryOccupation())
    return await _done(context, request, body)


# ---- inside


def as_safetensors(tensors: Sequence[NamedTensor]) -> bytes:
    """The tensors in the safetensors format: a header, then their values.

    Raises `ApiError` if the bytes of a tensor do not match its shape.
    """
    header: JsonObject = {}
    data: list[bytes] = []
    begin = 0
    for index, tensor in enumerate(tensors):
        param = f"named_tensors[{index}]"
        if tensor.name in header:
            raise ApiError(400, f"{tensor.name[:200]!r} is given twice", param=param)
        dtype, values = _values(tensor, param)
        end = begin + len(values)
        header[tensor.name] = {
            "dtype": dtype.name,
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        }
        data.append(values)
        begin = end
    encoded = json_bytes(header)
    return b"".join([len(encoded).to_bytes(8, "little"), encoded, *data])


def _values(tensor: NamedTensor, param: str) -> tuple[SafetensorsType, bytes]:
    """The type and the bytes of a tensor. Raises `ApiError`."""
    dtype = DTYPES.get(tensor.dtype.removeprefix("torch."))
    if dtype is None:
        message = f"dtype is {tensor.dtype[:64]!r}; one of {', '.join(DTYPES)} is expected"
        raise ApiError(400, message, param=param)
    expected = math.prod(tensor.shape) * dtype.item_bytes
    # Base64 writes 3 bytes as 4 characters. This check comes before decoding, which may be long.
    if len(tensor.data) != -(-expected // 3) * 4:
        message = (
            f"data has {len(tensor.data):,} characters; "
            f"base64 of {expected:,} bytes has another length"
        )
        raise ApiError(400, message, param=param)
    try:
        return dtype, base64.b64decode(tensor.data, validate=True)
    except ValueError as exc:  # also of characters that are not ASCII
        raise ApiError(400, "data is not base64", param=param) from exc


async def _body_or(context: ServerContext, request: Request, default: M) -> M:
    """The body, or `default` if the request has none."""
    if not has_body(request):
        return default
    return await read_json(context, request, type(default))


async def _done(
    context: ServerContext,
    request: Request,
    message: ControlRequest[WeightsReply],
    timeout_s: float = UPDATE_TIMEOUT_S,
) -> ASGIApp:
    """Send a message to the engine. Raises `ApiError` if the engine reports a failure."""
    reply = await context.client.call(message, timeout_s)
    log.info(
        "device_request",
        path=request.url.path,
        success=reply.success,
        weight_version=reply.weight_version,
        message=reply.message or "-",
    )
    if not reply.success:
        raise ApiError(reply.status, reply.message)
    answer = plain(reply)
    del answer["status"]
    return json_response(answer)


def _check_version(version: str | None) -> None:
    if version is not None and not 0 < len(version) <= MAX_VERSION_LEN:
        message = f"weight_version must have 1 to {MAX_VERSION_LEN} characters"
        raise ApiError(400, message, param="weight_version")


ROUTES = (
    post(
        "/update_weights_from_disk",
        update_weights_from_disk,
        "Load other weights from a folder",
        UpdateWeightsFromDisk,
        access="admin",
    ),
    post(
        "/update_weights_from_tensor",
        update_weights_from_tensor,
        "Replace some weights",
        TensorsBody,
        access="admin",
        texts=("weight_version", "abort_all_requests"),
    ),
    post(
        "/update_weights_from_distributed",
        update_weights_from_distributed,
        "Receive some weights",
        UpdateWeightsFromDistributed,
        access="admin",
    ),
    post(
        "/init_weights_update_group",
        init_weights_update_group,
        "Join a group of processes from which weights come",
        InitWeightsUpdateGroup,
        access="admin",
    ),
    post(
        "/destroy_weights_update_group",
        destroy_weights_update_group,
        "Leave such a group",
        DestroyWeightsUpdateGroup,
        access="admin",
    ),
    post(
        "/get_weights_by_name",
        get_weights_by_name,
        "The first rows of a weight",
        GetWeightsByName,
        access="admin",
    ),
    post(
        "/release_memory_occupation",
        release_memory_occupation,
        "Give memory back to the system",
        ReleaseMemoryOccupation,
        access="admin",
    ),
    post(
        "/resume_memory_occupation",
        resume_memory_occupation,
        "Use that memory again",
        ResumeMemoryOccupation,
        access="admin",
    ),
)
