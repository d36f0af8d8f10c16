"""Request bodies: read with a limit, decoded into a struct; errors name the invalid field.

Unknown fields are ignored and counted. Fields that other APIs or engines support and this one does
not are refused, unless their value has no effect (`fields/known.py`). This module does not know
what the fields mean.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Set
from contextlib import nullcontext
from functools import cache, partial
from itertools import islice
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from weft.config.limits import Limits
from weft.json_types import JsonObject
from weft.messages.wrong_field import wrong_field
from weft.observe.log import EventLog
from weft.observe.request_context import rename, spent
from weft.server.auth import is_from_browser
from weft.server.context import ServerContext
from weft.server.errors import ApiError, ClientGone, not_supported, over
from weft.server.fields.integers import with_integers
from weft.server.fields.json_parts import has_more_parts
from weft.server.fields.known import IGNORED, REFUSED, asks_for_nothing
from weft.server.fields.numbers import check_numbers
from weft.server.fields.sampling import ExtraSamplingFields
from weft.server.limits import check_body, require_room
from weft.server.model_names import use_named
from weft.text.surrogates import readable_json

log = EventLog("server")
T = TypeVar("T", bound=msgspec.Struct)
json_bytes: Callable[[Any], bytes] = msgspec.json.encode

INLINE_LEN = 16_384  # bytes that are decoded on the event loop; larger bodies go to a thread
# Bytes from which decoding is long work, and frees enough memory to return it to the system.
LARGE_LEN = 262_144
MAX_NAMES = 16  # unknown fields that a log line names
MAX_NAME_LEN = 64  # characters of such a name
_NO_TIMER = nullcontext()
_making_a_decoder = threading.Lock()


class BodyConnection(Protocol):
    """The connection of a request (`server/http/protocol.py`)."""

    @property
    def is_receiving(self) -> bool:
        """Whether the end of the request has not arrived yet."""


async def read_json(context: ServerContext, request: Request, type: type[T]) -> T:
    """The body of `request`, decoded as `type`; if it names a model, that is served.

    Raises `ApiError`, or `Busy`.
    """
    _require_json(request)
    limits = context.limits
    ready = context.client.state.ready
    vocab_size = None if ready is None else ready.vocab_size
    require_room(0)
    limit = "max_body_mb"
    largest_mb = limits.max_body_mb
    if context.media is not None and limits.max_media_mb > largest_mb:
        limit = "max_media_mb"
        largest_mb = limits.max_media_mb
    body = await read_body(request, int(largest_mb * 1_000_000), limits.body_timeout_s, limit)
    parsing_s = time.perf_counter()
    require_room(len(body))
    work = partial(_decoded, limits, vocab_size, body, type)
    try:
        if len(body) <= INLINE_LEN:
            decoded, others = work()
        else:
            is_large = len(body) >= LARGE_LEN
            request.scope["weft.large_body"] = is_large
            decoded, others = await context.readers.run(work, is_long=is_large)
    except ApiError:
        # So that `weft ctl why` finds it by the client's name for it.
        read_name = partial(_name_in, body, limits.max_rid_len)
        if len(body) <= INLINE_LEN:
            rename(read_name())
        else:
            rename(await context.readers.run(read_name, is_long=False))
        raise
    finally:
        spent("parse", parsing_s)
    name = _name_of(decoded, limits.max_rid_len)
    if name:
        rename(name)
    if others:
        context.client.metrics.unknown_fields(len(others))
        names = [name[:MAX_NAME_LEN] for name in islice(others, MAX_NAMES)]
        log.debug("unknown_fields", names=",".join(names))
    model = getattr(decoded, "model", None)
    if context.adapters.offers or (model and model != context.info.model_name):
        await use_named(context, decoded)
    media_kwargs = getattr(decoded, "mm_processor_kwargs", None)
    if media_kwargs:
        _check_media_kwargs(context, media_kwargs)
    return decoded


class _Named(msgspec.Struct):
    """A body of which nothing but the client's name for it is read."""

    rid: object = None
    request_id: object = None


def _name_in(body: bytes, max_len: int) -> str:
    """The client's name for the request in a body that is refused; "" if there is none."""
    try:
        return _name_of(msgspec.json.decode(body, type=_Named), max_len)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _name_of(decoded: msgspec.Struct, max_len: int) -> str:
    """The client's name for the request in its body; "" if it has none, several, or one that is too
    long."""
    for field in ("rid", "request_id"):
        name = getattr(decoded, field, None)
        if name and isinstance(name, str) and len(name) <= max_len:
            return name
    return ""


def _check_media_kwargs(context: ServerContext, kwargs: JsonObject) -> None:
    """Raise `ApiError` for unknown keys and wrong values, also in a request without media."""
    if context.media is None:
        name = next(iter(kwargs))
        message = (
            f"mm_processor_kwargs has {name[:64]!r}; nothing can be changed for this model, which "
            "takes no images, videos and sounds"
        )
        raise ApiError(400, message, param="mm_processor_kwargs")
    context.media.adjusted(kwargs)


def _decoded(
    limits: Limits, vocab_size: int | None, body: bytes, type: type[T]
) -> tuple[T, Set[str]]:
    """The body as a `type`, and the names of its other fields. Raises `ApiError`.

    The decoder does not release the interpreter, therefore the parts of the body are counted first.
    """
    if len(body) > INLINE_LEN and has_more_parts(body, limits.max_body_parts):
        most = limits.max_body_parts
        message = f"the body has more than {most:,} lists, objects and members of objects"
        raise over("max_body_parts", message)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        decoded: T = _decoder(type).decode(body)
    except msgspec.ValidationError as exc:
        if "got `float`" in str(exc):
            with_integers_only = with_integers(body)
            if with_integers_only != body:
                return _decoded(limits, vocab_size, with_integers_only, type)
        wrong = wrong_field(exc, body, type)
        raise ApiError(400, wrong.text, param=wrong.name or None) from exc
    except RecursionError as exc:
        raise ApiError(400, "the body is nested too deeply") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        if not body.strip():
            raise ApiError(400, "the body is empty; a JSON object is needed") from exc
        # Clients that cut texts by UTF-16 units write half surrogate pairs, editors on Windows a
        # byte order mark.
        whole = mended(body)
        if whole != body:
            return _decoded(limits, vocab_size, whole, type)
        raise ApiError(400, f"the body is not valid JSON: {exc}") from exc
    check_body(limits, decoded)
    check_numbers(decoded, vocab_size)
    others = fields.keys() - set(type.__struct_encode_fields__)
    refused = others & REFUSED
    if issubclass(type, ExtraSamplingFields):
        refused |= others & type.refused
    for name in refused:
        _require_nothing(name, fields[name])
    return decoded, others - refused - IGNORED


def mended(body: bytes) -> bytes:
    """The body with U+FFFD for half surrogate pairs and without a byte order mark; unchanged if it
    is not valid UTF-8."""
    try:
        return readable_json(body.decode().lstrip("\ufeff")).encode()
    except UnicodeDecodeError:
        return body


class EarlyBody:
    """A body that has been read before it was known who answers: `read_body` takes it, and whoever
    does not know of it gets it from `receive`."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        """`receive`: what follows the body."""
        self._body: bytes | None = body
        self._receive = receive

    def take(self) -> bytes | None:
        """The body; None if it has been taken already. It is not kept for longer."""
        body = self._body
        self._body = None
        return body

    def receive(self) -> Awaitable[Message]:
        if self._body is None:
            return self._receive()
        return self._message()

    async def _message(self) -> Message:
        return {"type": "http.request", "body": self.take(), "more_body": False}


async def read_body(
    request: Request, limit: int, timeout_s: float, name: str = "max_body_mb"
) -> bytes:
    """The whole body. `name`: name of the limit.

    Raises `ApiError` 413 as soon as the body is known to be too large, 408 if it does not arrive in
    time, and `ClientGone` if the client disconnects.
    """
    early: EarlyBody | None = request.scope.get("weft.body")
    if early is not None:
        body = early.take()
        if body is not None:
            if len(body) > limit:
                raise _too_large(name, limit)
            return body
    began_s = time.perf_counter()
    connection: BodyConnection | None = request.scope.get("weft.connection")
    is_whole = connection is not None and not connection.is_receiving
    if not is_whole:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise _too_large(name, limit)
    chunks: list[bytes] = []
    size = 0
    try:
        # A timer costs more than all else here, and what has arrived needs none.
        async with _NO_TIMER if is_whole else asyncio.timeout(timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone(f"when {size:,} bytes of the body had arrived")
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    raise _too_large(name, limit)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError as exc:
        text = f"the body did not arrive within {timeout_s:g} s"
        raise over("body_timeout_s", text, status=408) from exc
    finally:
        spent("read", began_s)


def _too_large(name: str, limit: int) -> ApiError:
    option = "--" + name.replace("_", "-")
    message = f"the body is larger than the limit of {limit / 1e6:g} MB ({option})"
    return over(name, message, status=413)


def _require_nothing(name: str, raw: msgspec.Raw) -> None:
    """Refuse a field that is not supported, unless its value has no effect."""
    try:
        has_effect = not asks_for_nothing(name, msgspec.json.decode(raw))
    except RecursionError:  # lists in lists; making them needs more of the stack than passing by
        has_effect = True
    if has_effect:
        raise not_supported(name, "yet" if name in REFUSED else "by this API")


def _require_json(request: Request) -> None:
    """Raise `ApiError` 415 for a content type that a browser page of another origin can send.

    Such a page can send any body, but not with the type of JSON, so it cannot forge a request.
    Programs may omit the type. Ollama's routes accept any type from programs, because Ollama's
    documented calls use curl, which sends JSON with the type of a form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        return
    may_be_any = not kind or request.scope["path"].startswith("/api/")
    if is_from_browser(request.headers) or not may_be_any:
        raise ApiError(415, "the content type of the body must be application/json")


@cache
def _decoder(type: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type of body.

    While msgspec makes a decoder, it runs Python code and already lets other threads use its
    incomplete description of the structs in it, which crashes them. So one thread at a time makes a
    decoder.
    """
    with _making_a_decoder:
        return msgspec.json.Decoder(type)


def json_response(value: Any) -> Response:
    """An answer that is one JSON value."""
    return Response(json_bytes(value), media_type="application/json")


def written(value: Any) -> msgspec.Raw:
    """A part of an answer, already encoded.

    Encoding does not release the interpreter; a large answer that is encoded in parts releases it
    between them.
    """
    return msgspec.Raw(json_bytes(value))


def has_body(request: Request) -> bool:
    """Whether a request with an optional body has one."""
    length = request.headers.get("content-length", "0")
    return length != "0" or "transfer-encoding" in request.headers
